#include "layer/routing.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/parallel.h"

namespace megamoe {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Whether index a comes before index b when `values` are put in descending order, NaN last.
struct Descending {
  const float* values;
  bool operator()(std::int32_t a, std::int32_t b) const {
    const bool a_nan = std::isnan(values[a]), b_nan = std::isnan(values[b]);
    if (a_nan != b_nan) return b_nan;
    if (!a_nan && values[a] != values[b]) return values[a] > values[b];
    return a < b;
  }
};

// The largest of `count` logits that are numbers.
double largest(const float* logits, std::int64_t count) {
  double result = -std::numeric_limits<double>::infinity();
  for (std::int64_t e = 0; e < count; ++e) {
    if (logits[e] > result) result = logits[e];
  }
  return result;
}

double sigmoid(double x) {
  const double e = std::exp(-std::abs(x));
  return (x < 0.0 ? e : 1.0) / (1.0 + e);
}

double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

}  // namespace

TokenRouter::TokenRouter(const LayerConfig& config, const float* selection_bias)
    : config_(config),
      selection_bias_(selection_bias),
      scores_(static_cast<std::size_t>(config.num_experts)),
      choice_(static_cast<std::size_t>(config.num_experts)) {}

void TokenRouter::route(const float* logits, const std::int32_t* hash_ids, std::int32_t* ids,
                        float* weights) {
  score(logits);
  if (config_.router.hash_routed) {
    std::copy_n(hash_ids, config_.top_k, ids);
  } else {
    choose(ids);
  }
  if (std::any_of(scores_.begin(), scores_.end(), [](float s) { return std::isnan(s); })) {
    std::fill_n(weights, config_.top_k, kNan);
  } else {
    weigh(ids, weights);
  }
}

void TokenRouter::score(const float* logits) {
  const std::size_t experts = scores_.size();
  const double top = largest(logits, config_.num_experts);
  double sum = 0.0;
  if (config_.router.scoring == Scoring::kSoftmax) {
    for (std::size_t e = 0; e < experts; ++e) {
      if (!std::isnan(logits[e])) sum += std::exp(logits[e] - top);
    }
  }
  for (std::size_t e = 0; e < experts; ++e) {
    const double x = logits[e];
    if (std::isnan(x)) {
      scores_[e] = kNan;
      continue;
    }
    switch (config_.router.scoring) {
      case Scoring::kSoftmax: scores_[e] = static_cast<float>(std::exp(x - top) / sum); break;
      case Scoring::kSoftmaxOverChosen: scores_[e] = logits[e]; break;
      case Scoring::kSigmoid: scores_[e] = static_cast<float>(sigmoid(x)); break;
      case Scoring::kSqrtSoftplus: scores_[e] = static_cast<float>(std::sqrt(softplus(x))); break;
    }
  }
}

void TokenRouter::choose(std::int32_t* ids) {
  for (std::size_t e = 0; e < scores_.size(); ++e) {
    choice_[e] = selection_bias_ == nullptr ? scores_[e] : scores_[e] + selection_bias_[e];
  }
  order_.resize(scores_.size());
  std::iota(order_.begin(), order_.end(), 0);
  if (config_.router.num_groups > 1) keep_best_groups();
  std::partial_sort(order_.begin(), order_.begin() + config_.top_k, order_.end(), Descending{choice_.data()});
  std::copy_n(order_.begin(), config_.top_k, ids);
}

// Leaves the experts of the best groups in order_.
void TokenRouter::keep_best_groups() {
  const int groups = config_.router.num_groups;
  const auto size = static_cast<std::int32_t>(config_.num_experts / groups);
  std::vector<float> group_scores;
  for (int g = 0; g < groups; ++g) {
    float best = -std::numeric_limits<float>::infinity(), second = best;
    for (std::int32_t e = g * size; e < (g + 1) * size; ++e) {
      const float value = choice_[static_cast<std::size_t>(e)];
      if (value > best) {
        second = best;
        best = value;
      } else if (value > second) {
        second = value;
      }
    }
    group_scores.push_back(size == 1 ? best : best + second);
  }
  std::vector<std::int32_t> best_groups(static_cast<std::size_t>(groups));
  std::iota(best_groups.begin(), best_groups.end(), 0);
  std::sort(best_groups.begin(), best_groups.end(), Descending{group_scores.data()});
  order_.clear();
  for (int i = 0; i < config_.router.topk_groups; ++i) {
    const std::int32_t first = best_groups[static_cast<std::size_t>(i)] * size;
    for (std::int32_t e = first; e < first + size; ++e) order_.push_back(e);
  }
}

void TokenRouter::weigh(const std::int32_t* ids, float* weights) const {
  const RouterConfig& router = config_.router;
  const auto chosen = [&](int slot) {
    return static_cast<double>(scores_[static_cast<std::size_t>(ids[slot])]);
  };
  const bool over_chosen = router.scoring == Scoring::kSoftmaxOverChosen;
  double top = -std::numeric_limits<double>::infinity();
  for (int slot = 0; slot < config_.top_k; ++slot) top = std::max(top, chosen(slot));
  const auto share = [&](int slot) { return over_chosen ? std::exp(chosen(slot) - top) : chosen(slot); };
  double sum = 0.0;
  for (int slot = 0; slot < config_.top_k; ++slot) sum += share(slot);
  const bool divide = over_chosen || router.renormalize;
  for (int slot = 0; slot < config_.top_k; ++slot) {
    const double weight = !divide ? share(slot) : sum == 0.0 ? 0.0 : share(slot) / sum;
    weights[slot] = static_cast<float>(weight * static_cast<double>(router.scaling_factor));
  }
}

void route_tokens(const float* logits, std::int64_t tokens, const LayerConfig& config,
                  const float* selection_bias, const std::int32_t* hash_ids, std::int32_t* ids,
                  float* weights) {
  parallel_for(tokens, 16, [&](std::int64_t begin, std::int64_t end) {
    TokenRouter router(config, selection_bias);
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t slot = t * config.top_k;
      router.route(logits + t * config.num_experts, hash_ids == nullptr ? nullptr : hash_ids + slot,
                   ids + slot, weights + slot);
    }
  });
}

}  // namespace megamoe
