#include "cuda/shared_expert.h"

#include <cmath>

#include "cuda/gpu_test.h"
#include "numerics/bf16.h"
#include "numerics/exp.h"

namespace megamoe::cuda {
namespace {

class SharedExpertTest : public GpuTest {};

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

// `exact`: every sum is exact in any order, so that the factor is given to the bit.
void expect_factors(std::int64_t tokens, std::int64_t hidden, std::int64_t more, bool exact, int poison) {
  SCOPED_TRACE(::testing::Message() << tokens << " x " << hidden << ", stride +" << more << ", poison "
                                    << poison);
  Random random(static_cast<std::uint64_t>(hidden + more));
  const std::int64_t stride = hidden + more;
  std::vector<bf16> x(size(tokens * stride), bf16{0x7FC0});
  std::vector<float> gate(size(hidden));
  for (float& g : gate) g = exact ? static_cast<float>(random.integer(-3, 3)) : random.bell() * 0.1f;
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t k = 0; k < hidden; ++k)
      x[size(t * stride + k)] =
          to_bf16(exact ? static_cast<float>(random.integer(-4, 4)) * 0.125f : random.bell());
  }
  const DeviceArray<bf16> d_x(x);
  const DeviceArray<float> d_gate(gate);
  const Output<float> factors(tokens, poison);
  const Output<std::int64_t> offsets(2, poison);
  cuda_check(prepare_shared_expert({.x = d_x.data(),
                                    .row_stride = stride,
                                    .tokens = tokens,
                                    .hidden = hidden,
                                    .gate = d_gate.data(),
                                    .factors = factors.data(),
                                    .offsets = offsets.data()},
                                   nullptr),
             "testing prepare_shared_expert");
  EXPECT_EQ(offsets.download(), (std::vector<std::int64_t>{0, tokens}));
  const std::vector<float> got = factors.download();
  for (std::int64_t t = 0; t < tokens; ++t) {
    double sum = 0;
    for (std::int64_t k = 0; k < hidden; ++k)
      sum += static_cast<double>(to_float(x[size(t * stride + k)])) * static_cast<double>(gate[size(k)]);
    const auto rounded = static_cast<float>(sum);
    const float factor = got[size(t)];
    // Another order of the FP64 sum rounds to the next FP32 at most.
    const bool near = factor == sigmoid_f32(std::nextafter(rounded, -INFINITY)) ||
                      factor == sigmoid_f32(std::nextafter(rounded, INFINITY));
    ASSERT_TRUE(factor == sigmoid_f32(rounded) || (!exact && near)) << "token " << t << ": " << factor;
  }
}

TEST_F(SharedExpertTest, FactorsAreTheSigmoidOfTheDotProduct) {
  for (const int poison : {0x7F, 0xFF, 0x00}) {
    for (const bool exact : {true, false}) {
      for (const std::int64_t hidden : {16, 48, 128, 144, 2880}) {
        for (const std::int64_t more : {0, 8}) expect_factors(7, hidden, more, exact, poison);
      }
    }
  }
  expect_factors(70000, 16, 0, true, 0x7F);  // more blocks than the other axes of a grid take
}

TEST_F(SharedExpertTest, WithoutAGateOnlyTheOffsets) {
  const DeviceArray<bf16> x(16 * 3);
  const Output<std::int64_t> offsets(2);
  const SharedExpertParams params{
      .x = x.data(), .row_stride = 16, .tokens = 3, .hidden = 16, .offsets = offsets.data()};
  cuda_check(prepare_shared_expert(params, nullptr), "testing prepare_shared_expert");
  EXPECT_EQ(offsets.download(), (std::vector<std::int64_t>{0, 3}));
}

// A fault stays in its token.
TEST_F(SharedExpertTest, FaultsSpoilTheirTokenAlone) {
  std::vector<bf16> x(16 * 3, to_bf16(1.0f));
  x[20] = bf16{0x7FC0};
  const DeviceArray<bf16> d_x(x);
  const DeviceArray<float> gate(std::vector<float>(16, 0.0f));
  const Output<float> factors(3);
  cuda_check(prepare_shared_expert({.x = d_x.data(),
                                    .row_stride = 16,
                                    .tokens = 3,
                                    .hidden = 16,
                                    .gate = gate.data(),
                                    .factors = factors.data()},
                                   nullptr),
             "testing prepare_shared_expert");
  const std::vector<float> got = factors.download();
  EXPECT_EQ(got[0], 0.5f);
  EXPECT_TRUE(std::isnan(got[1]));
  EXPECT_EQ(got[2], 0.5f);
}

}  // namespace
}  // namespace megamoe::cuda
