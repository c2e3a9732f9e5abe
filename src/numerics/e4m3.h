// e4m3.h: FP8 E4M3 ("fn"), the block scales of NVFP4 and the operands of the W4A8 path.
//
// Values    s eeee mmm, bias 7. Exponent 0: m * 2^-9. Exponent 15 is an ordinary one: the largest is
//           0x7E = 448. No infinity; 0x7F and 0xFF are the only NaNs.
// Rounding  to nearest, ties to even, with the carry into the exponent (250 is 256, not 240);
//           saturating at 448; NaN gives 0x7F. The sign of zero is kept.
#pragma once

#include <cstdint>

#include "numerics/float_bits.h"

namespace megamoe {

inline constexpr float kE4M3Max = 448.0f;
inline constexpr float kE4M3Min = 0x1p-9f;  // the least positive value, a subnormal
inline constexpr std::uint8_t kE4M3NaN = 0x7F;

MEGAMOE_HD constexpr float decode_e4m3(std::uint8_t code) {
  const std::uint32_t sign = static_cast<std::uint32_t>(code & 0x80u) << 24;
  const std::uint32_t exponent = (code >> 3) & 15u, mantissa = code & 7u;
  if ((code & 0x7Fu) == kE4M3NaN) return float_of_bits(sign | 0x7FC00000u);
  const float value = exponent == 0 ? static_cast<float>(mantissa) * kE4M3Min
                                    : float_of_bits(((exponent + 120u) << 23) | (mantissa << 20));
  return float_of_bits(sign | bits_of_float(value));
}

MEGAMOE_HD constexpr std::uint8_t encode_e4m3(float x) {
  if (is_nan(x)) return kE4M3NaN;
  const std::uint32_t sign = (bits_of_float(x) >> 24) & 0x80u;
  const std::uint32_t b = bits_of_float(x) & kFloatMagnitude;
  std::uint32_t code = 0;
  if (b >= bits_of_float(0x1p-6f)) {
    // normal: rebias by 120, round away 20 bits; clamping first keeps the shift from overflowing
    const std::uint32_t clamped = b < bits_of_float(512.0f) ? b : bits_of_float(512.0f);
    code = round_shift(clamped - (120u << 23), 20);
    if (code > 0x7Eu) code = 0x7Eu;
  } else if (b > bits_of_float(0x1p-10f)) {
    // subnormal: the significand in units of 2^-9; half a unit (2^-10) itself is a tie that goes to 0
    const int exponent = static_cast<int>(b >> 23) - 127;
    code = round_shift((b & 0x7FFFFFu) | 0x800000u, 14 - exponent);
  }
  return static_cast<std::uint8_t>(sign | code);
}

}  // namespace megamoe
