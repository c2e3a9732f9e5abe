// combine.h: each token's experts added up, on the GPU.
//
// y[t] = bf16(((0 + w0 * y0) + w1 * y1) + ... [+ [factor *] shared]), slots in order, every product and every
// sum one FP32 rounding; the same bits as the reference for equal inputs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "megamoe/types.h"

namespace megamoe::cuda {

struct CombineParams {
  const float* expert_out = nullptr;          // [rows, hidden], 16-byte aligned
  const std::int32_t* slot_to_row = nullptr;  // [tokens, top_k]; -1: the slot was left out
  const float* weights = nullptr;             // [tokens, top_k]
  const float* shared = nullptr;              // [tokens, hidden], 16-byte aligned, or null
  const float* shared_factors = nullptr;      // [tokens], or null: all 1
  bf16* y = nullptr;                          // [tokens, hidden]
  std::int64_t y_stride = 0;                  // elements from row to row
  std::int64_t tokens = 0;
  int top_k = 0;
  std::int64_t hidden = 0;  // a multiple of 16
};

cudaError_t combine(const CombineParams& params, cudaStream_t stream);

}  // namespace megamoe::cuda
