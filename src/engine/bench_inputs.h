// bench_inputs.h: what a benchmark feeds a layer: random weights, tokens and routings.
#pragma once

#include <cstdint>
#include <random>
#include <string_view>
#include <vector>

#include "megamoe/layer.h"

namespace megamoe {

// How tokens spread over experts.
enum class RoutingKind {
  kUniform,  // top_k different experts of each token, all equally likely
  kZipf,     // likewise, but the r-th most popular expert is wanted 1/r as often as the first
  kOne,      // every token to the same top_k experts: as skewed as a router gets
};
std::string_view to_string(RoutingKind kind);  // "uniform", "zipf", "one"

// NVFP4 weights for every expert, gpt-oss's biases, and static input scales under which no block saturates.
// Experts are different pieces of one random pool of about the size of a matrix, so that hundreds of them
// take little memory. With tokens of variance 1, gate and up have variance 1.
LayerWeights random_layer(const LayerConfig& config, std::uint64_t seed);

// Values of mean 0 and variance 1 within +-3.5, rounded to BF16.
std::vector<bf16> random_tokens(std::int64_t count, std::uint64_t seed);

// Weights [tokens, top_k] above 0; those of a token add up to 1.
std::vector<float> random_expert_weights(std::int64_t tokens, int top_k, std::uint64_t seed);

// Routings of one kind, one after the other. Each takes the experts that were used longest ago, so that their
// weights have left the caches.
class RoutingSequence {
 public:
  RoutingSequence(RoutingKind kind, std::int64_t num_experts, int top_k, std::int64_t tokens,
                  std::uint64_t seed);
  std::vector<std::int32_t> next();  // ids [tokens, top_k]

 private:
  RoutingKind kind_;
  std::int64_t tokens_;
  int top_k_;
  std::mt19937_64 random_;
  std::vector<std::int32_t> order_;  // all experts; the next to be used is order_[turn_]
  std::size_t turn_ = 0;
};

// The experts that get a token, ascending.
std::vector<std::int32_t> used_experts(const std::vector<std::int32_t>& ids, std::int64_t num_experts);

// Passes run one after the other and over again, each reads the first matrices of its experts in ascending
// order and then the second ones. The least number of bytes of other weights between two uses of a matrix.
std::int64_t reuse_distance(const std::vector<std::vector<std::int32_t>>& used_by_pass,
                            std::int64_t num_experts, std::int64_t first_bytes, std::int64_t second_bytes);

}  // namespace megamoe
