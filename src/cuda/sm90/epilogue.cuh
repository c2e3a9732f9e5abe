// epilogue.cuh: what happens to the accumulators before anything leaves the chip.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "backend/backend.h"
#include "cuda/sm90/grouped_gemm.cuh"
#include "megamoe/layer.h"
#include "numerics/bf16.h"
#include "numerics/exp.h"
#include "numerics/nvfp4.h"

namespace megamoe::sm90 {

// act(gate, up) and, for the interleaved mode, what stands in the gate column.
struct Activated {
  float gate;
  float h;
};
__device__ inline Activated activate(const ActivationConfig& config, float gate, float up) {
  switch (config.kind) {
    case Activation::kSwiGlu: {
      const float g = silu_f32(gate);
      return {g, __fmul_rn(g, up)};
    }
    case Activation::kSwiGluClamped: {
      const float limit = config.limit;
      gate = gate > limit ? limit : gate;
      up = up > limit ? limit : up < -limit ? -limit : up;
      const float g = silu_f32(gate);
      return {g, __fmul_rn(g, up)};
    }
    case Activation::kGptOss: {
      const float limit = config.limit;
      gate = gate > limit ? limit : gate;
      up = up > limit ? limit : up < -limit ? -limit : up;
      const float g = __fmul_rn(gate, sigmoid_f32(__fmul_rn(config.alpha, gate)));
      return {g, __fmul_rn(g, __fadd_rn(up, 1.0f))};
    }
    case Activation::kRelu2: {
      const float r = up < 0.0f ? 0.0f : up;
      return {0.0f, __fmul_rn(r, r)};
    }
  }
  return {0.0f, 0.0f};
}

// 2^-kOperandShift once for each operand that was decoded from NVFP4: exact.
template <class Config>
constexpr float operand_factor() {
  return Config::kFormat == TokenFormat::kNvfp4 ? 0x1p14f : 0x1p7f;
}

// First GEMM of a gated layer.
struct GatedEpilogue {
  L1Output mode;
  ActivationConfig activation;
  std::int64_t intermediate;
  const float* token_scales;      // NVFP4 tokens: tensor scale of each token row; null for BF16
  const std::int32_t* gather;     // as in GemmParams
  const float* weight_scales;     // [experts][2]: gate's and up's tensor scale
  const float* gate_bias;         // [experts][I] or null
  const float* up_bias;           // [experts][I] or null
  __nv_bfloat16* values;          // kInterleavedBf16 [R, 2I], kCompactBf16 [R, I]
  std::uint8_t* codes;            // kNvfp4 [R, I / 2]
  std::uint8_t* block_scales;     // kNvfp4 [R, I / 16]
  const float* h_scales;          // kNvfp4 [R]: tensor scale of each row of h
  unsigned long long* saturated;  // counts blocks cut to 448, or null

  template <class Config>
  __device__ void run(const Tile& tile, std::int64_t weight_tile, int j, const float4 (&acc)[2]) const {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, group = lane / 4;
    const std::int64_t col =
        weight_tile * 64 + warp * 16 + group * 2;  // this thread's columns of h: col, col + 1
    const bool inside = col < intermediate;        // the same for the 8 lanes of a block
    const float gate_scale = weight_scales[2 * tile.expert], up_scale = weight_scales[2 * tile.expert + 1];
    float gb[2] = {0.0f, 0.0f}, ub[2] = {0.0f, 0.0f};
    if (gate_bias != nullptr && inside) {
      const std::int64_t at = tile.expert * intermediate + col;
      gb[0] = gate_bias[at], gb[1] = gate_bias[at + 1], ub[0] = up_bias[at], ub[1] = up_bias[at + 1];
    }
    const float factor = operand_factor<Config>();
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int token = 8 * j + 2 * (lane % 4) + c;
      const bool valid = token < tile.rows && inside;
      const std::int64_t row = tile.first_row + token;
      float x_scale = 1.0f;
      if (token_scales != nullptr && valid) x_scale = token_scales[gather != nullptr ? gather[row] : row];
      Activated out[2];
#pragma unroll
      for (int f = 0; f < 2; ++f) {
        float gate = __fmul_rn(__fmul_rn((c == 0 ? acc[f].x : acc[f].y) * factor, x_scale), gate_scale);
        float up = __fmul_rn(__fmul_rn((c == 0 ? acc[f].z : acc[f].w) * factor, x_scale), up_scale);
        if (gate_bias != nullptr) gate = __fadd_rn(gate, gb[f]), up = __fadd_rn(up, ub[f]);
        out[f] = activate(activation, gate, up);
      }
      store(row, col, valid, group, out);
    }
  }

  // Eight lanes (one per group) hold the 16 columns of a block of h for one token.
  __device__ void store(std::int64_t row, std::int64_t col, bool valid, int group,
                        const Activated (&out)[2]) const {
    const __nv_bfloat162 h{__float2bfloat16_rn(out[0].h), __float2bfloat16_rn(out[1].h)};
    if (mode == L1Output::kCompactBf16) {
      if (valid) *reinterpret_cast<__nv_bfloat162*>(values + row * intermediate + col) = h;
    } else if (mode == L1Output::kInterleavedBf16) {
      __nv_bfloat16* at = values + row * 2 * intermediate + col / 8 * 16 + col % 8;
      if (valid) {
        *reinterpret_cast<__nv_bfloat162*>(at) =
            __nv_bfloat162{__float2bfloat16_rn(out[0].gate), __float2bfloat16_rn(out[1].gate)};
        *reinterpret_cast<__nv_bfloat162*>(at + 8) = h;
      }
    } else {
      const float x[2] = {__bfloat162float(h.x), __bfloat162float(h.y)};
      std::uint32_t amax = max(bits_of_float(x[0]) & kFloatMagnitude, bits_of_float(x[1]) & kFloatMagnitude);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) amax = max(amax, __shfl_xor_sync(~0u, amax, step));
      const float g = valid ? h_scales[row] : 1.0f;
      const bool finite = amax < kFloatInf;
      const Nvfp4Scale scale =
          finite ? nvfp4_block_scale(float_of_bits(amax), g) : Nvfp4Scale{kE4M3NaN, false};
      const float d = decode_e4m3(scale.code) * g;
      std::uint32_t word = finite ? nvfp4_code(x[0], d) | nvfp4_code(x[1], d) << 4 : 0u;
      word <<= group % 4 * 8;
      word |= __shfl_xor_sync(~0u, word, 4);
      word |= __shfl_xor_sync(~0u, word, 8);
      if (valid && group % 4 == 0)
        *reinterpret_cast<std::uint32_t*>(codes + row * (intermediate / 2) + col / 2) = word;
      if (valid && group == 0) {
        block_scales[row * (intermediate / 16) + col / 16] = scale.code;
        if (scale.saturated && saturated != nullptr) atomicAdd(saturated, 1ull);
      }
    }
  }
};

// Second GEMM: y_e in FP32.
struct PlainEpilogue {
  std::int64_t width;          // H
  const float* token_scales;   // NVFP4 h: tensor scale of each row; null for BF16
  const float* weight_scales;  // [experts]
  const float* bias;           // [experts][H] or null
  float* out;                  // [R, H]

  template <class Config>
  __device__ void run(const Tile& tile, std::int64_t weight_tile, int j, const float4 (&acc)[2]) const {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, group = lane / 4;
    const std::int64_t col = weight_tile * 128 + warp * 32 + group * 4;  // four adjacent columns of y
    if (col >= width) return;
    const float scale = weight_scales[tile.expert];
    float4 b = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (bias != nullptr) b = *reinterpret_cast<const float4*>(bias + tile.expert * width + col);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int token = 8 * j + 2 * (lane % 4) + c;
      if (token >= tile.rows) continue;
      const std::int64_t row = tile.first_row + token;
      const float x_scale = token_scales != nullptr ? token_scales[row] : 1.0f;
      const auto value = [&](float raw) {
        return __fmul_rn(__fmul_rn(raw * operand_factor<Config>(), x_scale), scale);
      };
      float4 y = c == 0 ? make_float4(value(acc[0].x), value(acc[1].x), value(acc[0].z), value(acc[1].z))
                        : make_float4(value(acc[0].y), value(acc[1].y), value(acc[0].w), value(acc[1].w));
      if (bias != nullptr) y = make_float4(y.x + b.x, y.y + b.y, y.z + b.z, y.w + b.w);
      *reinterpret_cast<float4*>(out + row * width + col) = y;
    }
  }
};

}  // namespace megamoe::sm90
