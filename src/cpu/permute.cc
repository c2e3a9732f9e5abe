// permute.cc: from tokens to rows in expert order, and back.
#include <algorithm>
#include <functional>
#include <vector>

#include "base/parallel.h"
#include "cpu/kernels.h"
#include "cpu/operations.h"

namespace megamoe::cpu {

// A counting sort. Filling from the back turns the end of each expert's rows into their beginning, so that
// the offsets serve as cursors.
void sort(const std::int32_t* ids, const float* weights, const Routing& routing) {
  const std::int64_t pairs = routing.tokens * routing.top_k;
  std::int64_t* offsets = routing.offsets;
  std::fill_n(offsets, routing.num_experts + 1, 0);
  const auto goes = [&](std::int64_t pair) { return ids[pair] >= 0 && weights[pair] != 0.0f; };
  for (std::int64_t pair = 0; pair < pairs; ++pair) {
    if (goes(pair)) ++offsets[ids[pair]];
  }
  for (std::int64_t e = 1; e <= routing.num_experts; ++e) offsets[e] += offsets[e - 1];
  std::int64_t pair = pairs;
  for (std::int64_t token = routing.tokens - 1; token >= 0; --token) {
    for (int slot = routing.top_k - 1; slot >= 0; --slot) {
      if (!goes(--pair)) continue;
      const std::int64_t row = --offsets[ids[pair]];
      routing.row_to_token[row] = static_cast<std::int32_t>(token);
      routing.row_to_slot[row] = slot;
    }
  }
}

void combine(const float* expert_out, const Routing& routing, const float* weights, const float* shared,
             MatrixView<bf16> y) {
  const Rows& rows = *chosen_kernel().rows;
  const std::int64_t top_k = routing.top_k, cols = y.cols;
  thread_local std::vector<std::int64_t> row_of_pair;
  row_of_pair.assign(static_cast<std::size_t>(routing.tokens * top_k), -1);
  std::int64_t* const row_of = row_of_pair.data();  // the caller's, shared with the other threads
  for (std::int64_t row = 0; row < routing.offsets[routing.num_experts]; ++row) {
    row_of[routing.row_to_token[row] * top_k + routing.row_to_slot[row]] = row;
  }
  constexpr std::int64_t kStrip = 512;  // columns that are summed in the first-level cache
  const std::int64_t strips = (cols + kStrip - 1) / kStrip;
  const auto piece = [&](std::int64_t begin, std::int64_t end) {
    float acc[kStrip];
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t token = i / strips, first = i % strips * kStrip;
      const std::int64_t count = std::min(kStrip, cols - first);
      std::fill_n(acc, count, 0.0f);
      for (std::int64_t pair = token * top_k; pair < (token + 1) * top_k; ++pair) {
        if (row_of[pair] < 0) continue;
        rows.add_weighted(acc, weights[pair], expert_out + row_of[pair] * cols + first, count);
      }
      if (shared != nullptr) rows.add(acc, shared + token * cols + first, count);
      rows.to_bf16(acc, count, y.row(token) + first);
    }
  };
  parallel_for(routing.tokens * strips, 8, std::ref(piece));
}

}  // namespace megamoe::cpu
