// e2m1.h: FP4, the 4-bit float that NVFP4 and MXFP4 weights are made of.
//
// Values    code 0..7 = 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign; no infinity, no NaN.
// Layout    s e e m. Two codes a byte: element 2j in the low nibble of byte j, 2j+1 in the high one.
// Rounding  to nearest, ties to even, saturating at 6. -0 and negatives too small to show keep the
//           sign (0x8); a NaN of either sign gives 0x7. The same as PTX cvt.rn.satfinite.e2m1x2.
//           One comparison with each midpoint decides; rounding 2x first would round twice (5.25 -> 4).
#pragma once

#include <cstdint>

#include "numerics/float_bits.h"

namespace megamoe {

inline constexpr float kE2M1Max = 6.0f;

// Twice the value of a code: an integer, which is what exact block dot products add up.
MEGAMOE_HD constexpr int e2m1_doubled(std::uint8_t code) {
  const int e = (code >> 1) & 3, m = code & 1;
  const int doubled = e == 0 ? m : (2 + m) << (e - 1);
  return code & 8 ? -doubled : doubled;
}

MEGAMOE_HD constexpr float decode_e2m1(std::uint8_t code) {
  const float value = 0.5f * static_cast<float>(e2m1_doubled(code & 7));
  return code & 8 ? -value : value;  // code 8 is -0
}

MEGAMOE_HD constexpr std::uint8_t encode_e2m1(float x) {
  if (is_nan(x)) return 0x7;
  const float a = magnitude(x);
  // Each midpoint belongs to its even neighbour: below to the even codes, above to the odd ones.
  const int code =
      (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
  return static_cast<std::uint8_t>(code | ((bits_of_float(x) >> 28) & 8u));
}

}  // namespace megamoe
