// compare.h: holds a backend's run against the independent implementation and against the reference.
//
// Exact     routing, quantisation, combine, and in nvfp4 the GEMMs too where the backend keeps the
// reference's
//           order of sums: every byte.
// Bounded   GEMMs of bf16 and fp8 operands accumulate in FP32 in an order of their own: an output is within
//           accumulation_bound(K) * sum |x_k w_k| of the exact one, plus its own rounding to FP32.
// Cut       GEMMs of a backend that keeps no order are a tensor core's: exact.h says what they may lose, and
// so
//           which values and codes h may have. Codes other than the FP64 sum's are counted over the whole
//           program.
#pragma once

#include "tests/harness.h"
#include "tests/independent.h"

namespace megamoe::testing {

// K products and K additions, each off by at most 2^-24 of the sum of magnitudes (to first order), in any
// order; 4 more roundings: the scales, the tensor scale, the bias, the store.
inline double accumulation_bound(std::int64_t k) { return static_cast<double>(k + 4) * 0x1p-24; }

// Every stage of a run against the independent implementation, byte for byte. For nvfp4 on a backend that
// keeps the reference's order; for bf16 and fp8 on the reference.
void expect_independent(const LayerWeights& layer, const Input& input, const RunOptions& options,
                        const RunResult& run);

// bf16 and fp8, each GEMM alone against exact inputs, within the bound.
void expect_bounded(const Backend& backend, const LayerWeights& layer, const Input& input,
                    const RunOptions& options);

// bf16 and nvfp4 on a backend that keeps no order: compact h and y within exact.h's error, all else byte for
// byte.
void expect_cut(const LayerWeights& layer, const Input& input, const RunOptions& options,
                const RunResult& run);

// The three above, whichever goes with backend and format; then the other ways to h (fused, interleaved).
void expect_conforms(const Backend& backend, const LayerWeights& layer, const Input& input,
                     RunOptions options);

}  // namespace megamoe::testing
