// The vectorised activation functions against the scalar definitions, bit for bit.
#include "cpu/activations.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "layer/activation.h"
#include "numerics/exp.h"

namespace megamoe::cpu {
namespace {

// Equal bits; any NaN equals any other.
::testing::AssertionResult same(float actual, float expected) {
  if (bits_of_float(actual) == bits_of_float(expected) || (is_nan(actual) && is_nan(expected))) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << actual << " instead of " << expected;
}

// Bit patterns of all FP32 in steps of a prime, every one around the cuts of exp, and the special ones.
std::vector<float> dense_inputs() {
  std::vector<float> inputs;
  for (std::uint64_t bits = 0; bits < (1ull << 32); bits += 1009) {
    inputs.push_back(float_of_bits(static_cast<std::uint32_t>(bits)));
  }
  for (const float centre : {88.73f, -103.98f, -87.33f, 88.0f, 0.0f, -0.0f, 0.34657359f}) {
    const std::uint32_t bits = bits_of_float(centre);
    for (std::uint32_t i = 0; i < 4000; ++i) {
      inputs.push_back(float_of_bits(bits + i));
      inputs.push_back(float_of_bits(bits - i));
    }
  }
  inputs.push_back(std::numeric_limits<float>::infinity());
  inputs.push_back(-std::numeric_limits<float>::infinity());
  inputs.push_back(std::numeric_limits<float>::quiet_NaN());
  return inputs;
}

TEST(CpuActivations, ExpSigmoidAndSiluHaveTheBitsOfTheScalarCode) {
  const std::vector<float> x = dense_inputs();
  const auto count = static_cast<std::int64_t>(x.size());
  std::vector<float> e(x.size()), sigma(x.size()), s(x.size());
  exp_f32(x.data(), count, e.data());
  sigmoid_f32(x.data(), count, sigma.data());
  silu_f32(x.data(), count, s.data());
  for (std::size_t i = 0; i < x.size(); ++i) {
    ASSERT_TRUE(same(e[i], megamoe::exp_f32(x[i]))) << "exp of " << x[i];
    ASSERT_TRUE(same(sigma[i], megamoe::sigmoid_f32(x[i]))) << "sigmoid of " << x[i];
    ASSERT_TRUE(same(s[i], megamoe::silu_f32(x[i]))) << "silu of " << x[i];
  }
}

class CpuActivate : public ::testing::TestWithParam<Activation> {};

TEST_P(CpuActivate, HasTheBitsOfTheScalarCode) {
  const ActivationConfig config{.kind = GetParam(), .limit = 7.0f, .alpha = 1.702f};
  const std::vector<float> gate = dense_inputs();
  std::vector<float> up(gate.size()), gate_out = gate, h(gate.size());
  for (std::size_t i = 0; i < up.size(); ++i) up[i] = gate[(i * 7919) % gate.size()];
  activate(config, config.gated() ? gate_out.data() : nullptr, up.data(),
           static_cast<std::int64_t>(gate.size()), h.data());
  for (std::size_t i = 0; i < gate.size(); ++i) {
    const ActivatedPair expected = megamoe::activate(config, gate[i], up[i]);
    ASSERT_TRUE(same(h[i], expected.h)) << "gate " << gate[i] << ", up " << up[i];
    if (!config.gated()) continue;
    ASSERT_TRUE(same(gate_out[i], expected.gate)) << "gate " << gate[i];
  }
}

INSTANTIATE_TEST_SUITE_P(All, CpuActivate,
                         ::testing::Values(Activation::kSwiGlu, Activation::kSwiGluClamped,
                                           Activation::kGptOss, Activation::kRelu2));

}  // namespace
}  // namespace megamoe::cpu
