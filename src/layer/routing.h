// routing.h: the router's rule: which experts a token's logits choose, and with what weights.
//
// Scores     in FP64 from the FP32 logits, rounded to FP32 once: softmax with the largest logit taken off;
//            sigmoid; sqrt(softplus), softplus as max(x, 0) + log1p(exp(-|x|)). For softmax-over-chosen the
//            score is the logit itself.
// Choice     by score + selection bias (one FP32 addition), descending; a NaN comes last, a tie goes to the
//            lower expert. Slots are in the order of choice. With groups, a group's score is the FP32 sum of
//            its two best choices; the best groups (ties to the lower) stay eligible, the others do not.
//            Hash-routed: the given ids, in their order.
// Weights    never from the bias. Renormalised: score / FP64 sum of the chosen scores, in slot order; a sum
//            of 0 gives weights of 0. Softmax-over-chosen: softmax of the chosen logits. The scaling factor
//            multiplies last; all this in FP64, rounded to FP32 once.
// Faults     a token any of whose scores is NaN (a NaN logit, or infinities that cancel in a softmax) gets
//            NaN for each of its weights. No other token notices.
#pragma once

#include <cstdint>
#include <vector>

#include "megamoe/layer.h"

namespace megamoe {

// Routes one token at a time; holds the memory that takes.
class TokenRouter {
 public:
  // `selection_bias` [E] or null. Both must outlive this.
  TokenRouter(const LayerConfig& config, const float* selection_bias);

  // logits [E] -> ids, weights [top_k]. `hash_ids` [top_k] if the layer is hash-routed, else null.
  void route(const float* logits, const std::int32_t* hash_ids, std::int32_t* ids, float* weights);

 private:
  void score(const float* logits);
  void choose(std::int32_t* ids);
  void keep_best_groups();
  void weigh(const std::int32_t* ids, float* weights) const;

  const LayerConfig& config_;
  const float* selection_bias_;
  std::vector<float> scores_;        // [E]
  std::vector<float> choice_;        // [E]: scores with the selection bias
  std::vector<std::int32_t> order_;  // the experts that may be chosen
};

// Ids and weights [tokens, top_k] from logits [tokens, E], on all threads; the rest as above.
void route_tokens(const float* logits, std::int64_t tokens, const LayerConfig& config,
                  const float* selection_bias, const std::int32_t* hash_ids, std::int32_t* ids,
                  float* weights);

}  // namespace megamoe
