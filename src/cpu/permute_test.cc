// Sort, combine and routing against the reference, bit for bit.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "cpu/cpu_backend.h"
#include "numerics/bf16.h"
#include "ref/ref_backend.h"

namespace megamoe::cpu {
namespace {

// A routing with memory of its own, poisoned.
struct Sorted {
  std::vector<std::int64_t> offsets;
  std::vector<std::int32_t> token, slot;
  Routing routing;

  Sorted(std::int64_t tokens, int top_k, std::int64_t experts)
      : offsets(static_cast<std::size_t>(experts + 1), 0x7F7F7F7F),
        token(static_cast<std::size_t>(tokens * top_k), 0x7F7F7F7F),
        slot(token) {
    routing = {tokens, top_k, experts, offsets.data(), token.data(), slot.data()};
  }
};

struct Pairs {
  std::int64_t tokens;
  int top_k;
  std::int64_t experts;
};

class CpuPermute : public ::testing::TestWithParam<Pairs> {};

TEST_P(CpuPermute, SortAndCombineAreTheReferences) {
  const auto [tokens, top_k, experts] = GetParam();
  std::mt19937 random(7);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens * top_k));
  std::vector<float> weights(ids.size());
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    ids[i] = static_cast<std::int32_t>(random() % static_cast<unsigned>(experts + 1)) - 1;  // duplicates, -1
    weights[i] = random() % 8 == 0 ? 0.0f : uniform(random);
  }
  if (!weights.empty()) weights.back() = std::numeric_limits<float>::quiet_NaN();
  Sorted actual(tokens, top_k, experts), expected(tokens, top_k, experts);
  cpu_backend().sort(ids.data(), weights.data(), actual.routing);
  ref_backend().sort(ids.data(), weights.data(), expected.routing);
  EXPECT_EQ(actual.offsets, expected.offsets);
  EXPECT_EQ(actual.token, expected.token);
  EXPECT_EQ(actual.slot, expected.slot);

  for (const std::int64_t cols : {16, 48, 528}) {
    const std::int64_t rows = expected.offsets.back();
    std::vector<float> in(static_cast<std::size_t>(rows * cols)),
        shared(static_cast<std::size_t>(tokens * cols));
    for (float& v : in) v = 100.0f * uniform(random);
    for (float& v : shared) v = uniform(random);
    if (!in.empty()) in[0] = std::numeric_limits<float>::infinity();
    for (const float* add : {static_cast<const float*>(nullptr), static_cast<const float*>(shared.data())}) {
      const std::int64_t stride = cols + 8;
      std::vector<bf16> y(static_cast<std::size_t>(tokens * stride), bf16{0x7F7F}), y_ref(y);
      cpu_backend().combine(in.data(), actual.routing, weights.data(), add, {y.data(), tokens, cols, stride});
      ref_backend().combine(in.data(), expected.routing, weights.data(), add,
                            {y_ref.data(), tokens, cols, stride});
      EXPECT_TRUE(y == y_ref) << cols << " columns";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, CpuPermute,
                         ::testing::Values(Pairs{0, 2, 4}, Pairs{1, 1, 1}, Pairs{1, 8, 128},
                                           Pairs{17, 22, 32}, Pairs{257, 3, 3}, Pairs{64, 8, 512}));

TEST(CpuCombine, AddsInFp32AndRoundsOnce) {
  const int top_k = 8;
  std::vector<std::int32_t> ids = {0, 1, 2, 3, 4, 5, 6, 7};
  std::vector<float> weights(8, 1.0f);
  Sorted s(1, top_k, 8);
  cpu_backend().sort(ids.data(), weights.data(), s.routing);
  const auto combined = [&](std::vector<float> values) {
    values.resize(8 * 16, 0.0f);
    std::vector<float> in(8 * 16, 0.0f);
    for (std::size_t row = 0; row < 8; ++row) in[row * 16] = values[row];
    std::vector<bf16> y(16);
    cpu_backend().combine(in.data(), s.routing, weights.data(), nullptr, {y.data(), 1, 16});
    return to_float(y[0]);
  };
  EXPECT_EQ(combined({256, 1, 1, 1, 1, 1, 1, 1}), 264.0f);
  EXPECT_EQ(combined({1, 0x1p-9f, -1}), 0x1p-9f);
}

}  // namespace
}  // namespace megamoe::cpu
