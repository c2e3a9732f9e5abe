// mxfp4.h: blocks of 32 E2M1 codes under one power of two.
//
// Values    e2m1 * 2^(scale - 127); the scale is E8M0, there is no tensor scale.
// Layout    a row of K elements (K a multiple of 32) is K/2 bytes of codes, element 2j in the low nibble
//           of byte j, and K/32 scale bytes, row-major.
// Quantise  scale = the least power of two with amax / 2^e <= 6 (nothing saturates), codes to nearest,
//           ties to even. An all-zero block gets 2^0. A block with a NaN or an infinity gets 0xFF, codes 0.
#pragma once

#include <cstdint>

#include "numerics/e2m1.h"
#include "numerics/e8m0.h"

namespace megamoe {

inline constexpr int kMxfp4Block = 32;

// The scale byte of a block whose largest magnitude is `a` (finite).
MEGAMOE_HD constexpr std::uint8_t mxfp4_block_scale(float a) {
  if (a == 0.0f) return kE8M0Bias;
  // a / 6 may round onto a power of two from above; one comparison (exact in double) puts that right.
  std::uint8_t code = encode_e8m0_up(a / kE2M1Max);
  if (code < 254 && static_cast<double>(a) > 6.0 * static_cast<double>(decode_e8m0(code))) ++code;
  return code;
}

// One block: reads x[0..31], writes 16 bytes of codes, returns the scale byte.
MEGAMOE_HD constexpr std::uint8_t mxfp4_quantize_block(const float* x, std::uint8_t* codes) {
  float a = 0.0f;
  bool finite = true;
  for (int i = 0; i < kMxfp4Block; ++i) {
    finite = finite && is_finite(x[i]);
    a = magnitude(x[i]) > a ? magnitude(x[i]) : a;
  }
  const std::uint8_t scale = finite ? mxfp4_block_scale(a) : kE8M0NaN;
  const float d = decode_e8m0(scale);
  for (std::int64_t j = 0; j < kMxfp4Block / 2; ++j) {
    codes[j] = finite
                   ? static_cast<std::uint8_t>(encode_e2m1(x[2 * j] / d) | encode_e2m1(x[2 * j + 1] / d) << 4)
                   : std::uint8_t{0};
  }
  return scale;
}

MEGAMOE_HD constexpr float mxfp4_value(std::uint8_t code, std::uint8_t scale) {
  return decode_e2m1(code) * decode_e8m0(scale);
}

}  // namespace megamoe
