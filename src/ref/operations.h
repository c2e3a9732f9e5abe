// operations.h: the parts of the reference backend, one file for each group of operations.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string_view>

#include "backend/backend.h"

namespace megamoe::ref {

// For parallel_for: how many indices are worth a piece when one costs so many elementary steps.
inline std::int64_t grain(std::int64_t steps) {
  constexpr std::int64_t kWorthAPiece = 1 << 16;
  return std::max<std::int64_t>(1, kWorthAPiece / std::max<std::int64_t>(1, steps));
}

// matmul.cc: y [count, w.rows] FP32 = x * w^T, tensor scales applied. Row j of y comes from row first + j of
// x, or from row row_map[first + j] where there is a map. `where` names the matrix in messages.
void matmul(const ActivationRows& x, const std::int32_t* row_map, std::int64_t first, std::int64_t count,
            const WeightMatrix& w, std::string_view where, float* y);

// layer.cc
std::unique_ptr<PreparedLayer> prepare(const LayerWeights& weights);

// quantize.cc: as in backend.h.
std::int64_t quantize(const ActivationRows& x, const std::int32_t* row_map, const ActivationRows& out);
void quantize_fp8(const ActivationRows& x, const ActivationRows& out);
std::int64_t deinterleave_quantize(const ActivationRows& x, const ActivationRows& out);
void row_amax(const ActivationRows& x, float* amax);
void deinterleave_row_amax(const ActivationRows& x, float* amax);
// One row of BF16 `x` [out.cols] into row `r` of `out`, in out's format; returns the saturated blocks.
std::int64_t store_row(const bf16* x, std::int64_t r, const ActivationRows& out);

// permute.cc: as in backend.h.
void sort(const std::int32_t* ids, const float* weights, const Routing& routing);
void combine(const float* expert_out, const Routing& routing, const float* weights, const float* shared,
             MatrixView<bf16> y);

}  // namespace megamoe::ref
