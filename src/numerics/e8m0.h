// e8m0.h: a power of two in a byte, the block scales of MXFP4.
//
// Values    2^(code - 127) for 0..254; 0xFF is NaN. No zero, no sign. Code 0 is an FP32 subnormal.
#pragma once

#include <cstdint>

#include "numerics/float_bits.h"

namespace megamoe {

inline constexpr int kE8M0Bias = 127;
inline constexpr std::uint8_t kE8M0NaN = 0xFF;

MEGAMOE_HD constexpr float decode_e8m0(std::uint8_t code) {
  return code == kE8M0NaN ? float_of_bits(0x7FC00000u) : power_of_two(code - kE8M0Bias);
}

// The least power of two that is not below |x|: 0 for what lies below 2^-127, saturating at 2^127,
// 0xFF for NaN and infinity.
MEGAMOE_HD constexpr std::uint8_t encode_e8m0_up(float x) {
  if (!is_finite(x)) return kE8M0NaN;
  const std::uint32_t b = bits_of_float(x) & kFloatMagnitude;
  if (b <= bits_of_float(0x1p-127f)) return 0;
  if (b <= bits_of_float(0x1p-126f)) return 1;
  const std::uint32_t code = (b + 0x7FFFFFu) >> 23;
  return static_cast<std::uint8_t>(code < 254u ? code : 254u);
}

}  // namespace megamoe
