// wgmma.h: warpgroup matrix products, BF16 or E4M3 in, FP32 out, the first operand in registers. The atoms
// are CuTe's.
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED  // every width, not only the round ones
#include <cstdint>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

#include "cuda/ptx/mbarrier.h"

namespace megamoe::ptx {

template <class Element, int kN>
struct WgmmaAtom;
struct Bf16 {};
struct Fp8 {};
#define MEGAMOE_WGMMA(n)                                                                       \
  template <>                                                                                  \
  struct WgmmaAtom<Bf16, n> {                                                                  \
    using Type = cute::SM90::GMMA::MMA_64x##n##x16_F32BF16BF16_RS<cute::SM90::GMMA::Major::K,  \
                                                                  cute::SM90::GMMA::Major::K>; \
  };                                                                                           \
  template <>                                                                                  \
  struct WgmmaAtom<Fp8, n> {                                                                   \
    using Type = cute::SM90::GMMA::MMA_64x##n##x32_F32E4M3E4M3_RS_TN<>;                        \
  }
MEGAMOE_WGMMA(8);
MEGAMOE_WGMMA(16);
MEGAMOE_WGMMA(24);
MEGAMOE_WGMMA(32);
MEGAMOE_WGMMA(40);
MEGAMOE_WGMMA(48);
MEGAMOE_WGMMA(56);
MEGAMOE_WGMMA(64);
MEGAMOE_WGMMA(72);
MEGAMOE_WGMMA(80);
MEGAMOE_WGMMA(88);
MEGAMOE_WGMMA(96);
MEGAMOE_WGMMA(104);
MEGAMOE_WGMMA(112);
MEGAMOE_WGMMA(120);
MEGAMOE_WGMMA(128);
MEGAMOE_WGMMA(136);
MEGAMOE_WGMMA(144);
MEGAMOE_WGMMA(160);
MEGAMOE_WGMMA(176);
MEGAMOE_WGMMA(192);
MEGAMOE_WGMMA(208);
MEGAMOE_WGMMA(224);
MEGAMOE_WGMMA(240);
MEGAMOE_WGMMA(256);
#undef MEGAMOE_WGMMA

// Where the second operand lies: a tile of rows of 128 bytes in shared memory, 128-byte swizzle,
// 1024-byte aligned groups of 8 rows. Adding bytes moves it; that never leaves the low word.
struct Descriptor {
  std::uint32_t low;

  __device__ static Descriptor swizzled(const void* tile) {
    constexpr std::uint32_t kUnused = 1u << 16;
    return {kUnused | ((shared_address(tile) & 0x3FFFF) >> 4)};
  }
  __device__ Descriptor operator+(int bytes) const { return {low + (bytes >> 4)}; }
  __device__ std::uint64_t bits() const {
    constexpr std::uint64_t kSwizzle128 = 1ull << 62, kGroupStride = (1024ull >> 4) << 32;
    return kSwizzle128 | kGroupStride | low;
  }
};

// acc[64 x kN] += a * b, or = a * b where kFresh; a [64 x 32 bytes], b [32 bytes x kN]; asynchronous until
// wgmma_wait.
template <class Element, int kN, bool kFresh, std::size_t... kI>
__device__ inline void wgmma_impl(float (&acc)[kN / 2], const std::uint32_t (&a)[4], std::uint64_t b,
                                  std::index_sequence<kI...>) {
  constexpr auto kScale = kFresh ? cute::SM90::GMMA::ScaleOut::Zero : cute::SM90::GMMA::ScaleOut::One;
  WgmmaAtom<Element, kN>::Type::fma(a[0], a[1], a[2], a[3], b, acc[kI]..., kScale);
}
template <class Element, int kN, bool kFresh = false>
__device__ inline void wgmma(float (&acc)[kN / 2], const std::uint32_t (&a)[4], Descriptor b) {
  wgmma_impl<Element, kN, kFresh>(acc, a, b.bits(), std::make_index_sequence<kN / 2>());
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

}  // namespace megamoe::ptx
