// four_over_six.h: NVFP4 blocks that may put their largest value on 4 instead of 6.
//
// Why       between 4 and 6 the codes are coarsest. Scaling a block so that its largest value lands on 4 lets
//           it use the finer steps below, which pays for blocks with several values near the largest.
// Quantise  two candidates: the ordinary scale s6 = e4m3(w), w = a / (6 g), and s4 = e4m3(1.5 w), each cut to
//           [2^-9, 448] before it is rounded. Kept is the one whose decoded values have the smaller sum of
//           squared errors, added up in FP64 in element order; a tie goes to s6.
//           Because s4 is up to 1.5 times as large, a tensor scale of its own leaves room: amax / 1536, so
//           that w is at most 256 and 1.5 w at most 384.
// Format    unchanged: whoever decodes does not see which candidate was kept.
// Saturated as for NVFP4: w above 448. That s4 alone is cut harms nothing.
#pragma once

#include <cstdint>

#include "numerics/nvfp4.h"

namespace megamoe {

inline constexpr float kFourOverSixRange = kE2M1Max * 256.0f;  // 1536

// The sum of squared differences between x[0..15] and what its codes decode to.
MEGAMOE_HD constexpr double nvfp4_squared_error(const float* x, const std::uint8_t* codes, std::uint8_t scale,
                                                float g) {
  double sum = 0.0;
  for (int i = 0; i < kNvfp4Block; ++i) {
    const double error =
        static_cast<double>(nvfp4_value(nibble(codes, i), scale, g)) - static_cast<double>(x[i]);
    sum += error * error;
  }
  return sum;
}

// One block: reads x[0..15], writes 8 bytes of codes, returns the scale.
MEGAMOE_HD constexpr Nvfp4Scale four_over_six_quantize_block(const float* x, float g, std::uint8_t* codes) {
  const Nvfp4Amax a = nvfp4_block_amax(x);
  if (!a.finite) return nvfp4_fault_block(codes);
  const Nvfp4Scale six = nvfp4_block_scale(a.value, g);
  nvfp4_encode_block(x, six.code, g, codes);
  if (a.value == 0.0f) return six;

  const Nvfp4Scale four = nvfp4_round_scale(1.5f * (a.value / (kE2M1Max * g)));
  std::uint8_t codes_four[kNvfp4Block / 2] = {};
  nvfp4_encode_block(x, four.code, g, codes_four);
  if (nvfp4_squared_error(x, codes_four, four.code, g) >= nvfp4_squared_error(x, codes, six.code, g)) {
    return six;
  }
  for (std::int64_t j = 0; j < kNvfp4Block / 2; ++j) codes[j] = codes_four[j];
  return {four.code, six.saturated};
}

}  // namespace megamoe
