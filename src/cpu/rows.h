// rows.h: loops over rows of numbers that stand around the GEMMs. Written once in rows_loops.h, compiled for
// any CPU, for AVX2 and for AVX-512; the same bits.
#pragma once

#include <cstdint>

#include "megamoe/layer.h"
#include "megamoe/types.h"

namespace megamoe::cpu {

struct Rows {
  // out[16 * p + j] = (sums[p * stride + j] * factor) * scale, plus bias[16 * p + j] unless that is null.
  void (*finish)(const float* sums, std::int64_t stride, std::int64_t panels, float factor, float scale,
                 const float* bias, float* out);
  // h = act(gate, up). `gate` is replaced by what multiplies the up half: silu(gate), for gpt-oss
  // gate * sigmoid(alpha * gate). Without a gate, `gate` is not touched and may be null.
  void (*activate)(const ActivationConfig& config, float* gate, const float* up, std::int64_t count,
                   float* h);
  void (*to_bf16)(const float* in, std::int64_t count, bf16* out);
  // acc = acc + weight * in, the product rounded before.
  void (*add_weighted)(float* acc, float weight, const float* in, std::int64_t count);
  void (*add)(float* acc, const float* in, std::int64_t count);
};

extern const Rows kPortableRows, kAvx2Rows, kAvx512Rows;

}  // namespace megamoe::cpu
