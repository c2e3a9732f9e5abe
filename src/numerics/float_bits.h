// float_bits.h: the fields of an FP32 number, usable in constant expressions, on host and device.
#pragma once

#include <bit>
#include <cstdint>

#include "numerics/hd.h"

namespace megamoe {

MEGAMOE_HD constexpr std::uint32_t bits_of_float(float x) { return std::bit_cast<std::uint32_t>(x); }
MEGAMOE_HD constexpr float float_of_bits(std::uint32_t b) { return std::bit_cast<float>(b); }

inline constexpr std::uint32_t kFloatMagnitude = 0x7FFFFFFFu;
inline constexpr std::uint32_t kFloatInf = 0x7F800000u;

MEGAMOE_HD constexpr bool is_nan(float x) { return (bits_of_float(x) & kFloatMagnitude) > kFloatInf; }
MEGAMOE_HD constexpr bool is_finite(float x) { return (bits_of_float(x) & kFloatMagnitude) < kFloatInf; }
MEGAMOE_HD constexpr float magnitude(float x) { return float_of_bits(bits_of_float(x) & kFloatMagnitude); }

// 2^e for e in [-149, 127], exactly.
MEGAMOE_HD constexpr float power_of_two(int e) {
  return e >= -126 ? float_of_bits(static_cast<std::uint32_t>(e + 127) << 23)
                   : float_of_bits(1u << (e + 149));
}

// `value` without its lowest `shift` bits, rounded to nearest, ties to even. 0 < shift < 32.
MEGAMOE_HD constexpr std::uint32_t round_shift(std::uint32_t value, int shift) {
  const std::uint32_t half = 1u << (shift - 1);
  const std::uint32_t odd = (value >> shift) & 1u;
  return (value + half - 1u + odd) >> shift;
}

}  // namespace megamoe
