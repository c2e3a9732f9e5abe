// wgmma.h: warpgroup matrix products, BF16 in, FP32 out, the first operand in registers. The atoms are
// CuTe's.
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED  // every width, not only the round ones
#include <cstdint>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

#include "cuda/ptx/mbarrier.h"

namespace megamoe::ptx {

template <int kN>
struct WgmmaAtom;
#define MEGAMOE_WGMMA(n)                                                                       \
  template <>                                                                                  \
  struct WgmmaAtom<n> {                                                                        \
    using Type = cute::SM90::GMMA::MMA_64x##n##x16_F32BF16BF16_RS<cute::SM90::GMMA::Major::K,  \
                                                                  cute::SM90::GMMA::Major::K>; \
  }
MEGAMOE_WGMMA(8);
MEGAMOE_WGMMA(16);
MEGAMOE_WGMMA(24);
MEGAMOE_WGMMA(32);
MEGAMOE_WGMMA(48);
MEGAMOE_WGMMA(64);
MEGAMOE_WGMMA(80);
MEGAMOE_WGMMA(96);
MEGAMOE_WGMMA(112);
MEGAMOE_WGMMA(128);
MEGAMOE_WGMMA(144);
MEGAMOE_WGMMA(160);
MEGAMOE_WGMMA(176);
MEGAMOE_WGMMA(192);
MEGAMOE_WGMMA(208);
MEGAMOE_WGMMA(224);
MEGAMOE_WGMMA(240);
MEGAMOE_WGMMA(256);
#undef MEGAMOE_WGMMA

// acc[64 x kN] += a[64 x 16] * b[16 x kN]; asynchronous until wgmma_wait. Of `acc` the first kN / 2 are used.
template <int kN, int kAcc, std::size_t... kI>
__device__ inline void wgmma_impl(float (&acc)[kAcc], const std::uint32_t (&a)[4], std::uint64_t b,
                                  bool accumulate, std::index_sequence<kI...>) {
  WgmmaAtom<kN>::Type::fma(a[0], a[1], a[2], a[3], b, acc[kI]...,
                           accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}
template <int kN, int kAcc>
__device__ inline void wgmma(float (&acc)[kAcc], const std::uint32_t (&a)[4], std::uint64_t b,
                             bool accumulate) {
  static_assert(kN / 2 <= kAcc);
  wgmma_impl<kN>(acc, a, b, accumulate, std::make_index_sequence<kN / 2>());
}

__device__ inline void wgmma_fence() { cute::warpgroup_arrive(); }
__device__ inline void wgmma_commit() { cute::warpgroup_commit_batch(); }
template <int kPending>
__device__ inline void wgmma_wait() {
  cute::warpgroup_wait<kPending>();
}
// Keeps the compiler from moving reads or writes of accumulators across this point.
template <int kCount>
__device__ inline void wgmma_pin(float (&acc)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) cute::warpgroup_fence_operand(acc[i]);
}

// A tile of rows of 64 BF16 (128 bytes) in shared memory, 128-byte swizzle, 1024-byte aligned groups of 8
// rows.
__device__ inline std::uint64_t swizzled_descriptor(const void* tile) {
  constexpr std::uint64_t kSwizzle128 = 1ull << 62, kGroupStride = (1024ull >> 4) << 32, kUnused = 1ull << 16;
  return kSwizzle128 | kGroupStride | kUnused | ((shared_address(tile) & 0x3FFFF) >> 4);
}

}  // namespace megamoe::ptx
