#include "layer/router_logits.h"

#include "base/check.h"
#include "base/parallel.h"
#include "numerics/bf16.h"

namespace megamoe {

void router_logits(const LayerWeights& weights, MatrixView<const bf16> x, MatrixView<float> logits) {
  if (weights.router_weight == nullptr) {
    fail(ErrorCode::kInvalidArgument, "{} has no router weight in its checkpoint; pass router logits instead",
         weights.name);
  }
  const std::int64_t experts = weights.config.num_experts;
  parallel_for(x.rows, 4, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const bf16* row = x.row(t);
      for (std::int64_t e = 0; e < experts; ++e) {
        const float* w = weights.router_weight + e * x.cols;
        double sum = 0.0;
        for (std::int64_t k = 0; k < x.cols; ++k) sum += static_cast<double>(to_float(row[k])) * w[k];
        if (weights.router_bias != nullptr) sum += weights.router_bias[e];
        logits.row(t)[e] = static_cast<float>(sum);
      }
    }
  });
}

}  // namespace megamoe
