// copy.h: asynchronous copies from global to shared memory.
#pragma once

#include <cstdint>

#include "cuda/ptx/mbarrier.h"

namespace megamoe::ptx {

// The copy engine moves `bytes` (a multiple of 16, both ends 16-byte aligned) and reports them to `barrier`.
// Weights are read once by each SM: they leave the L2 first.
__device__ inline void bulk_copy(void* to_shared, const void* from_global, std::uint32_t bytes,
                                 std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(to_shared)),
      "l"(from_global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// 16 bytes by this thread, if `wanted`; only the first `valid` come from memory, the rest is zero.
__device__ inline void cp_async_16(void* to_shared, const void* from_global, int valid, bool wanted) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.b32 wanted, %3, 0;\n"
      "@wanted cp.async.cg.shared.global [%0], [%1], 16, %2;\n"
      "}\n" ::"r"(shared_address(to_shared)),
      "l"(from_global), "r"(valid), "r"(static_cast<int>(wanted))
      : "memory");
}

// 16 or 8 bytes at a shared-memory address.
__device__ inline uint4 load_shared16(std::uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address));
  return value;
}
__device__ inline uint2 load_shared8(std::uint32_t address) {
  uint2 value;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(address));
  return value;
}

// Orders this thread's ordinary accesses to shared memory before the tensor cores' and the copy engine's.
__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace megamoe::ptx
