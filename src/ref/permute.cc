// permute.cc: from tokens to rows in expert order, and back.
#include <algorithm>
#include <vector>

#include "base/parallel.h"
#include "numerics/bf16.h"
#include "ref/operations.h"

namespace megamoe::ref {

void sort(const std::int32_t* ids, const float* weights, const Routing& routing) {
  std::int64_t row = 0;
  routing.offsets[0] = 0;
  // Pairs by expert first, so that the order is the definition's; a pass over the pairs for each expert.
  for (std::int64_t e = 0; e < routing.num_experts; ++e) {
    for (std::int64_t pair = 0; pair < routing.tokens * routing.top_k; ++pair) {
      if (ids[pair] != e || weights[pair] == 0.0f) continue;
      routing.row_to_token[row] = static_cast<std::int32_t>(pair / routing.top_k);
      routing.row_to_slot[row] = static_cast<std::int32_t>(pair % routing.top_k);
      ++row;
    }
    routing.offsets[e + 1] = row;
  }
}

void combine(const float* expert_out, const Routing& routing, const float* weights, const float* shared,
             MatrixView<bf16> y) {
  const std::int64_t top_k = routing.top_k;
  std::vector<std::int64_t> row_of(static_cast<std::size_t>(routing.tokens * top_k),
                                   -1);  // by token and slot
  for (std::int64_t row = 0; row < routing.offsets[routing.num_experts]; ++row) {
    row_of[static_cast<std::size_t>(routing.row_to_token[row] * top_k + routing.row_to_slot[row])] = row;
  }
  parallel_for(routing.tokens, grain(top_k * y.cols), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      for (std::int64_t c = 0; c < y.cols; ++c) {
        float acc = 0.0f;
        for (std::int64_t pair = t * top_k; pair < (t + 1) * top_k; ++pair) {
          const std::int64_t row = row_of[static_cast<std::size_t>(pair)];
          if (row < 0) continue;
          const float product = weights[pair] * expert_out[row * y.cols + c];
          acc = acc + product;
        }
        if (shared != nullptr) acc = acc + shared[t * y.cols + c];
        y.row(t)[c] = to_bf16(acc);
      }
    }
  });
}

}  // namespace megamoe::ref
