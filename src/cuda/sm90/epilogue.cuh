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

// What takes kOperandShift out of a sum again: exact.
inline constexpr float kOperandFactor = 0x1p7f;
static_assert(kOperandShift == -7);

// Where h goes, and in which form.
struct HiddenOut {
  L1Output mode;
  std::int64_t intermediate;
  __nv_bfloat16* values;          // kInterleavedBf16 [R, 2I], kCompactBf16 [R, I]
  std::uint8_t* codes;            // kNvfp4 [R, I / 2]
  std::uint8_t* block_scales;     // kNvfp4 [R, I / 16]
  const float* tensor_scales;     // kNvfp4 [R]: of each row of h
  unsigned long long* saturated;  // counts blocks cut to 448, or null

  __device__ float tensor_scale(std::int64_t row) const {
    return mode == L1Output::kNvfp4 ? tensor_scales[row] : 1.0f;
  }

  // Four adjacent columns of h of a row, from `col`, under tensor scale g. A block of 16 lies in four
  // adjacent lanes. All lanes of a warp come here together; the invalid ones store nothing.
  __device__ void quantize(const float (&h)[4], std::int64_t row, int col, bool valid, float g) const {
    float x[4];
    std::uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = __bfloat162float(__float2bfloat16_rn(h[i]));
      amax = max(amax, bits_of_float(x[i]) & kFloatMagnitude);
    }
    amax = max(amax, __shfl_xor_sync(~0u, amax, 1));
    amax = max(amax, __shfl_xor_sync(~0u, amax, 2));
    if (!valid) return;
    const bool finite = amax < kFloatInf;
    const Nvfp4Scale scale = finite ? nvfp4_block_scale(float_of_bits(amax), g) : Nvfp4Scale{kE4M3NaN, false};
    const float d = decode_e4m3(scale.code) * g;
    std::uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) word |= static_cast<std::uint32_t>(nvfp4_code(x[i], d)) << (4 * i);
    *reinterpret_cast<std::uint16_t*>(codes + row * (intermediate / 2) + col / 2) =
        static_cast<std::uint16_t>(finite ? word : 0u);
    if (col % 16 == 0) {
      block_scales[row * (intermediate / 16) + col / 16] = scale.code;
      if (scale.saturated && saturated != nullptr) atomicAdd(saturated, 1ull);
    }
  }

  // The same four columns, and what their gate columns hold, in whichever form is asked for.
  __device__ void store(const float (&gate)[4], const float (&h)[4], std::int64_t row, int col, bool valid,
                        float g) const {
    if (mode == L1Output::kNvfp4) {
      quantize(h, row, col, valid, g);
    } else if (valid && mode == L1Output::kCompactBf16) {
      store_bf16(h, values + row * intermediate + col);
    } else if (valid) {
      __nv_bfloat16* at = values + row * 2 * intermediate + col / 8 * 16 + col % 8;
      store_bf16(gate, at);
      store_bf16(h, at + 8);
    }
  }

 private:
  __device__ static void store_bf16(const float (&v)[4], __nv_bfloat16* at) {
    reinterpret_cast<__nv_bfloat162*>(at)[0] = __floats2bfloat162_rn(v[0], v[1]);
    reinterpret_cast<__nv_bfloat162*>(at)[1] = __floats2bfloat162_rn(v[2], v[3]);
  }
};

// Tensor scales of NVFP4 tokens; 1 for BF16.
struct TokensIn {
  const float* scales;         // of each token row, or null
  const std::int32_t* gather;  // as in GemmParams
  __device__ float scale(std::int64_t row) const {
    return scales == nullptr ? 1.0f : scales[gather != nullptr ? gather[row] : row];
  }
};

// A sum of products as the value it stands for.
__device__ inline float scaled(float sum, float token_scale, float weight_scale) {
  return __fmul_rn(__fmul_rn(sum * kOperandFactor, token_scale), weight_scale);
}

// The epilogues. run() gets four adjacent weight rows of one token (finish() in grouped_gemm.cuh); all lanes
// of a warp call it together, with adjacent items.

// First GEMM of a gated layer. Of 16 weight rows 8 are gate's and 8 up's: an item is four columns of h.
struct GatedEpilogue {
  static constexpr int kItemRows = 8;

  HiddenOut out;
  ActivationConfig activation;
  TokensIn in;
  const float* weight_scales;  // [experts][2]: gate's and up's tensor scale
  const float* gate_bias;      // [experts][I] or null
  const float* up_bias;        // [experts][I] or null

  __device__ TokenScales token_scales(std::int64_t row) const {
    return {in.scale(row), out.tensor_scale(row)};
  }

  template <class SumOf>
  __device__ void run(const Tile& tile, int weight_tile, int token, int item, const TokenScales& scales,
                      const SumOf& sum_of) const {
    const int col = weight_tile * (kTileRows / 2) + item * 4;
    const bool valid = token < tile.rows && col < out.intermediate;
    const int row_of_gate = item / 2 * 16 + item % 2 * 4;
    const float4 gates = sum_of(row_of_gate), ups = sum_of(row_of_gate + 8);
    const float gate_scale = weight_scales[2 * tile.expert], up_scale = weight_scales[2 * tile.expert + 1];
    float gate[4] = {gates.x, gates.y, gates.z, gates.w}, up[4] = {ups.x, ups.y, ups.z, ups.w}, h[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float g = scaled(gate[i], scales.in, gate_scale), u = scaled(up[i], scales.in, up_scale);
      if (gate_bias != nullptr && valid) {
        const std::int64_t at = tile.expert * out.intermediate + col + i;
        g = __fadd_rn(g, gate_bias[at]), u = __fadd_rn(u, up_bias[at]);
      }
      const ActivatedPair activated = activate(activation, g, u);
      gate[i] = activated.gate, h[i] = activated.h;
    }
    out.store(gate, h, tile.first_row + token, col, valid, scales.out);
  }
};

// First GEMM of a layer without gate: relu(up)^2.
struct Relu2Epilogue {
  static constexpr int kItemRows = 4;

  HiddenOut out;  // kCompactBf16 or kNvfp4
  TokensIn in;
  const float* weight_scales;  // [experts]
  const float* bias;           // [experts][I] or null

  __device__ TokenScales token_scales(std::int64_t row) const {
    return {in.scale(row), out.tensor_scale(row)};
  }

  template <class SumOf>
  __device__ void run(const Tile& tile, int weight_tile, int token, int item, const TokenScales& scales,
                      const SumOf& sum_of) const {
    const int col = weight_tile * kTileRows + item * 4;
    const bool valid = token < tile.rows && col < out.intermediate;
    const float4 ups = sum_of(item * 4);
    const float up[4] = {ups.x, ups.y, ups.z, ups.w};
    float h[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float u = scaled(up[i], scales.in, weight_scales[tile.expert]);
      if (bias != nullptr && valid) u = __fadd_rn(u, bias[tile.expert * out.intermediate + col + i]);
      h[i] = activate({.kind = Activation::kRelu2}, 0.0f, u).h;
    }
    out.store(h, h, tile.first_row + token, col, valid, scales.out);
  }
};

// Second GEMM: y_e in FP32.
struct PlainEpilogue {
  static constexpr int kItemRows = 4;

  std::int64_t width;  // H
  TokensIn in;
  const float* weight_scales;  // [experts]
  const float* bias;           // [experts][H] or null
  float* out;                  // [R, H]

  __device__ TokenScales token_scales(std::int64_t row) const { return {in.scale(row), 1.0f}; }

  template <class SumOf>
  __device__ void run(const Tile& tile, int weight_tile, int token, int item, const TokenScales& scales,
                      const SumOf& sum_of) const {
    const int col = weight_tile * kTileRows + item * 4;
    if (token >= tile.rows || col >= width) return;
    const float4 sums = sum_of(item * 4);
    const float scale = weight_scales[tile.expert];
    float4 y = make_float4(scaled(sums.x, scales.in, scale), scaled(sums.y, scales.in, scale),
                           scaled(sums.z, scales.in, scale), scaled(sums.w, scales.in, scale));
    if (bias != nullptr) {
      const float4 b = *reinterpret_cast<const float4*>(bias + tile.expert * width + col);
      y = make_float4(__fadd_rn(y.x, b.x), __fadd_rn(y.y, b.y), __fadd_rn(y.z, b.z), __fadd_rn(y.w, b.w));
    }
    *reinterpret_cast<float4*>(out + static_cast<std::int64_t>(tile.first_row + token) * width + col) = y;
  }
};

}  // namespace megamoe::sm90
