// fp16.h: IEEE half precision.
//
// Values    s eeeee mmmmmmmmmm, bias 15: 11 significant bits, up to 65504, subnormals in steps of 2^-24.
// Rounding  to nearest, ties to even, overflow (from 65520) to infinity; a NaN stays a quiet NaN.
#pragma once

#include "megamoe/types.h"
#include "numerics/float_bits.h"

namespace megamoe {

MEGAMOE_HD constexpr float to_float(fp16 x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
  const std::uint32_t exponent = (x.bits >> 10) & 0x1Fu;
  const std::uint32_t mantissa = x.bits & 0x3FFu;
  if (exponent == 31) return float_of_bits(sign | kFloatInf | (mantissa << 13));
  if (exponent == 0) {
    const float value = static_cast<float>(mantissa) * power_of_two(-24);
    return float_of_bits(sign | bits_of_float(value));
  }
  return float_of_bits(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

MEGAMOE_HD constexpr fp16 to_fp16(float x) {
  const std::uint32_t sign = (bits_of_float(x) >> 16) & 0x8000u;
  const std::uint32_t b = bits_of_float(x) & kFloatMagnitude;
  if (b > kFloatInf) return {static_cast<std::uint16_t>(sign | 0x7E00u | ((b >> 13) & 0x3FFu))};
  if (b >= bits_of_float(65520.0f)) return {static_cast<std::uint16_t>(sign | 0x7C00u)};
  const int exponent = static_cast<int>(b >> 23) - 127;
  if (exponent >= -14) {  // normal: rebias, then round; a carry walks into the exponent as it should
    return {static_cast<std::uint16_t>(sign | round_shift(b - (112u << 23), 13))};
  }
  if (exponent < -25) return {static_cast<std::uint16_t>(sign)};  // below half of the least subnormal
  const std::uint32_t significand = (b & 0x7FFFFFu) | 0x800000u;
  return {static_cast<std::uint16_t>(sign | round_shift(significand, -exponent - 1))};
}

}  // namespace megamoe
