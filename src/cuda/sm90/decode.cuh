// decode.cuh: NVFP4 weights to operands of wgmma in registers, each value * 2^operand_shift().
//
// BF16  exact: a multiplication by the scale.
// FP8   folded (numerics/fp8_tile.h): one of eight bytes that a table has for the scale, and the sign.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "cuda/sm90/weight_layout.h"
#include "numerics/fp8_tile.h"

namespace megamoe::sm90 {

// The scales of steps 0 and 1 (or 2 and 3) of a row as two BF16, each scale * 2^119.
template <int kFirstStep>
__device__ inline std::uint32_t decode_scales(std::uint32_t word) {
  const std::uint32_t turned = kFirstStep == 0 ? word : __funnelshift_l(word, word, 8);
  // One instruction, which takes one of the two constants from its own bits.
  std::uint32_t scales;
  constexpr int kAndOr = (0xF0 & 0xCC) | 0xAA;
  asm("lop3.b32 %0, %1, 0x0FF00FF0, %2, %3;" : "=r"(scales) : "r"(turned), "r"(0x70007000u), "n"(kAndOr));
  return scales;
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

// For each E4M3 scale what folding makes of the eight magnitudes. Lanes look up scales of their own, half a
// warp at a time: a copy for each of those lanes, in banks of its own.
inline constexpr int kFoldEntries = 128, kFoldCopies = 16;
__device__ inline uint2 fold_entry(int scale) {
  std::uint32_t words[2] = {};
#pragma unroll
  for (int magnitude = 0; magnitude < 8; ++magnitude) {
    const std::uint32_t folded =
        fp8_fold(static_cast<std::uint8_t>(magnitude), static_cast<std::uint8_t>(scale));
    words[magnitude / 4] |= folded << (magnitude % 4 * 8);
  }
  return make_uint2(words[0], words[1]);
}

// Four of the table's eight bytes, by the low four nibbles of `pick`, each below 8 (which __byte_perm would
// make sure of once more).
__device__ inline std::uint32_t pick_bytes(uint2 entry, std::uint32_t pick) {
  std::uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(entry.x), "r"(entry.y), "r"(pick));
  return bytes;
}

// Codes 0 to 3 and 4 to 7 of a word (see weight_layout.h), by the table's entry for their scale.
__device__ inline void decode_fp8_word(std::uint32_t word, uint2 entry, std::uint32_t& early,
                                       std::uint32_t& late) {
  constexpr std::uint32_t kPick = 0x77777777u, kSigns = 0x80808080u;
  const std::uint32_t pick = word & kPick;
  early = pick_bytes(entry, pick) | (word & kSigns);
  late = pick_bytes(entry, pick >> 16) | (word << 4 & kSigns);
}

}  // namespace megamoe::sm90
