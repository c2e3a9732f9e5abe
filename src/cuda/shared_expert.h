// shared_expert.h: what a shared expert takes beside its GEMMs, on the GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "megamoe/types.h"

namespace megamoe::cuda {

struct SharedExpertParams {
  const bf16* x = nullptr;      // [tokens, hidden]
  std::int64_t row_stride = 0;  // elements from row to row
  std::int64_t tokens = 0;
  std::int64_t hidden = 0;
  const float* gate = nullptr;      // [hidden], or null
  float* factors = nullptr;         // [tokens]: sigmoid(x . gate), for combine(); untouched without a gate
  std::int64_t* offsets = nullptr;  // [2]: 0 and tokens, which makes every token a row of one expert; or null
};

// The dot product in FP64, in an order of its own, rounded to FP32.
cudaError_t prepare_shared_expert(const SharedExpertParams& params, cudaStream_t stream);

}  // namespace megamoe::cuda
