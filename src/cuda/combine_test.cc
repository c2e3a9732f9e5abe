#include "cuda/combine.h"

#include <limits>

#include "cuda/gpu_test.h"
#include "numerics/bf16.h"
#include "ref/operations.h"

namespace megamoe::cuda {
namespace {

class CombineTest : public GpuTest {};

struct Case {
  std::int64_t tokens, hidden;
  int top_k;
  bool shared;
  std::int64_t stride_more = 0;
  int poison = 0x7F;
  bool factors = false;  // the shared expert's
};

void expect_reference(const Case& c, std::uint64_t seed) {
  SCOPED_TRACE(::testing::Message() << c.tokens << " tokens, hidden " << c.hidden << ", top " << c.top_k);
  Random random(seed);
  const auto pairs = static_cast<std::size_t>(c.tokens * c.top_k);
  // One expert's rows in any order of the pairs that are not left out.
  std::vector<std::int32_t> slot_to_row(pairs, -1), row_to_token(pairs), row_to_slot(pairs);
  std::vector<std::size_t> order(pairs);
  for (std::size_t i = 0; i < pairs; ++i) order[i] = i;
  for (std::size_t i = pairs; i-- > 1;) std::swap(order[i], order[random.bits() % (i + 1)]);
  std::int64_t rows = 0;
  for (const std::size_t pair : order) {
    if (random.integer(0, 4) == 0) continue;
    slot_to_row[pair] = static_cast<std::int32_t>(rows);
    row_to_token[static_cast<std::size_t>(rows)] = static_cast<std::int32_t>(pair) / c.top_k;
    row_to_slot[static_cast<std::size_t>(rows)] = static_cast<std::int32_t>(pair) % c.top_k;
    ++rows;
  }
  std::vector<float> expert_out(static_cast<std::size_t>(rows * c.hidden)), weights(pairs),
      shared(c.shared ? static_cast<std::size_t>(c.tokens * c.hidden) : 0);
  for (float& x : expert_out) x = random.bell() * (random.integer(0, 9) == 0 ? 1e6f : 1.0f);
  if (rows > 1) {
    expert_out[3] = std::numeric_limits<float>::infinity();
    expert_out[static_cast<std::size_t>(c.hidden)] = std::numeric_limits<float>::quiet_NaN();
    expert_out[5] = -0.0f;
  }
  for (float& w : weights) w = random.uniform(-1, 2);
  for (float& x : shared) x = random.bell();
  std::vector<float> factors(c.factors ? static_cast<std::size_t>(c.tokens) : 0), scaled = shared;
  for (float& f : factors) f = random.uniform(0, 1);
  if (c.factors) {
    for (std::size_t i = 0; i < scaled.size(); ++i)
      scaled[i] = shared[i] * factors[i / static_cast<std::size_t>(c.hidden)];
  }

  std::vector<std::int64_t> offsets = {0, rows};
  const Routing routing{.tokens = c.tokens,
                        .top_k = c.top_k,
                        .num_experts = 1,
                        .offsets = offsets.data(),
                        .row_to_token = row_to_token.data(),
                        .row_to_slot = row_to_slot.data()};
  const std::int64_t stride = c.hidden + c.stride_more;
  std::vector<bf16> want(static_cast<std::size_t>(c.tokens * stride));
  if (!want.empty()) std::memset(static_cast<void*>(want.data()), c.poison, want.size() * 2);
  ref::combine(expert_out.data(), routing, weights.data(), c.shared ? scaled.data() : nullptr,
               {want.data(), c.tokens, c.hidden, stride});

  const DeviceArray<float> d_out(expert_out), d_weights(weights), d_shared(shared), d_factors(factors);
  const DeviceArray<std::int32_t> d_rows(slot_to_row);
  const Output<bf16> y(c.tokens * stride, c.poison);
  cuda_check(combine({.expert_out = d_out.data(),
                      .slot_to_row = d_rows.data(),
                      .weights = d_weights.data(),
                      .shared = c.shared ? d_shared.data() : nullptr,
                      .shared_factors = c.factors ? d_factors.data() : nullptr,
                      .y = y.data(),
                      .y_stride = stride,
                      .tokens = c.tokens,
                      .top_k = c.top_k,
                      .hidden = c.hidden},
                     nullptr),
             "testing combine");
  EXPECT_TRUE(same_numbers(y.download(), want));
}

TEST_F(CombineTest, EqualsTheReference) {
  std::uint64_t seed = 1;
  for (const int poison : {0x7F, 0xFF, 0x00}) {
    for (const int top_k : {1, 2, 4, 6, 8, 9, 22, 32}) {
      for (const std::int64_t hidden : {16, 48, 176, 512, 2880}) {
        expect_reference({7, hidden, top_k, seed % 2 == 0, 0, poison}, ++seed);
      }
    }
  }
}

TEST_F(CombineTest, StridedRowsKeepWhatLiesBetween) {
  for (const std::int64_t more : {1, 4, 8, 33}) expect_reference({5, 80, 3, true, more}, 7);
}

TEST_F(CombineTest, SharedExpertsMayHaveFactors) {
  for (const std::int64_t hidden : {16, 48, 2880}) {
    expect_reference({.tokens = 7, .hidden = hidden, .top_k = 3, .shared = true, .factors = true}, 8);
  }
}

TEST_F(CombineTest, NoTokensAndMany) {
  expect_reference({0, 64, 2, true}, 1);
  expect_reference({70000, 16, 2, true}, 2);
}

}  // namespace
}  // namespace megamoe::cuda
