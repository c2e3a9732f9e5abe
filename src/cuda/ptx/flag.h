// flag.h: counters in global memory by which CTAs tell each other that something has been written.
#pragma once

#include <cstdint>

namespace megamoe::ptx {

// Adds, after all that this thread has written or seen written.
__device__ inline void add_release(std::uint32_t* counter, std::uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}

// The same, and what was written before the additions that this one finds can be read after it.
__device__ inline std::uint32_t fetch_add(std::uint32_t* counter, std::uint32_t value) {
  std::uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(value)
               : "memory");
  return before;
}

// Reads; what was written before the additions that it has seen can be read after it.
__device__ inline std::uint32_t load_acquire(const std::uint32_t* counter) {
  std::uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

}  // namespace megamoe::ptx
