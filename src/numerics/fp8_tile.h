// fp8_tile.h: E4M3 activations and folded weights of the W4A8 path.
//
// Values    activation = e4m3 * d, d FP32 for one token and 128 columns; d = a / 448 with a the largest
//           finite magnitude there (a = 0 gives d = 1). A NaN or an infinity is coded 0x7F, alone.
// Folding   a weight's code and block scale become one operand, e4m3(e2m1 * s * 2^-3). It is at most 336;
//           2^3 and the tensor scale are applied to the sum. It rounds (to nearest, ties to even).
#pragma once

#include <cstdint>

#include "numerics/e2m1.h"
#include "numerics/e4m3.h"

namespace megamoe {

inline constexpr int kFp8Tile = 128;
inline constexpr float kFp8FoldShift = 0x1p-3f;

MEGAMOE_HD constexpr float fp8_tile_scale(float amax) {
  if (amax == 0.0f) return 1.0f;
  const float d = amax / kE4M3Max;
  return d == 0.0f ? 0x1p-149f : d;
}

MEGAMOE_HD constexpr std::uint8_t fp8_code(float x, float d) {
  return is_finite(x) ? encode_e4m3(x == 0.0f ? x : x / d) : kE4M3NaN;
}

MEGAMOE_HD constexpr std::uint8_t fp8_fold(std::uint8_t code, std::uint8_t scale) {
  return encode_e4m3(decode_e2m1(code) * decode_e4m3(scale) * kFp8FoldShift);
}

}  // namespace megamoe
