// routing_test.cc: route, sort and combine on every backend, against answers worked out here.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "tests/compare.h"

namespace megamoe::testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

class Routers : public Conformance {
 protected:
  struct Choice {
    std::vector<std::int32_t> ids;
    std::vector<float> weights;
  };
  Choice route(const LayerConfig& config, const std::vector<float>& logits, const float* bias = nullptr,
               const std::int32_t* hash_ids = nullptr) const {
    const std::int64_t tokens = static_cast<std::int64_t>(logits.size()) / config.num_experts;
    const auto slots = static_cast<std::size_t>(tokens * config.top_k);
    Choice choice{std::vector<std::int32_t>(slots, -7), std::vector<float>(slots, -7.0f)};
    backend().route(logits.data(), tokens, config, bias, hash_ids, choice.ids.data(), choice.weights.data());
    return choice;
  }
};
MEGAMOE_FOR_EVERY_BACKEND(Routers);

LayerConfig router_config(std::int64_t experts, int top_k, RouterConfig router) {
  LayerConfig config = make_config(16, 16, experts, top_k);
  config.router = router;
  validate(config);
  return config;
}

// Exact in long double up to its rounding, which is far below FP32's.
long double score(Scoring scoring, const std::vector<float>& logits, std::size_t e) {
  const long double x = logits[e];
  if (scoring == Scoring::kSigmoid) return 1.0L / (1.0L + std::exp(-x));
  if (scoring == Scoring::kSqrtSoftplus) return std::sqrt(std::log1p(std::exp(x)));
  if (scoring == Scoring::kSoftmaxOverChosen) return x;
  long double sum = 0;
  for (const float other : logits) sum += std::exp(static_cast<long double>(other) - x);
  return 1.0L / sum;
}

TEST_P(Routers, ScoresAndWeightsOfEveryRule) {
  Random random(1);
  for (const Scoring scoring :
       {Scoring::kSoftmax, Scoring::kSoftmaxOverChosen, Scoring::kSigmoid, Scoring::kSqrtSoftplus}) {
    for (const bool renormalize : {false, true}) {
      for (const int top_k : {1, 2, 8, 22, 32}) {
        const LayerConfig config = router_config(
            32, top_k, {.scoring = scoring, .renormalize = renormalize, .scaling_factor = 2.5f});
        std::vector<float> logits(32);
        for (float& x : logits) x = random.bell() * 3.0f;
        const Choice choice = route(config, logits);
        std::vector<std::int32_t> order(32);
        std::iota(order.begin(), order.end(), 0);
        // All four scores rise with the logit, and these logits lie far apart.
        std::sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
          return logits[static_cast<std::size_t>(a)] > logits[static_cast<std::size_t>(b)];
        });
        long double sum = 0;
        const auto share = [&](std::int32_t e) {
          const long double s = score(scoring, logits, static_cast<std::size_t>(e));
          return scoring == Scoring::kSoftmaxOverChosen ? std::exp(s) : s;
        };
        for (int slot = 0; slot < top_k; ++slot) sum += share(order[static_cast<std::size_t>(slot)]);
        const bool divide = renormalize || scoring == Scoring::kSoftmaxOverChosen;
        for (std::size_t slot = 0; slot < static_cast<std::size_t>(top_k); ++slot) {
          EXPECT_EQ(choice.ids[slot], order[slot]) << to_string(scoring) << ", slot " << slot;
          const auto want = static_cast<double>(share(order[slot]) / (divide ? sum : 1.0L) * 2.5L);
          // The score's rounding, that of the scores in the sum, and the weight's own.
          EXPECT_NEAR(choice.weights[slot], want, want * 3 * 0x1p-24) << to_string(scoring);
        }
      }
    }
  }
}

TEST_P(Routers, BiasChoosesButDoesNotWeigh) {
  const LayerConfig config = router_config(4, 2, {.scoring = Scoring::kSigmoid, .renormalize = false});
  const float bias[] = {0.0f, 1.0f, 0.0f, -1.0f};
  const Choice choice = route(config, {0.0f, -1.0f, 1.0f, 5.0f}, bias);
  EXPECT_EQ(choice.ids, (std::vector<std::int32_t>{1, 2}));
  EXPECT_NEAR(choice.weights[0], 1.0 / (1.0 + std::exp(1.0)), 0x1p-25);
  EXPECT_NEAR(choice.weights[1], 1.0 / (1.0 + std::exp(-1.0)), 0x1p-24);
}

TEST_P(Routers, TiesGoToTheLowerExpert) {
  for (const Scoring scoring : {Scoring::kSoftmax, Scoring::kSoftmaxOverChosen, Scoring::kSigmoid}) {
    const LayerConfig config = router_config(6, 3, {.scoring = scoring});
    EXPECT_EQ(route(config, {1, 2, 1, 2, 1, 1}).ids, (std::vector<std::int32_t>{1, 3, 0}));
  }
}

TEST_P(Routers, GroupsAreChosenByTheirTwoBest) {
  // Every score is 1/2. The groups' choices, with the bias: {1.6, 0}, {.5, .5}, {.9, .9}, {1, .9}: the
  // single best expert is in a group that does not stay.
  const LayerConfig config =
      router_config(8, 3, {.scoring = Scoring::kSigmoid, .num_groups = 4, .topk_groups = 2});
  const float bias[] = {1.1f, -0.5f, 0.0f, 0.0f, 0.4f, 0.4f, 0.5f, 0.4f};
  const std::vector<float> logits(8, 0.0f);
  const Choice choice = route(config, logits, bias);
  EXPECT_EQ(choice.ids, (std::vector<std::int32_t>{6, 4, 5}));
  for (const float w : choice.weights) EXPECT_FLOAT_EQ(w, 1.0f / 3.0f);
  EXPECT_EQ(route(router_config(8, 3, {.scoring = Scoring::kSigmoid}), logits, bias).ids,
            (std::vector<std::int32_t>{0, 6, 4}));
}

TEST_P(Routers, EqualGroupsGoToTheLower) {
  const LayerConfig config =
      router_config(8, 2, {.scoring = Scoring::kSigmoid, .num_groups = 4, .topk_groups = 1});
  EXPECT_EQ(route(config, std::vector<float>(8, 0.5f)).ids, (std::vector<std::int32_t>{0, 1}));
}

TEST_P(Routers, HashRoutedIdsKeepTheirOrderAndGetScores) {
  const LayerConfig config = router_config(
      4, 2,
      {.scoring = Scoring::kSqrtSoftplus, .renormalize = true, .scaling_factor = 1.5f, .hash_routed = true});
  const std::int32_t ids[] = {3, 0, 1, 1};
  const Choice choice = route(config, {1, 9, 9, -1, 0, 0, 0, 0}, nullptr, ids);
  EXPECT_EQ(choice.ids, (std::vector<std::int32_t>{3, 0, 1, 1}));
  const double a = std::sqrt(std::log1p(std::exp(-1.0))), b = std::sqrt(std::log1p(std::exp(1.0)));
  EXPECT_NEAR(choice.weights[0], 1.5 * a / (a + b), 3 * 0x1p-24);
  EXPECT_NEAR(choice.weights[1], 1.5 * b / (a + b), 3 * 0x1p-24);
  EXPECT_EQ(choice.weights[2], 0.75f);
}

TEST_P(Routers, NanLogitsComeLastAndSpoilTheirTokenAlone) {
  for (const Scoring scoring :
       {Scoring::kSoftmax, Scoring::kSoftmaxOverChosen, Scoring::kSigmoid, Scoring::kSqrtSoftplus}) {
    const LayerConfig config = router_config(4, 3, {.scoring = scoring});
    const std::vector<float> clean = {0.25f, -0.5f, 1.5f, 0.75f};
    const Choice want = route(config, clean);
    std::vector<float> logits = clean;
    logits.insert(logits.end(), {kNan, 0.5f, kNan, 1.0f});
    logits.insert(logits.end(), clean.begin(), clean.end());
    const Choice got = route(config, logits);
    EXPECT_EQ(std::vector(got.ids.begin() + 3, got.ids.begin() + 6), (std::vector<std::int32_t>{3, 1, 0}));
    for (std::size_t slot = 0; slot < 3; ++slot) {
      EXPECT_TRUE(std::isnan(got.weights[3 + slot])) << to_string(scoring);
      EXPECT_EQ(got.weights[slot], want.weights[slot]);
      EXPECT_EQ(got.weights[6 + slot], want.weights[slot]);
      EXPECT_EQ(got.ids[6 + slot], want.ids[slot]);
    }
  }
}

TEST_P(Routers, ExtremeLogits) {
  const LayerConfig softmax = router_config(3, 2, {});
  EXPECT_EQ(route(softmax, {1e30f, -1e30f, 3e38f}).weights, (std::vector<float>{1.0f, 0.0f}));
  EXPECT_EQ(route(softmax, {-kInf, 0.0f, 0.0f}).weights, (std::vector<float>{0.5f, 0.5f}));
  // Renormalising scores that are all 0 gives 0, not NaN.
  const LayerConfig sigmoid = router_config(3, 2, {.scoring = Scoring::kSigmoid});
  EXPECT_EQ(route(sigmoid, {-kInf, -kInf, -kInf}).weights, (std::vector<float>{0.0f, 0.0f}));
  EXPECT_EQ(route(sigmoid, {200.0f, -200.0f, kInf}).weights, (std::vector<float>{0.5f, 0.5f}));
  const LayerConfig softplus = router_config(2, 1, {.scoring = Scoring::kSqrtSoftplus, .renormalize = false});
  EXPECT_EQ(route(softplus, {10000.0f, -1.0f}).weights[0], 100.0f);
}

TEST_P(Routers, NoTokens) { EXPECT_TRUE(route(router_config(3, 2, {}), {}).ids.empty()); }

class Combining : public Conformance {
 protected:
  // One token, one column block of 16: slot i's expert is expert i with output values[i]; weights 1.
  bf16 combine(const std::vector<float>& values, const float* shared = nullptr) const {
    const auto slots = static_cast<int>(values.size());
    OwnedRouting routing(1, slots, slots, 0x7F);
    std::vector<std::int32_t> ids(values.size());
    std::iota(ids.begin(), ids.end(), 0);
    const std::vector<float> weights(values.size(), 1.0f);
    backend().sort(ids.data(), weights.data(), routing.view());
    std::vector<float> out;
    for (const float v : values) out.insert(out.end(), 16, v);
    std::vector<float> shared_row(16, shared == nullptr ? 0.0f : *shared);
    std::vector<bf16> y(16, bf16{0x7FC0});
    backend().combine(out.data(), routing.view(), weights.data(),
                      shared == nullptr ? nullptr : shared_row.data(), MatrixView<bf16>(y.data(), 1, 16));
    for (const bf16 v : y) EXPECT_EQ(v, y[0]);
    return y[0];
  }
};
MEGAMOE_FOR_EVERY_BACKEND(Combining);

TEST_P(Combining, AddsInFp32AndRoundsOnce) {
  for (int repeat = 0; repeat < 20; ++repeat) {
    EXPECT_EQ(independent::bf16_value(combine({256, 1, 1, 1, 1, 1, 1, 1})), 264.0);
    EXPECT_EQ(independent::bf16_value(combine({1, 0x1p-9f, -1})), 0x1p-9);
  }
}

TEST_P(Combining, SharedComesLast) {
  // (2^24 + 1) - 2^24 loses the 1 in FP32; 2^24 - 2^24 + 1 would keep it.
  const float one = 1.0f, minus = -0x1p24f;
  EXPECT_EQ(independent::bf16_value(combine({0x1p24f, 1.0f}, &minus)), 0.0);
  EXPECT_EQ(independent::bf16_value(combine({0x1p24f, -0x1p24f}, &one)), 1.0);
}

TEST_P(Combining, ProductAndSumRoundApart) {
  // w * y = 1 + 2^-11 + 2^-24 rounds to 1 + 2^-11; a fused multiply-add would leave 2^-24 behind.
  OwnedRouting routing(1, 2, 2, 0x7F);
  const std::int32_t ids[] = {0, 1};
  const float w = 1.0f + 0x1p-12f;
  const float weights[] = {-1.0f, w};
  backend().sort(ids, weights, routing.view());
  std::vector<float> out(16, 1.0f + 0x1p-11f);
  out.insert(out.end(), 16, w);
  std::vector<bf16> y(16);
  backend().combine(out.data(), routing.view(), weights, nullptr, MatrixView<bf16>(y.data(), 1, 16));
  for (const bf16 v : y) EXPECT_EQ(v.bits, 0);
}

TEST_P(Combining, StridedOutputLeavesTheRestAlone) {
  OwnedRouting routing(3, 1, 1, 0x7F);
  const std::int32_t ids[] = {0, -1, 0};
  const float weights[] = {1.0f, 1.0f, 1.0f};
  backend().sort(ids, weights, routing.view());
  ASSERT_EQ(routing.rows(), 2);
  const std::vector<float> out(2 * 16, 2.0f);
  std::vector<bf16> y(3 * 20, bf16{0x7F7F});
  backend().combine(out.data(), routing.view(), weights, nullptr, MatrixView<bf16>(y.data(), 3, 16, 20));
  for (std::size_t i = 0; i < y.size(); ++i) {
    EXPECT_EQ(y[i].bits, i % 20 >= 16 ? 0x7F7F : i / 20 == 1 ? 0x0000 : 0x4000) << i;
  }
}

TEST_P(Combining, MoreThan65535Rows) {
  for (const auto& [tokens, top_k] : {std::pair{8192, 8}, {8191, 8}, {70000, 1}}) {
    OwnedRouting routing(tokens, top_k, 8, 0x7F);
    std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens * top_k));
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i * 5 % 8);
    const std::vector<float> weights(ids.size(), 1.0f);
    backend().sort(ids.data(), weights.data(), routing.view());
    ASSERT_EQ(routing.rows(), tokens * top_k);
    std::vector<float> out(ids.size() * 16);
    for (std::int64_t row = 0; row < routing.rows(); ++row) {
      const auto token = static_cast<float>(routing.row_to_token[static_cast<std::size_t>(row)] % 251);
      std::fill_n(out.begin() + row * 16, 16, token);
    }
    std::vector<bf16> y(static_cast<std::size_t>(tokens) * 16);
    backend().combine(out.data(), routing.view(), weights.data(), nullptr,
                      MatrixView<bf16>(y.data(), tokens, 16));
    for (std::size_t t = 0; t < static_cast<std::size_t>(tokens); ++t) {
      const auto want = static_cast<float>(t % 251) * static_cast<float>(top_k);
      ASSERT_EQ(y[t * 16 + 15], independent::nearest_bf16(want)) << t;
    }
  }
}

class Sorting : public Conformance {};
MEGAMOE_FOR_EVERY_BACKEND(Sorting);

TEST_P(Sorting, ByExpertThenTokenThenSlot) {
  // Left out: -1, weight 0, weight -0. Kept: a negative weight, a NaN.
  const std::int32_t ids[] = {2, 0, -1, 2, 2, 0, 1, 2, 0};
  const float weights[] = {1, 1, 1, -1, kNan, 0, 1, -0.0f, 1};
  OwnedRouting routing(3, 3, 4, 0x7F);
  backend().sort(ids, weights, routing.view());
  EXPECT_EQ(routing.offsets, (std::vector<std::int64_t>{0, 2, 3, 6, 6}));
  EXPECT_EQ(std::vector(routing.row_to_token.begin(), routing.row_to_token.begin() + 6),
            (std::vector<std::int32_t>{0, 2, 2, 0, 1, 1}));
  EXPECT_EQ(std::vector(routing.row_to_slot.begin(), routing.row_to_slot.begin() + 6),
            (std::vector<std::int32_t>{1, 2, 0, 0, 0, 1}));
}

TEST_P(Sorting, NobodyAndNothing) {
  OwnedRouting empty(0, 2, 3, 0x7F), nobody(2, 2, 3, 0x7F);
  backend().sort(nullptr, nullptr, empty.view());
  EXPECT_EQ(empty.offsets, (std::vector<std::int64_t>{0, 0, 0, 0}));
  const std::int32_t ids[] = {-1, -1, -1, -1};
  const float weights[] = {1, 1, 1, 1};
  backend().sort(ids, weights, nobody.view());
  EXPECT_EQ(nobody.offsets, (std::vector<std::int64_t>{0, 0, 0, 0}));
  std::vector<bf16> y(2 * 16, bf16{0x7FC0});
  backend().combine(nullptr, nobody.view(), weights, nullptr, MatrixView<bf16>(y.data(), 2, 16));
  for (const bf16 v : y) EXPECT_EQ(v.bits, 0);
}

}  // namespace
}  // namespace megamoe::testing
