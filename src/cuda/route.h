// route.h: expert ids and weights from router logits, on the GPU; the rule is that of layer/routing.h.
//
// Scores are computed in FP64 and rounded once, as there. This GPU's exp may differ from a CPU's in the last
// of FP64's bits, and a softmax's sum is taken in another (fixed) order; after the rounding to FP32 that
// shows once in some hundred million scores.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "megamoe/layer.h"

namespace megamoe::cuda {

inline constexpr int kMaxRoutedExperts = 1024;
inline constexpr int kMaxTopK = 32;

struct RouteParams {
  const float* logits = nullptr;           // [tokens, experts]
  const float* selection_bias = nullptr;   // [experts] or null
  const std::int32_t* hash_ids = nullptr;  // [tokens, top_k] where the layer is hash-routed, else null
  std::int64_t tokens = 0;
  int experts = 0;
  int top_k = 0;
  RouterConfig router = {};
  std::int32_t* ids = nullptr;  // [tokens, top_k]
  float* weights = nullptr;     // [tokens, top_k]
};

// cudaErrorInvalidValue for more experts or slots than above.
cudaError_t route(const RouteParams& params, cudaStream_t stream);

}  // namespace megamoe::cuda
