// combine.cuh: four columns of a token's experts added up, by a thread.
#pragma once

#include <cuda_bf16.h>

#include "cuda/combine.h"
#include "cuda/launch.h"

namespace megamoe::cuda {

inline constexpr int kCombineCols = 4;

__device__ inline float add_product(float acc, float w, float y) { return __fadd_rn(acc, __fmul_rn(w, y)); }

__device__ inline std::uint32_t to_bf16x2(float low, float high) {
  return static_cast<std::uint32_t>(__bfloat16_as_ushort(__float2bfloat16_rn(low))) |
         static_cast<std::uint32_t>(__bfloat16_as_ushort(__float2bfloat16_rn(high))) << 16;
}

// Whether y may be written eight bytes at a time.
inline bool combines_aligned(const CombineParams& p) {
  return aligned_to(p.y, 8) && p.y_stride % kCombineCols == 0;
}

// Columns from `col` on, which is less than p.hidden.
__device__ inline void combine_four(const CombineParams& p, std::int64_t token, std::int64_t col,
                                    bool aligned) {
  constexpr int kBatch = 4;  // slots whose loads are under way together
  const std::int32_t* rows = p.slot_to_row + token * p.top_k;
  const float* weights = p.weights + token * p.top_k;
  float4 acc = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int first = 0; first < p.top_k; first += kBatch) {
    // All loads of a batch before the first addition: they are what takes time.
    float4 y[kBatch];
    float w[kBatch];
    bool used[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int slot = first + i;
      const std::int64_t row = slot < p.top_k ? rows[slot] : -1;
      used[i] = row >= 0;
      if (!used[i]) continue;
      w[i] = weights[slot];
      y[i] = __ldcs(reinterpret_cast<const float4*>(p.expert_out + row * p.hidden + col));
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (!used[i]) continue;
      acc = make_float4(add_product(acc.x, w[i], y[i].x), add_product(acc.y, w[i], y[i].y),
                        add_product(acc.z, w[i], y[i].z), add_product(acc.w, w[i], y[i].w));
    }
  }
  if (p.shared != nullptr) {
    const float4 s = __ldcs(reinterpret_cast<const float4*>(p.shared + token * p.hidden + col));
    const float factor = p.shared_factors != nullptr ? p.shared_factors[token] : 1.0f;
    acc = make_float4(add_product(acc.x, factor, s.x), add_product(acc.y, factor, s.y),
                      add_product(acc.z, factor, s.z), add_product(acc.w, factor, s.w));
  }
  const uint2 y = make_uint2(to_bf16x2(acc.x, acc.y), to_bf16x2(acc.z, acc.w));
  bf16* out = p.y + token * p.y_stride + col;
  if (aligned) {
    *reinterpret_cast<uint2*>(out) = y;
  } else {
    out[0].bits = static_cast<std::uint16_t>(y.x);
    out[1].bits = static_cast<std::uint16_t>(y.x >> 16);
    out[2].bits = static_cast<std::uint16_t>(y.y);
    out[3].bits = static_cast<std::uint16_t>(y.y >> 16);
  }
}

}  // namespace megamoe::cuda
