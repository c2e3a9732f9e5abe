// pack.h: weights into the order of weight_layout.h, on the GPU; a whole layer in one launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/sm90/weight_layout.h"

namespace megamoe::sm90 {

// `raw` [experts] lies in GPU memory and points to GPU memory; all have the same sizes, given again in rows
// and cols. `packed` [experts][packed_bytes(type, role, rows, cols)], 16-byte aligned.
cudaError_t pack_layer(OperandType type, WeightRole role, const RawWeights* raw, int experts,
                       std::int64_t rows, std::int64_t cols, std::uint8_t* packed, cudaStream_t stream);

}  // namespace megamoe::sm90
