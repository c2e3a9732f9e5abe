// gemm.h: the two grouped GEMMs of the layer on Hopper.
//
// Launchers: raw device pointers, sizes, a stream; nothing is allocated or waited for. Weights are in the
// packed form of weight_layout.h. At most 1024 experts; fewer than 2^31 rows.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend/backend.h"
#include "megamoe/layer.h"

namespace megamoe::sm90 {

// What both GEMMs take.
struct GroupedInput {
  const std::uint8_t* weights = nullptr;  // [experts][packed_bytes]
  int experts = 0;
  std::int64_t weight_rows = 0;           // I (of gate and up each), or H
  std::int64_t cols = 0;                  // K, a multiple of 16
  const std::int64_t* offsets = nullptr;  // [experts + 1] on the device
  std::int64_t max_rows = 0;              // no routing has more rows; chooses the tile, and with it the order of sums
  // Tokens in BF16 or NVFP4. BF16: 16-byte aligned rows. NVFP4: contiguous, scales are the tensor scales [*].
  ActivationRows tokens;
  const std::int32_t* gather = nullptr;  // row r reads token row gather[r]; null: r itself
  void* workspace = nullptr;             // gemm_workspace_bytes(), 256-byte aligned; free after the call
};

// Bytes that a GEMM needs at `workspace` for a token matrix [rows, cols]; 0 where it needs none.
std::int64_t gemm_workspace_bytes(ActivationFormat format, std::int64_t rows, std::int64_t cols);

struct Gemm1 {
  GroupedInput in;
  ActivationConfig activation;
  const float* weight_scales = nullptr;  // [experts][2]: gate's and up's tensor scale; relu2: [experts]
  const float* gate_bias = nullptr;      // [experts, I] or null
  const float* up_bias = nullptr;        // [experts, I] or null
  L1Output mode = L1Output::kCompactBf16;
  ActivationRows out;                       // as PreparedLayer::gemm1 says; kFp8 is not made
  unsigned long long* saturated = nullptr;  // blocks of h cut to 448 are added here; may be null
};
cudaError_t gemm1(const Gemm1& call, cudaStream_t stream);

struct Gemm2 {
  GroupedInput in;
  const float* weight_scales = nullptr;  // [experts]
  const float* bias = nullptr;           // [experts, H] or null
  float* out = nullptr;                  // [rows, H]
};
cudaError_t gemm2(const Gemm2& call, cudaStream_t stream);

// The tile for a problem: a pure function of its size.
struct TileChoice {
  int tokens;      // the most of a tile
  int row_groups;  // warpgroups along the weight rows, 64 each
  int split;       // warpgroups along K
  friend bool operator==(const TileChoice&, const TileChoice&) = default;
};
// Few rows in all: many small pieces of weights, so that no SM waits long for the last one. Few rows for each
// expert: wide enough for the fullest expert, whose weights would be decoded again for a second tile.
constexpr TileChoice choose_tile(std::int64_t rows, int experts) {
  const std::int64_t busy = rows < experts ? rows : experts;  // experts that have rows, if they spread
  const std::int64_t mean = busy > 0 ? (rows + busy - 1) / busy : 0;
  if (rows <= 16) return {8, 1, 4};
  if (mean <= 16) return {32, 2, 2};
  if (mean <= 32) return {64, 2, 2};
  if (mean <= 104) return {128, 2, 1};
  if (mean <= 140) return {160, 2, 1};
  return {256, 2, 1};
}

}  // namespace megamoe::sm90
