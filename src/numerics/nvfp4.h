// nvfp4.h: blocks of 16 E2M1 codes under two scales.
//
// Values    e2m1 * e4m3(block) * g, with g the FP32 tensor scale. g is always kept as the multiplier.
// Layout    a row of K elements (K a multiple of 16) is K/2 bytes of codes and K/16 bytes of scales:
//
//             codes   | 1:0 | 3:2 | 5:4 | ... | 15:14 |   8 bytes a block, high nibble : low nibble
//             scales  | s   |                             one E4M3 byte a block, row-major
//
// Quantise  with a the largest magnitude of the block; every step in FP32, correctly rounded:
//             s = e4m3(a == 0 ? 1 : clamp(a / (6 g), 2^-9, 448)),  d = s * g,  q_i = e2m1(x_i / d)
//           A division, not a product with a reciprocal: the two differ next to ties.
//           If d underflows to zero, what is zero stays zero and the rest saturates.
// Faults    a block that holds a NaN or an infinity gets scale 0x7F (NaN) and codes 0: it decodes to
//           NaN, and no other block is touched.
// Saturated a block whose scale the clamp to 448 lowered by more than rounding error; counted, so that
//           a static g that is too small is seen.
#pragma once

#include <cstdint>

#include "numerics/e2m1.h"
#include "numerics/e4m3.h"

namespace megamoe {

inline constexpr int kNvfp4Block = 16;
inline constexpr float kNvfp4Range = kE2M1Max * kE4M3Max;  // 2688: the largest e2m1 * e4m3

// g for values up to `amax` (the largest finite magnitude of a tensor or a row), so that it lands on `range`.
// Never 0: an all-zero tensor gives 1, and an amax so small that the quotient underflows gives the least
// positive float.
MEGAMOE_HD constexpr float nvfp4_tensor_scale(float amax, float range = kNvfp4Range) {
  if (amax == 0.0f) return 1.0f;
  const float g = amax / range;
  return g == 0.0f ? 0x1p-149f : g;
}

struct Nvfp4Scale {
  std::uint8_t code;  // E4M3
  bool saturated;
};

// A block's largest finite magnitude, and whether all of its values are finite.
struct Nvfp4Amax {
  float value;
  bool finite;
};
MEGAMOE_HD constexpr Nvfp4Amax nvfp4_block_amax(const float* x) {
  Nvfp4Amax a = {0.0f, true};
  for (int i = 0; i < kNvfp4Block; ++i) {
    if (!is_finite(x[i])) {
      a.finite = false;
    } else if (magnitude(x[i]) > a.value) {
      a.value = magnitude(x[i]);
    }
  }
  return a;
}

// The scale of a block of largest magnitude a = 6 g `wanted`: cut to what E4M3 holds, then rounded.
MEGAMOE_HD constexpr Nvfp4Scale nvfp4_round_scale(float wanted) {
  const float cut = wanted < kE4M3Min ? kE4M3Min : wanted > kE4M3Max ? kE4M3Max : wanted;
  return {encode_e4m3(cut), wanted > kE4M3Max * (1.0f + 0x1p-20f)};
}

// The block's scale for its largest magnitude `a` (finite).
MEGAMOE_HD constexpr Nvfp4Scale nvfp4_block_scale(float a, float g) {
  return a == 0.0f ? Nvfp4Scale{encode_e4m3(1.0f), false} : nvfp4_round_scale(a / (kE2M1Max * g));
}

// The code of x under the decoded scale d = s * g.
MEGAMOE_HD constexpr std::uint8_t nvfp4_code(float x, float d) {
  return encode_e2m1(x == 0.0f ? x : x / d);  // keeps 0/0 from becoming a NaN's code
}

// The 8 bytes of codes of x[0..15], all finite, under the block scale `scale`.
MEGAMOE_HD constexpr void nvfp4_encode_block(const float* x, std::uint8_t scale, float g,
                                             std::uint8_t* codes) {
  const float d = decode_e4m3(scale) * g;
  for (std::int64_t j = 0; j < kNvfp4Block / 2; ++j) {
    codes[j] = static_cast<std::uint8_t>(nvfp4_code(x[2 * j], d) | nvfp4_code(x[2 * j + 1], d) << 4);
  }
}

// What a block with a NaN or an infinity becomes.
MEGAMOE_HD constexpr Nvfp4Scale nvfp4_fault_block(std::uint8_t* codes) {
  for (std::int64_t j = 0; j < kNvfp4Block / 2; ++j) codes[j] = 0;
  return {kE4M3NaN, false};
}

// One block: reads x[0..15], writes 8 bytes of codes, returns the scale.
MEGAMOE_HD constexpr Nvfp4Scale nvfp4_quantize_block(const float* x, float g, std::uint8_t* codes) {
  const Nvfp4Amax a = nvfp4_block_amax(x);
  if (!a.finite) return nvfp4_fault_block(codes);
  const Nvfp4Scale scale = nvfp4_block_scale(a.value, g);
  nvfp4_encode_block(x, scale.code, g, codes);
  return scale;
}

// Element i of a block's 8 bytes of codes.
MEGAMOE_HD constexpr std::uint8_t nibble(const std::uint8_t* codes, std::int64_t i) {
  return static_cast<std::uint8_t>(codes[i / 2] >> (i % 2 * 4) & 15);
}

// e2m1 * e4m3 is exact in FP32; the product with g rounds once.
MEGAMOE_HD constexpr float nvfp4_value(std::uint8_t code, std::uint8_t scale, float g) {
  return decode_e2m1(code) * decode_e4m3(scale) * g;
}

}  // namespace megamoe
