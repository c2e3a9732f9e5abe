// router_logits.h: the router's own small GEMM.
#pragma once

#include "megamoe/layer.h"

namespace megamoe {

// logits [tokens, E] = x [tokens, H] * router_weight^T + router_bias; products and sums in FP64, rounded to
// FP32 once. Throws kInvalidArgument where the layer has no router weight.
void router_logits(const LayerWeights& weights, MatrixView<const bf16> x, MatrixView<float> logits);

}  // namespace megamoe
