// decode.cuh: NVFP4 to BF16 operands in registers, exact: each is value * 2^kOperandShift.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "cuda/sm90/weight_layout.h"

namespace megamoe::sm90 {

__device__ inline std::uint32_t mul_bf16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// The scales of steps 0 and 1 (or 2 and 3) of a row as two BF16, each scale * 2^119.
template <int kFirstStep>
__device__ inline std::uint32_t decode_scales(std::uint32_t word) {
  const std::uint32_t turned = kFirstStep == 0 ? word : __funnelshift_l(word, word, 8);
  return (turned & 0x0FF00FF0u) | 0x70007000u;
}

// a * (one half of b, in both places). The selector is part of the instruction.
template <int kHalf>
__device__ inline std::uint32_t mul_by_half(std::uint32_t a, std::uint32_t b) {
  const __nv_bfloat162 pair = *reinterpret_cast<const __nv_bfloat162*>(&b);
  const __nv_bfloat162 both = kHalf == 0 ? __low2bfloat162(pair) : __high2bfloat162(pair);
  const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&a), both);
  return *reinterpret_cast<const std::uint32_t*>(&product);
}

// The four registers of a wgmma step from one word (see weight_layout.h) and the scales of its two rows;
// kHalf says which half of the scale registers is this step's.
template <int kHalf>
__device__ inline void decode_word(std::uint32_t word, std::uint32_t scales0, std::uint32_t scales1,
                                   std::uint32_t (&a)[4]) {
  constexpr std::uint32_t kMagnitude = 0x01C001C0u, kSign = 0x80008000u;
  a[0] = mul_by_half<kHalf>(word & (kMagnitude | kSign), scales0);
  a[1] = mul_by_half<kHalf>((word << 3) & (kMagnitude | kSign), scales1);
  a[2] = mul_by_half<kHalf>(((word << 6) & kMagnitude) | ((word << 1) & kSign), scales0);
  a[3] = mul_by_half<kHalf>(((word >> 3) & kMagnitude) | ((word << 2) & kSign), scales1);
}

// 16 codes as checkpoints and quantisers pack them (8 bytes) and their E4M3 scale, to 16 BF16 in order.
__device__ inline void decode_block(uint2 codes, std::uint8_t e4m3, uint4 (&out)[2]) {
  const __half_raw half = __nv_cvt_fp8_to_halfraw(e4m3, __NV_E4M3);
  const __nv_bfloat16 scale = __float2bfloat16_rn(__half2float(__half(half)) * 0x1p119f);  // exact
  const std::uint32_t both = __byte_perm(__bfloat16_as_ushort(scale), 0, 0x1010);
  constexpr std::uint32_t kMagnitude = 0x01C001C0u, kSign = 0x80008000u;
  std::uint32_t words[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const std::uint32_t pair = ((i < 4 ? codes.x : codes.y) >> (i % 4 * 8)) & 0xFFu;
    const std::uint32_t spread = (pair | pair << 12) & 0x000F000Fu;  // one code in each half
    words[i] = mul_bf16x2(((spread << 6) & kMagnitude) | ((spread << 12) & kSign), both);
  }
  out[0] = make_uint4(words[0], words[1], words[2], words[3]);
  out[1] = make_uint4(words[4], words[5], words[6], words[7]);
}

}  // namespace megamoe::sm90
