// copy.h: asynchronous copies from global to shared memory.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

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

// A box of a tensor of two dimensions, from element (column, row), to the same place in each CTA of a cluster
// of so many, reported to the barrier at the same place there; beyond the tensor there is zero, and its bytes
// count, too. The atoms are CuTe's.
template <int kCluster = 1>
__device__ inline void tensor_copy(void* to_shared, const CUtensorMap* tensor, int column, int row,
                                   std::uint64_t* barrier) {
  constexpr auto kHint = static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  if constexpr (kCluster == 1) {
    cute::SM90_TMA_LOAD_2D::copy(tensor, barrier, kHint, to_shared, column, row);
  } else {
    constexpr std::uint16_t kAll = (1 << kCluster) - 1;
    cute::SM90_TMA_LOAD_MULTICAST_2D::copy(tensor, barrier, kAll, kHint, to_shared, column, row);
  }
}

// 16, 8 or 2 bytes at a shared-memory address.
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

__device__ inline std::uint32_t load_shared2(std::uint32_t address) {
  std::uint16_t value;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(address));
  return value;
}

// Orders this thread's ordinary accesses to shared memory before the tensor cores' and the copy engine's.
__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace megamoe::ptx
