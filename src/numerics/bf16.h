// bf16.h: BF16, the upper half of an FP32.
//
// Values    s eeeeeeee mmmmmmm: FP32's range with 8 significant bits; subnormals, infinities and NaN.
// Rounding  to nearest, ties to even, overflow to infinity; a NaN stays a NaN of the same sign, quiet.
#pragma once

#include "megamoe/types.h"
#include "numerics/float_bits.h"

namespace megamoe {

MEGAMOE_HD constexpr float to_float(bf16 x) {
  return float_of_bits(static_cast<std::uint32_t>(x.bits) << 16);
}

MEGAMOE_HD constexpr bf16 to_bf16(float x) {
  const std::uint32_t b = bits_of_float(x);
  if (is_nan(x)) return {static_cast<std::uint16_t>((b >> 16) | 0x40u)};
  return {static_cast<std::uint16_t>(round_shift(b & kFloatMagnitude, 16) | ((b >> 16) & 0x8000u))};
}

}  // namespace megamoe
