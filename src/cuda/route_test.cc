#include "cuda/route.h"

#include <cmath>
#include <limits>

#include "cuda/gpu_test.h"
#include "layer/routing.h"

namespace megamoe::cuda {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Routed {
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
};

LayerConfig config_of(std::int64_t experts, int top_k, const RouterConfig& router) {
  LayerConfig config;
  config.hidden = config.intermediate = 16;
  config.num_experts = experts;
  config.top_k = top_k;
  config.router = router;
  validate(config);
  return config;
}

Routed route_on_gpu(const LayerConfig& c, const std::vector<float>& logits, const std::vector<float>& bias,
                    const std::vector<std::int32_t>& hash_ids, int poison) {
  const std::int64_t tokens = static_cast<std::int64_t>(logits.size()) / c.num_experts;
  const DeviceArray<float> d_logits(logits), d_bias(bias);
  const DeviceArray<std::int32_t> d_hash(hash_ids);
  const Output<std::int32_t> ids(tokens * c.top_k, poison);
  const Output<float> weights(tokens * c.top_k, poison);
  cuda_check(route({.logits = d_logits.data(),
                    .selection_bias = bias.empty() ? nullptr : d_bias.data(),
                    .hash_ids = hash_ids.empty() ? nullptr : d_hash.data(),
                    .tokens = tokens,
                    .experts = static_cast<int>(c.num_experts),
                    .top_k = c.top_k,
                    .router = c.router,
                    .ids = ids.data(),
                    .weights = weights.data()},
                   nullptr),
             "testing route");
  return {ids.download(), weights.download()};
}

void expect_reference(const LayerConfig& c, const std::vector<float>& logits,
                      const std::vector<float>& bias = {}, const std::vector<std::int32_t>& hash_ids = {},
                      int poison = 0x7F) {
  SCOPED_TRACE(::testing::Message() << to_string(c.router.scoring) << ", top " << c.top_k << " of "
                                    << c.num_experts << ", groups " << c.router.topk_groups << " of "
                                    << c.router.num_groups);
  const std::int64_t tokens = static_cast<std::int64_t>(logits.size()) / c.num_experts;
  Routed want{std::vector<std::int32_t>(static_cast<std::size_t>(tokens * c.top_k)),
              std::vector<float>(static_cast<std::size_t>(tokens * c.top_k))};
  route_tokens(logits.data(), tokens, c, bias.empty() ? nullptr : bias.data(),
               hash_ids.empty() ? nullptr : hash_ids.data(), want.ids.data(), want.weights.data());
  const Routed got = route_on_gpu(c, logits, bias, hash_ids, poison);
  EXPECT_TRUE(same_bytes(got.ids, want.ids));
  EXPECT_TRUE(same_numbers(got.weights, want.weights));
}

constexpr Scoring kScorings[] = {Scoring::kSoftmax, Scoring::kSoftmaxOverChosen, Scoring::kSigmoid,
                                 Scoring::kSqrtSoftplus};

class RouteTest : public GpuTest {};

TEST_F(RouteTest, EqualsTheReference) {
  Random random(1);
  std::uint64_t round = 0;
  for (const Scoring scoring : kScorings) {
    for (const int experts : {1, 4, 32, 60, 127, 128, 256, 384, 512, 1000, 1024}) {
      for (const int wanted : {1, 2, 6, 8, 9, 22, 32}) {
        const int top_k = std::min(wanted, experts);
        ++round;
        RouterConfig router{.scoring = scoring,
                            .renormalize = round % 2 == 0,
                            .scaling_factor = round % 3 == 0 ? 2.5f : 1.0f};
        const LayerConfig c = config_of(experts, top_k, router);
        std::vector<float> logits(static_cast<std::size_t>(experts) * 13), bias;
        // Every third round from few values, so that many are equal.
        for (float& x : logits)
          x = round % 3 == 0 ? static_cast<float>(random.integer(-2, 2)) : random.bell() * 3;
        if (scoring == Scoring::kSigmoid || scoring == Scoring::kSqrtSoftplus) {
          for (int e = 0; e < experts; ++e) bias.push_back(random.bell() * 0.2f);
        }
        expect_reference(c, logits, bias, {}, round % 3 == 0 ? 0x7F : round % 3 == 1 ? 0xFF : 0x00);
      }
    }
  }
}

TEST_F(RouteTest, Groups) {
  Random random(2);
  struct Shape {
    int experts, groups, kept, top_k;
  };
  for (const Shape& s : {Shape{256, 8, 4, 8},
                         {8, 4, 2, 3},
                         {8, 4, 1, 2},
                         {160, 8, 3, 6},
                         {64, 64, 10, 8},
                         {1024, 512, 40, 32},
                         {1024, 1024, 33, 32},
                         {36, 3, 1, 4}}) {
    for (const bool equal : {false, true}) {
      const LayerConfig c = config_of(s.experts, s.top_k,
                                      {.scoring = Scoring::kSigmoid,
                                       .scaling_factor = 2.5f,
                                       .num_groups = s.groups,
                                       .topk_groups = s.kept});
      std::vector<float> logits(static_cast<std::size_t>(s.experts) * 9),
          bias(static_cast<std::size_t>(s.experts));
      for (float& x : logits) x = equal ? static_cast<float>(random.integer(0, 1)) : random.bell();
      for (float& b : bias) b = equal ? 0.0f : random.bell() * 0.3f;
      logits[3] = kNan;
      expect_reference(c, logits, bias);
    }
  }
}

TEST_F(RouteTest, HashRoutedIdsKeepTheirOrder) {
  Random random(3);
  for (const Scoring scoring : kScorings) {
    const LayerConfig c = config_of(64, 6, {.scoring = scoring, .scaling_factor = 1.5f, .hash_routed = true});
    std::vector<float> logits(64 * 33);
    for (float& x : logits) x = random.bell() * 2;
    std::vector<std::int32_t> ids(6 * 33);
    for (std::int32_t& id : ids) id = static_cast<std::int32_t>(random.integer(0, 63));
    expect_reference(c, logits, {}, ids);
  }
  // An id without an expert keeps its place for the sort to report, and has no weight.
  const LayerConfig c = config_of(4, 2, {.scoring = Scoring::kSigmoid, .hash_routed = true});
  const Routed got = route_on_gpu(c, {0, 0, 0, 0}, {}, {4, 1}, 0x7F);
  EXPECT_EQ(got.ids, (std::vector<std::int32_t>{4, 1}));
  EXPECT_TRUE(std::isnan(got.weights[0]));
}

TEST_F(RouteTest, FaultsSpoilTheirTokenAlone) {
  for (const Scoring scoring : kScorings) {
    const LayerConfig c = config_of(4, 3, {.scoring = scoring});
    expect_reference(c, {0.25f, -0.5f, 1.5f,  0.75f,  //
                         kNan,  0.5f,  kNan,  1.0f,   //
                         kInf,  0.5f,  1.0f,  2.0f,   //
                         -kInf, 0.5f,  -kInf, 1.0f,   //
                         kInf,  kInf,  0.0f,  0.0f,   //
                         -kInf, -kInf, -kInf, -kInf,  //
                         kNan,  kNan,  kNan,  kNan,   //
                         0.0f,  -0.0f, 0.0f,  -0.0f,  //
                         200,   -200,  1000,  -1000,  //
                         0.25f, -0.5f, 1.5f,  0.75f});
  }
}

TEST_F(RouteTest, NoTokensAndMany) {
  const LayerConfig c = config_of(4, 2, {.scoring = Scoring::kSoftmax});
  expect_reference(c, {});
  Random random(4);
  std::vector<float> logits(4 * 270000);
  for (float& x : logits) x = random.bell();
  expect_reference(c, logits);
}

TEST_F(RouteTest, RefusesWhatItCannotHold) {
  EXPECT_EQ(route({.tokens = 1, .experts = 1025, .top_k = 1}, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(route({.tokens = 1, .experts = 64, .top_k = 33}, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace megamoe::cuda
