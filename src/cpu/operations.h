// operations.h: the parts of the CPU backend, one file for each group of operations.
#pragma once

#include <cstdint>
#include <memory>

#include "backend/backend.h"

namespace megamoe::cpu {

// layer.cc
std::unique_ptr<PreparedLayer> prepare(const LayerWeights& weights);

// quantize.cc: as in backend.h.
std::int64_t quantize(const ActivationRows& x, const std::int32_t* row_map, const ActivationRows& out);
void quantize_fp8(const ActivationRows& x, const ActivationRows& out);
std::int64_t deinterleave_quantize(const ActivationRows& x, const ActivationRows& out);
void row_amax(const ActivationRows& x, float* amax);
void deinterleave_row_amax(const ActivationRows& x, float* amax);

// permute.cc: as in backend.h.
void sort(const std::int32_t* ids, const float* weights, const Routing& routing);
void combine(const float* expert_out, const Routing& routing, const float* weights, const float* shared,
             MatrixView<bf16> y);

}  // namespace megamoe::cpu
