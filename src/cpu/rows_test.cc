// The loops over rows of every kernel against the scalar definitions, bit for bit.
#include "cpu/rows.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "base/check.h"
#include "cpu/kernels.h"
#include "layer/activation.h"
#include "numerics/bf16.h"
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

struct Case {
  std::string_view kernel;
  const Rows* rows;
};
std::vector<Case> cases() {
  std::vector<Case> all;
  for (const Kernel& kernel : all_kernels()) {
    if (kernel.supported) all.push_back({kernel.name, kernel.rows});
  }
  return all;
}

TEST(CpuRows, ActivationsHaveTheBitsOfTheScalarCode) {
  const std::vector<float> gate = dense_inputs();
  const auto count = static_cast<std::int64_t>(gate.size());
  std::vector<float> up(gate.size());
  for (std::size_t i = 0; i < up.size(); ++i) up[i] = gate[(i * 7919) % gate.size()];
  for (const Activation kind :
       {Activation::kSwiGlu, Activation::kSwiGluClamped, Activation::kGptOss, Activation::kRelu2}) {
    const ActivationConfig config{.kind = kind, .limit = 7.0f, .alpha = 1.702f};
    for (const Case& c : cases()) {
      SCOPED_TRACE(fmt::format("{}, {}", c.kernel, to_string(kind)));
      std::vector<float> gate_out = gate, h(gate.size());
      c.rows->activate(config, config.gated() ? gate_out.data() : nullptr, up.data(), count, h.data());
      for (std::size_t i = 0; i < gate.size(); ++i) {
        const ActivatedPair expected = megamoe::activate(config, gate[i], up[i]);
        ASSERT_TRUE(same(h[i], expected.h)) << "gate " << gate[i] << ", up " << up[i];
        if (config.gated()) {
          ASSERT_TRUE(same(gate_out[i], expected.gate)) << "gate " << gate[i];
        }
      }
    }
  }
}

TEST(CpuRows, EveryBf16AndWhatLiesBetweenRounds) {
  // each value, each half way to the next, and the neighbours of both
  std::vector<float> x;
  for (std::uint32_t high = 0; high < 1u << 16; ++high) {
    for (const std::uint32_t low : {0x0u, 0x1u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
      x.push_back(float_of_bits(high << 16 | low));
    }
  }
  for (const Case& c : cases()) {
    std::vector<bf16> rounded(x.size());
    c.rows->to_bf16(x.data(), static_cast<std::int64_t>(x.size()), rounded.data());
    for (std::size_t i = 0; i < x.size(); ++i) {
      ASSERT_EQ(rounded[i], to_bf16(x[i])) << c.kernel << ": " << bits_of_float(x[i]);
    }
  }
}

// Odd counts, too, as the compiler's loops have tails.
TEST(CpuRows, SumsRoundAfterEachStep) {
  const std::vector<float> in = dense_inputs();
  const std::size_t panels = 3, stride = 2 * 16;
  for (const Case& c : cases()) {
    for (const std::size_t count : {1u, 7u, 16u, 61u, 4099u}) {
      std::vector<float> acc(in.begin() + 100, in.begin() + 100 + static_cast<std::ptrdiff_t>(count));
      std::vector<float> wanted = acc;
      c.rows->add_weighted(acc.data(), 0.3f, in.data(), static_cast<std::int64_t>(count));
      c.rows->add(acc.data(), in.data() + 7, static_cast<std::int64_t>(count));
      for (std::size_t i = 0; i < count; ++i) {
        const float product = mul_rn(0.3f, in[i]);
        wanted[i] = add_rn(add_rn(wanted[i], product), in[i + 7]);
        ASSERT_TRUE(same(acc[i], wanted[i])) << c.kernel << ", " << i << " of " << count;
      }
    }
    for (const float* bias : {static_cast<const float*>(nullptr), in.data() + 5000}) {
      std::vector<float> out(panels * 16);
      c.rows->finish(in.data(), stride, panels, 3.1f, 0.7f, bias, out.data());
      for (std::size_t i = 0; i < out.size(); ++i) {
        const float scaled = mul_rn(mul_rn(in[i / 16 * stride + i % 16], 3.1f), 0.7f);
        ASSERT_TRUE(same(out[i], bias == nullptr ? scaled : add_rn(scaled, bias[i])))
            << c.kernel << ", " << i;
      }
    }
  }
}

}  // namespace
}  // namespace megamoe::cpu
