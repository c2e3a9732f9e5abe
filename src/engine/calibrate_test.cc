#include "engine/calibrate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "checkpoint/test_files.h"
#include "numerics/bf16.h"

namespace megamoe {
namespace {

constexpr std::int64_t kSize = 16, kExperts = 3;  // hidden and intermediate are the same

// relu2 experts, so that h can be written down: expert e's up is (e + 1) times the identity, h = (e + 1)^2
// x^2.
LayerWeights diagonal_layer() {
  LayerWeights weights;
  weights.name = "test layer";
  weights.config = {.hidden = kSize,
                    .intermediate = kSize,
                    .num_experts = kExperts,
                    .top_k = 1,
                    .activation = {},
                    .router = {}};
  weights.config.activation.kind = Activation::kRelu2;
  for (int e = 0; e < kExperts; ++e) {
    const auto values = std::make_shared<std::vector<float>>(kSize * kSize, 0.0f);
    for (int i = 0; i < kSize; ++i)
      (*values)[static_cast<std::size_t>(i * kSize + i)] = static_cast<float>(e + 1);
    weights.storage.push_back(values);
    ExpertWeights expert;
    expert.up = {.format = WeightFormat::kF32, .rows = kSize, .cols = kSize, .f32 = values->data()};
    expert.down = {.format = WeightFormat::kF32, .rows = kSize, .cols = kSize, .f32 = values->data()};
    weights.experts.push_back(expert);
  }
  return weights;
}

class CalibrateTest : public ::testing::Test {
 protected:
  // One token for each entry: x is zero but for one element, which is `values[t]`.
  void add(const std::vector<float>& values, const std::vector<std::int32_t>& ids) {
    const auto tokens = static_cast<std::int64_t>(values.size());
    std::vector<bf16> x(static_cast<std::size_t>(tokens * kSize), bf16{0});
    for (std::size_t t = 0; t < values.size(); ++t) x[t * kSize + 5] = to_bf16(values[t]);
    const std::vector<float> weights(values.size(), 1.0f);
    calibration_.add({x.data(), tokens, kSize}, {ids.data(), tokens, 1}, {weights.data(), tokens, 1});
  }
  MoeLayer layer_{diagonal_layer(), {.backend = "ref", .x_scale = {}, .h_scale = {}}};
  Calibration calibration_{layer_};
};

TEST_F(CalibrateTest, TakesTheLargestOfEachExpert) {
  add({1, -3, 2}, {0, 0, 1});
  add({0.5f, 4}, {0, 1});
  const Calibration::Result result = calibration_.result();
  ASSERT_EQ(result.experts.size(), 3u);
  EXPECT_EQ(result.experts[0].rows, 3);
  EXPECT_EQ(result.experts[0].x.amax, 3);
  EXPECT_EQ(result.experts[0].h.amax, 1);  // relu takes -3 away: (1 * 1)^2
  EXPECT_EQ(result.experts[0].x.scale, 3.0f / 2688);
  EXPECT_EQ(result.experts[1].rows, 2);
  EXPECT_EQ(result.experts[1].h.amax, 64);  // (2 * 4)^2
  EXPECT_EQ(result.experts[1].h.scale, 64.0f / 2688);
}

TEST_F(CalibrateTest, LendsTheLargestScaleToExpertsWithoutTokens) {
  add({1, 4, 0}, {0, 1, 2});  // expert 2 sees a token of nothing but zeros
  const Calibration::Result result = calibration_.result();
  EXPECT_EQ(result.borrowed, std::vector<std::int64_t>{2});
  EXPECT_EQ(result.experts[2].rows, 1);
  EXPECT_EQ(result.experts[2].x.scale, 4.0f / 2688);
  EXPECT_EQ(result.experts[2].h.scale, 64.0f / 2688);
}

TEST_F(CalibrateTest, RefusesWhatIsNotFinite) {
  testing::expect_error(ErrorCode::kInvalidArgument, {"token 1", "expert 2"}, [&] {
    add({1, std::numeric_limits<float>::infinity()}, {0, 2});
  });
}

TEST_F(CalibrateTest, RefusesWeightsThatAreNotFinite) {
  const std::vector<bf16> x(2 * kSize, to_bf16(1.0f));
  const std::vector<std::int32_t> ids = {0, 2};
  const std::vector<float> weights = {1.0f, std::numeric_limits<float>::quiet_NaN()};
  testing::expect_error(ErrorCode::kInvalidArgument, {"weight of token 1, slot 0"}, [&] {
    calibration_.add({x.data(), 2, kSize}, {ids.data(), 2, 1}, {weights.data(), 2, 1});
  });
}

TEST_F(CalibrateTest, ASlotWithoutExpertMayHaveAnyWeight) {
  const std::vector<bf16> x(kSize, to_bf16(1.0f));
  const std::vector<std::int32_t> ids = {-1};
  const std::vector<float> weights = {std::numeric_limits<float>::quiet_NaN()};
  calibration_.add({x.data(), 1, kSize}, {ids.data(), 1, 1}, {weights.data(), 1, 1});
}

TEST_F(CalibrateTest, RefusesToMakeScalesOfNothing) {
  add({}, {});
  add({1}, {-1});
  testing::expect_error(ErrorCode::kInvalidArgument, {"no expert"}, [&] { calibration_.result(); });
}

}  // namespace
}  // namespace megamoe
