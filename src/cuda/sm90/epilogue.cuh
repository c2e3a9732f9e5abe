// epilogue.cuh: what happens to the accumulators before anything leaves the chip.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "backend/backend.h"
#include "cuda/sm90/grouped_gemm.cuh"
#include "layer/activation.h"
#include "numerics/bf16.h"
#include "numerics/nvfp4.h"

namespace megamoe::sm90 {

// 2^-kOperandShift once for each operand that was decoded from NVFP4: exact.
template <class Config>
constexpr float operand_factor() {
  return Config::kFormat == TokenFormat::kNvfp4 ? 0x1p14f : 0x1p7f;
}

// Where h goes, and in which form.
struct HiddenOut {
  L1Output mode;
  std::int64_t intermediate;
  __nv_bfloat16* values;          // kInterleavedBf16 [R, 2I], kCompactBf16 [R, I]
  std::uint8_t* codes;            // kNvfp4 [R, I / 2]
  std::uint8_t* block_scales;     // kNvfp4 [R, I / 16]
  const float* tensor_scales;     // kNvfp4 [R]: of each row of h
  unsigned long long* saturated;  // counts blocks cut to 448, or null

  // kColumns adjacent columns of h for one token, from `col`. A block of 16 lies in 16 / kColumns lanes, 4
  // apart; `at` is this lane's place among them. All lanes of a warp come here together; the invalid ones
  // store nothing.
  template <int kColumns>
  __device__ void quantize(const float (&h)[kColumns], std::int64_t row, std::int64_t col, bool valid,
                           int at) const {
    constexpr int kLanes = 16 / kColumns;
    float x[kColumns];
    std::uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      x[i] = __bfloat162float(__float2bfloat16_rn(h[i]));
      amax = max(amax, bits_of_float(x[i]) & kFloatMagnitude);
    }
#pragma unroll
    for (int step = 4; step < 4 * kLanes; step *= 2) amax = max(amax, __shfl_xor_sync(~0u, amax, step));
    const float g = valid ? tensor_scales[row] : 1.0f;
    const bool finite = amax < kFloatInf;
    const Nvfp4Scale scale = finite ? nvfp4_block_scale(float_of_bits(amax), g) : Nvfp4Scale{kE4M3NaN, false};
    const float d = decode_e4m3(scale.code) * g;
    // Eight codes make a word: the lanes that share one put their codes together.
    constexpr int kPerWord = 8 / kColumns;
    std::uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) word |= static_cast<std::uint32_t>(nvfp4_code(x[i], d)) << (4 * i);
    word = finite ? word << (at % kPerWord * kColumns * 4) : 0u;
#pragma unroll
    for (int step = 4; step < 4 * kPerWord; step *= 2) word |= __shfl_xor_sync(~0u, word, step);
    if (!valid) return;
    if (at % kPerWord == 0)
      *reinterpret_cast<std::uint32_t*>(codes + row * (intermediate / 2) + col / 2) = word;
    if (at == 0) {
      block_scales[row * (intermediate / 16) + col / 16] = scale.code;
      if (scale.saturated && saturated != nullptr) atomicAdd(saturated, 1ull);
    }
  }
};

// The tensor scale of the token that a routed row reads; 1 for BF16 tokens.
__device__ inline float token_scale(const float* scales, const std::int32_t* gather, std::int64_t row,
                                    bool valid) {
  if (scales == nullptr || !valid) return 1.0f;
  return scales[gather != nullptr ? gather[row] : row];
}

// First GEMM of a gated layer.
struct GatedEpilogue {
  HiddenOut out;
  ActivationConfig activation;
  const float* token_scales;   // NVFP4 tokens: tensor scale of each token row; null for BF16
  const std::int32_t* gather;  // as in GemmParams
  const float* weight_scales;  // [experts][2]: gate's and up's tensor scale
  const float* gate_bias;      // [experts][I] or null
  const float* up_bias;        // [experts][I] or null

  template <class Config>
  __device__ void run(const Tile& tile, std::int64_t weight_tile, int j, const float4 (&acc)[2]) const {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, group = lane / 4;
    const std::int64_t col =
        weight_tile * 64 + warp * 16 + group * 2;  // this thread's columns of h: col, col + 1
    const bool inside = col < out.intermediate;    // the same for the 8 lanes of a block
    const float gate_scale = weight_scales[2 * tile.expert], up_scale = weight_scales[2 * tile.expert + 1];
    float gb[2] = {0.0f, 0.0f}, ub[2] = {0.0f, 0.0f};
    if (gate_bias != nullptr && inside) {
      const std::int64_t at = tile.expert * out.intermediate + col;
      gb[0] = gate_bias[at], gb[1] = gate_bias[at + 1], ub[0] = up_bias[at], ub[1] = up_bias[at + 1];
    }
    const float factor = operand_factor<Config>();
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int token = 8 * j + 2 * (lane % 4) + c;
      const bool valid = token < tile.rows && inside;
      const std::int64_t row = tile.first_row + token;
      const float x_scale = token_scale(token_scales, gather, row, valid);
      float g[2], h[2];
#pragma unroll
      for (int f = 0; f < 2; ++f) {
        float gate = __fmul_rn(__fmul_rn((c == 0 ? acc[f].x : acc[f].y) * factor, x_scale), gate_scale);
        float up = __fmul_rn(__fmul_rn((c == 0 ? acc[f].z : acc[f].w) * factor, x_scale), up_scale);
        if (gate_bias != nullptr) gate = __fadd_rn(gate, gb[f]), up = __fadd_rn(up, ub[f]);
        const ActivatedPair activated = activate(activation, gate, up);
        g[f] = activated.gate, h[f] = activated.h;
      }
      if (out.mode == L1Output::kNvfp4) {
        out.quantize(h, row, col, valid, group);
      } else if (valid && out.mode == L1Output::kCompactBf16) {
        *reinterpret_cast<__nv_bfloat162*>(out.values + row * out.intermediate + col) =
            __floats2bfloat162_rn(h[0], h[1]);
      } else if (valid) {
        __nv_bfloat16* at = out.values + row * 2 * out.intermediate + col / 8 * 16 + col % 8;
        *reinterpret_cast<__nv_bfloat162*>(at) = __floats2bfloat162_rn(g[0], g[1]);
        *reinterpret_cast<__nv_bfloat162*>(at + 8) = __floats2bfloat162_rn(h[0], h[1]);
      }
    }
  }
};

// The four adjacent columns of a kPlain tile that a thread holds for token c of two.
__device__ inline float4 adjacent_columns(const float4 (&acc)[2], int c) {
  return c == 0 ? make_float4(acc[0].x, acc[1].x, acc[0].z, acc[1].z)
                : make_float4(acc[0].y, acc[1].y, acc[0].w, acc[1].w);
}

// First GEMM of a layer without gate: relu(up)^2.
struct Relu2Epilogue {
  HiddenOut out;               // kCompactBf16 or kNvfp4
  const float* token_scales;   // as in GatedEpilogue
  const std::int32_t* gather;  // as in GemmParams
  const float* weight_scales;  // [experts]
  const float* bias;           // [experts][I] or null

  template <class Config>
  __device__ void run(const Tile& tile, std::int64_t weight_tile, int j, const float4 (&acc)[2]) const {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, group = lane / 4;
    const std::int64_t col = weight_tile * 128 + warp * 32 + group * 4;
    const bool inside = col < out.intermediate;  // the same for the 4 lanes of a block
    const float scale = weight_scales[tile.expert];
    float4 b = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (bias != nullptr && inside)
      b = *reinterpret_cast<const float4*>(bias + tile.expert * out.intermediate + col);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int token = 8 * j + 2 * (lane % 4) + c;
      const bool valid = token < tile.rows && inside;
      const std::int64_t row = tile.first_row + token;
      const float x_scale = token_scale(token_scales, gather, row, valid);
      const float4 raw = adjacent_columns(acc, c);
      const auto value = [&](float sum, float offset) {
        float up = __fmul_rn(__fmul_rn(sum * operand_factor<Config>(), x_scale), scale);
        if (bias != nullptr) up = __fadd_rn(up, offset);
        return activate({.kind = Activation::kRelu2}, 0.0f, up).h;
      };
      const float h[4] = {value(raw.x, b.x), value(raw.y, b.y), value(raw.z, b.z), value(raw.w, b.w)};
      if (out.mode == L1Output::kNvfp4) {
        out.quantize(h, row, col, valid, group % 4);
      } else if (valid) {
        auto* at = reinterpret_cast<__nv_bfloat162*>(out.values + row * out.intermediate + col);
        at[0] = __floats2bfloat162_rn(h[0], h[1]);
        at[1] = __floats2bfloat162_rn(h[2], h[3]);
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
      const float x_scale = token_scale(token_scales, nullptr, row, true);
      const auto value = [&](float raw) {
        return __fmul_rn(__fmul_rn(raw * operand_factor<Config>(), x_scale), scale);
      };
      const float4 raw = adjacent_columns(acc, c);
      float4 y = make_float4(value(raw.x), value(raw.y), value(raw.z), value(raw.w));
      if (bias != nullptr) y = make_float4(y.x + b.x, y.y + b.y, y.z + b.z, y.w + b.w);
      *reinterpret_cast<float4*>(out + row * width + col) = y;
    }
  }
};

}  // namespace megamoe::sm90
