// epilogue.cuh: what happens to the accumulators before anything leaves the chip.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "backend/backend.h"
#include "cuda/activate.cuh"
#include "cuda/bf16_pair.cuh"
#include "cuda/encode.cuh"
#include "cuda/sm90/fp8_rows.h"
#include "cuda/sm90/grouped_gemm.cuh"
#include "layer/activation.h"
#include "numerics/bf16.h"
#include "numerics/nvfp4.h"

namespace megamoe::sm90 {

// Where h goes, and in which form.
struct HiddenOut {
  L1Output mode;
  int intermediate;
  __nv_bfloat16* values;       // kInterleavedBf16 [R, 2I], kCompactBf16 [R, I]; kNvfp4: null, or [R, I] for
                               // what codes and scales stand for, instead of them
  std::uint8_t* codes;         // kNvfp4 [R, I / 2]; kFp8: as fp8_rows.h says
  std::uint8_t* block_scales;  // kNvfp4 [R, I / 16]
  const float* tensor_scales;  // kNvfp4 [R]: of each row of h, positive
  float* fp8_scales;           // kFp8: as fp8_rows.h says
  std::int64_t fp8_pitch;      // of fp8_scales
  unsigned long long* saturated;  // counts blocks cut to 448, or null

  __device__ float tensor_scale(std::int64_t row) const {
    return mode == L1Output::kNvfp4 ? tensor_scales[row] : 1.0f;
  }

  // Four adjacent columns of h of a row, from `col`, under tensor scale g. A block of 16 lies in four
  // adjacent lanes. All lanes of a warp come here together; the invalid ones store nothing.
  __device__ void quantize(const float (&h)[4], std::int64_t row, int col, bool valid, float g) const {
    const std::uint32_t x[1][2] = {{cuda::bf16_pair(h[0], h[1]), cuda::bf16_pair(h[2], h[3])}};
    std::uint32_t amax =
        cuda::larger_of(__vmaxu2(x[0][0] & cuda::kPairMagnitudes, x[0][1] & cuda::kPairMagnitudes));
    amax = max(amax, __shfl_xor_sync(~0u, amax, 1));
    amax = max(amax, __shfl_xor_sync(~0u, amax, 2));
    if (!valid) return;
    cuda::FourCodes four[1];
    const Nvfp4Scale scale = cuda::encode_fours(x, amax, g, four);
    if (values != nullptr) {
      *reinterpret_cast<uint2*>(values + row * intermediate + col) =
          four[0].decoded(x[0], cuda::decoding_scale(scale.code));
    } else {
      *reinterpret_cast<std::uint16_t*>(codes + row * (intermediate / 2) + col / 2) =
          static_cast<std::uint16_t>(amax < kFloatInf ? four[0].joined(x[0]) : 0);
      if (col % 16 == 0) block_scales[row * (intermediate / 16) + col / 16] = scale.code;
    }
    if (col % 16 == 0 && scale.saturated && saturated != nullptr) atomicAdd(saturated, 1ull);
  }

  // The same to E4M3, of kTogether tokens. A group of 128 columns lies in the lanes of a warp; columns beyond
  // the last are zero.
  template <class Sums>
  __device__ void quantize_fp8(const float (&h)[Sums::kTogether][4], const Tile& tile, int token,
                               int col) const {
    constexpr int kTogether = Sums::kTogether;
    float x[kTogether][4], d[kTogether];
    std::uint32_t amax[kTogether], codes_of[kTogether];
    bool finite = true;
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      round_to_bf16(h[k], x[k]);
      std::uint32_t magnitudes[4], any = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (col >= intermediate) x[k][i] = 0.0f;
        magnitudes[i] = bits_of_float(x[k][i]) & kFloatMagnitude;
        any = max(any, magnitudes[i]);
      }
      amax[k] = any;
      if (any >= kFloatInf) {
        finite = false;
        amax[k] = 0;
        for (const std::uint32_t magnitude : magnitudes)
          amax[k] = max(amax[k], magnitude < kFloatInf ? magnitude : 0);
      }
    }
#pragma unroll
    for (int k = 0; k < kTogether; ++k) amax[k] = __reduce_max_sync(~0u, amax[k]);
    if (col / kFp8Tile * kFp8Tile >= intermediate) return;
    cuda::encode_tiles(x, amax, finite, d, codes_of);
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const int at = token + k * Sums::kTokenStep;
      if (at >= tile.rows) continue;
      const std::int64_t row = tile.first_row + at;
      *reinterpret_cast<std::uint32_t*>(codes + row * fp8_row_bytes(intermediate) +
                                        fp8_column_place(static_cast<std::uint32_t>(col))) = codes_of[k];
      if (col % kFp8Tile == 0) fp8_scales[col / kFp8Tile * fp8_pitch + tile.scale_place + at] = d[k];
    }
  }

  // Four columns of kTogether tokens, and what their gate columns hold, in whichever form is asked for.
  template <class Sums>
  __device__ void store(const float (&gate)[Sums::kTogether][4], const float (&h)[Sums::kTogether][4],
                        const Tile& tile, int token, int col, const TokenScales* scales) const {
    if (mode == L1Output::kFp8) return quantize_fp8<Sums>(h, tile, token, col);
#pragma unroll
    for (int k = 0; k < Sums::kTogether; ++k) {
      const int at = token + k * Sums::kTokenStep;
      const std::int64_t row = tile.first_row + at;
      const bool valid = at < tile.rows && col < intermediate;
      if (mode == L1Output::kNvfp4) {
        quantize(h[k], row, col, valid, scales[k * Sums::kTokenStep].out);
      } else if (valid && mode == L1Output::kCompactBf16) {
        store_bf16(h[k], values + row * intermediate + col);
      } else if (valid) {
        __nv_bfloat16* to = values + row * 2 * intermediate + col / 8 * 16 + col % 8;
        store_bf16(gate[k], to);
        store_bf16(h[k], to + 8);
      }
    }
  }

 private:
  __device__ static void round_to_bf16(const float (&h)[4], float (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const std::uint32_t pair = cuda::bf16_pair(h[i], h[i + 1]);
      x[i] = cuda::first_of(pair), x[i + 1] = cuda::second_of(pair);
    }
  }
  __device__ static void store_bf16(const float (&v)[4], __nv_bfloat16* at) {
    reinterpret_cast<__nv_bfloat162*>(at)[0] = __floats2bfloat162_rn(v[0], v[1]);
    reinterpret_cast<__nv_bfloat162*>(at)[1] = __floats2bfloat162_rn(v[2], v[3]);
  }
};

// What sums are multiplied by on behalf of their operands.
struct TokensIn {
  float operand_factor;        // takes operand_shift() out again
  const float* scales;         // tensor scales of NVFP4 tokens, or null
  const std::int32_t* gather;  // as in GroupedInput
  __device__ float scale(std::int64_t row) const {
    // A power of two times a scale: exact.
    return scales == nullptr ? operand_factor
                             : operand_factor * scales[gather != nullptr ? gather[row] : row];
  }
};

// Sums of products as the values they stand for; token_scale comes from TokensIn.
__device__ inline void scale(const float4& sums, float token_scale, float weight_scale, float (&to)[4]) {
  const float from[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = __fmul_rn(__fmul_rn(from[i], token_scale), weight_scale);
}

// Adds four adjacent biases.
__device__ inline void add_bias(const float* bias, float (&to)[4]) {
  const float4 b = *reinterpret_cast<const float4*>(bias);
  to[0] = __fadd_rn(to[0], b.x), to[1] = __fadd_rn(to[1], b.y);
  to[2] = __fadd_rn(to[2], b.z), to[3] = __fadd_rn(to[3], b.w);
}

// The epilogues. expert_scales() are the tensor scales of an expert's weights. run() gets four adjacent
// weight rows of one token, or of several (ItemSums in grouped_gemm.cuh), and the token's scales; all lanes
// of a warp call it together, with adjacent items. kByElement: no element needs another, and run_all() takes
// accumulators from where they are. kGated: they are of gate and up, of which finish_hidden() makes h where
// from_registers() says so.

// First GEMM of a gated layer. Of 16 weight rows 8 are gate's and 8 up's: an item is four columns of h.
struct GatedEpilogue {
  static constexpr int kItemRows = 8;
  static constexpr bool kByElement = false, kGated = true;

  HiddenOut out;
  ActivationConfig activation;
  TokensIn in;
  const float* weight_scales;  // [experts][2]: gate's and up's tensor scale
  const float* gate_bias;      // [experts][I] or null
  const float* up_bias;        // [experts][I] or null

  __device__ TokenScales token_scales(std::int64_t row) const {
    return {in.scale(row), out.tensor_scale(row)};
  }
  __device__ float2 expert_scales(int expert) const {
    return {weight_scales[2 * expert], weight_scales[2 * expert + 1]};
  }
  // Of wide tiles: whether h may be made of registers (register_epilogue.cuh).
  template <class Config>
  __device__ bool from_registers() const {
    if constexpr (Config::kFp8) return out.mode == L1Output::kFp8;
    return out.mode == L1Output::kCompactBf16 || (out.mode == L1Output::kNvfp4 && out.values != nullptr);
  }

  template <class Sums>
  __device__ void run(const Tile& tile, int weight_tile, int token, int item, const TokenScales* scales,
                      float2 weight_scale, const Sums& sums) const {
    constexpr int kTogether = Sums::kTogether, kStep = Sums::kTokenStep;
    const int col = weight_tile * (kTileRows / 2) + item * 4;
    const int row_of_gate = item / 2 * 16 + item % 2 * 4, row_of_up = row_of_gate + 8;
    float gate[kTogether][4], up[kTogether][4];
    const auto read_sums = [&] {
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        scale(sums.total(k, row_of_gate), scales[k * kStep].in, weight_scale.x, gate[k]);
        scale(sums.total(k, row_of_up), scales[k * kStep].in, weight_scale.y, up[k]);
      }
      if (gate_bias != nullptr && col < out.intermediate) {
        const std::int64_t at = static_cast<std::int64_t>(tile.expert) * out.intermediate + col;
#pragma unroll
        for (int k = 0; k < kTogether; ++k) add_bias(gate_bias + at, gate[k]), add_bias(up_bias + at, up[k]);
      }
    };
    // h is rounded to BF16, whatever becomes of it. What gate's columns hold is asked for where they are
    // written.
    bool sure = false;
    if (out.mode != L1Output::kInterleavedBf16) {
      read_sums();
      sure = cuda::activate_nearly(activation, gate, up);
    }
    if (!sure && (!Sums::kMindsRows || token < tile.rows)) {
      // In shared memory, where the sums were.
      read_sums();
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        sums.store(k, row_of_gate, gate[k]), sums.store(k, row_of_up, up[k]);
        cuda::activate_exactly(activation, sums.at(k, row_of_gate), sums.at(k, row_of_up));
        sums.load(k, row_of_gate, gate[k]), sums.load(k, row_of_up, up[k]);
      }
    }
    out.store<Sums>(gate, up, tile, token, col, scales);
  }
};

// First GEMM of a layer without gate: relu(up)^2.
struct Relu2Epilogue {
  static constexpr int kItemRows = 4;
  static constexpr bool kByElement = false, kGated = false;

  HiddenOut out;  // kCompactBf16 or kNvfp4
  TokensIn in;
  const float* weight_scales;  // [experts]
  const float* bias;           // [experts][I] or null

  __device__ TokenScales token_scales(std::int64_t row) const {
    return {in.scale(row), out.tensor_scale(row)};
  }
  __device__ float2 expert_scales(int expert) const { return {weight_scales[expert], 1.0f}; }

  template <class Sums>
  __device__ void run(const Tile& tile, int weight_tile, int token, int item, const TokenScales* scales,
                      float2 weight_scale, const Sums& sums) const {
    const int col = weight_tile * kTileRows + item * 4;
    float h[Sums::kTogether][4];
#pragma unroll
    for (int k = 0; k < Sums::kTogether; ++k) {
      scale(sums.total(k, item * 4), scales[k * Sums::kTokenStep].in, weight_scale.x, h[k]);
      if (bias != nullptr && col < out.intermediate)
        add_bias(bias + static_cast<std::int64_t>(tile.expert) * out.intermediate + col, h[k]);
#pragma unroll
      for (int i = 0; i < 4; ++i) h[k][i] = activate({.kind = Activation::kRelu2}, 0.0f, h[k][i]).h;
    }
    out.store<Sums>(h, h, tile, token, col, scales);
  }
};

// Second GEMM: y_e in FP32.
struct PlainEpilogue {
  static constexpr int kItemRows = 4;
  static constexpr bool kByElement = true, kGated = false;

  std::int64_t width;  // H
  TokensIn in;
  const float* weight_scales;  // [experts]
  const float* bias;           // [experts][H] or null
  float* out;                  // [R, H]

  __device__ TokenScales token_scales(std::int64_t row) const { return {in.scale(row), 1.0f}; }
  __device__ float2 expert_scales(int expert) const { return {weight_scales[expert], 1.0f}; }

  // A thread's share of kTiles tiles as wgmma leaves it: columns `first` and first + 8 of each, tokens
  // 8 j + first_token + {0, 1}; `scales` are those of first_token and what follows. Of 16 columns all are
  // there, or none.
  template <int kTiles, int kFloats>
  __device__ void run_all(const Tile& tile, int first, int first_token, const TokenScales* scales,
                          const float (&acc)[kTiles][kFloats]) const {
    const float weight_scale = weight_scales[tile.expert];
    const bool biased = bias != nullptr;
    const int left = static_cast<int>(width) - first;
    float biases[kTiles][2] = {};
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if (!biased || t * kTileRows >= left) break;
      const float* at = bias + tile.expert * width + first + t * kTileRows;
      biases[t][0] = at[0], biases[t][1] = at[8];
    }
    float* to = out + (tile.first_row + first_token) * width + first;
    __builtin_assume(__isGlobal(to));  // the pointer itself came from shared memory
#pragma unroll
    for (int i = 0; i < kFloats / 2; ++i) {
      const int j = i / 2, c = i % 2;
      if (8 * j + first_token + c < tile.rows) {
        const float token_scale = scales[8 * j + c].in;
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          if (t * kTileRows >= left) break;
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float y = __fmul_rn(__fmul_rn(acc[t][4 * j + 2 * h + c], token_scale), weight_scale);
            to[t * kTileRows + 8 * h] = biased ? __fadd_rn(y, biases[t][h]) : y;
          }
        }
      }
      to += c == 0 ? width : 7 * width;
    }
  }

  template <class Sums>
  __device__ void run(const Tile& tile, int weight_tile, int token, int item, const TokenScales* scales,
                      float2 weight_scale, const Sums& sums) const {
    const int col = weight_tile * kTileRows + item * 4;
    if (col >= width) return;
#pragma unroll
    for (int k = 0; k < Sums::kTogether; ++k) {
      const int at = token + k * Sums::kTokenStep;
      if (at >= tile.rows) continue;
      float y[4];
      scale(sums.total(k, item * 4), scales[k * Sums::kTokenStep].in, weight_scale.x, y);
      if (bias != nullptr) add_bias(bias + tile.expert * width + col, y);
      *reinterpret_cast<float4*>(out + static_cast<std::int64_t>(tile.first_row + at) * width + col) =
          make_float4(y[0], y[1], y[2], y[3]);
    }
  }
};

}  // namespace megamoe::sm90
