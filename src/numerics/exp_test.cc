// exp_test.cc: the exponential, sigmoid and silu against FP64, and where they must not fail.
#include "numerics/exp.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "numerics/bf16.h"
#include "numerics/oracle.h"

namespace megamoe {
namespace {

using oracle::kInf;
using oracle::kMax;
constexpr double kLeastNormal = 0x1p-126;
constexpr double kLeastSubnormal = 0x1p-149;

// The bounds of exp.h. Trying every FP32 of a magnitude between 2^-30 and 110 finds 1.22, 2.41 and 3.35 ulp,
// and 0.78 and 97 steps of 2^-149.
constexpr double kExpUlp = 1.25;
constexpr double kSigmoidUlp = 2.5;
constexpr double kSiluUlp = 3.5;
constexpr double kTinySteps = 0.8;      // exp and sigmoid, results below 2^-126: in units of 2^-149
constexpr double kSiluTailSteps = 128;  // silu below x = -87, where exp(x) is subnormal: in units of 2^-149
constexpr float kSiluTail = -87.0f;

// The distance between neighbouring FP32 numbers around v.
double ulp(double v) {
  int exponent;
  std::frexp(v, &exponent);
  return std::ldexp(1.0, std::max(exponent, -125) - 24);
}

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

void check(float x) {
  const double e = std::exp(static_cast<double>(x));
  const float exp_here = exp_f32(x);
  if (e >= 0x1p128) {
    ASSERT_EQ(exp_here, kInf) << x;
  } else if (e >= kLeastNormal) {
    ASSERT_LE(std::fabs(exp_here - e), kExpUlp * ulp(e)) << x;
  } else {
    ASSERT_LE(std::fabs(exp_here - e), kTinySteps * kLeastSubnormal) << x;
  }
  const double s = sigmoid(x);
  ASSERT_LE(std::fabs(sigmoid_f32(x) - s),
            s >= kLeastNormal ? kSigmoidUlp * ulp(s) : kTinySteps * kLeastSubnormal)
      << x;
  const double l = static_cast<double>(x) * s;
  const bool tail = x < kSiluTail || std::fabs(l) < kLeastNormal;
  ASSERT_LE(std::fabs(silu_f32(x) - l), tail ? kSiluTailSteps * kLeastSubnormal : kSiluUlp * ulp(l)) << x;
}

TEST(Exp, WithinItsBoundOverTheWholeRange) {
  // Every pattern step from 2^-30 to 128, both signs: 37 binades, about 8,200 points each.
  for (std::uint32_t bits = oracle::bits_from_float(0x1p-30f); bits <= oracle::bits_from_float(128.0f);
       bits += 1021) {
    const float x = oracle::float_from_bits(bits);
    ASSERT_NO_FATAL_FAILURE(check(x));
    ASSERT_NO_FATAL_FAILURE(check(-x));
  }
}

TEST(Exp, WithinItsBoundNextToEveryChangeOfExponent) {
  for (int half = -300; half <= 255;
       ++half) {  // (n + 1/2) ln 2 and n ln 2: where the reduction changes its n
    if (half == 0) continue;
    const float centre = static_cast<float>(half * 0.34657359027997264);
    for (int k = -8; k <= 8; ++k) {
      const float x =
          oracle::float_from_bits(oracle::bits_from_float(centre) + static_cast<std::uint32_t>(k));
      ASSERT_NO_FATAL_FAILURE(check(x));
    }
  }
}

TEST(Exp, SpecialInputs) {
  constexpr float kLast = 0x1.62e42ep+6f;  // 88.72283
  EXPECT_EQ(exp_f32(0.0f), 1.0f);
  EXPECT_EQ(exp_f32(-0.0f), 1.0f);
  EXPECT_EQ(exp_f32(0x1p-149f), 1.0f);
  EXPECT_EQ(exp_f32(kInf), kInf);
  EXPECT_EQ(exp_f32(-kInf), 0.0f);
  EXPECT_EQ(exp_f32(kMax), kInf);
  EXPECT_EQ(exp_f32(-kMax), 0.0f);
  EXPECT_TRUE(std::isfinite(exp_f32(kLast))) << "just below ln of the largest FP32";
  EXPECT_EQ(exp_f32(std::nextafter(kLast, kInf)), kInf);
  EXPECT_EQ(exp_f32(-103.0f), 0x1p-149f) << "results fade through the subnormals";
  EXPECT_EQ(exp_f32(-104.0f), 0.0f);
  EXPECT_TRUE(std::isnan(exp_f32(std::numeric_limits<float>::quiet_NaN())));
}

TEST(Sigmoid, SpecialInputs) {
  EXPECT_EQ(sigmoid_f32(0.0f), 0.5f);
  EXPECT_EQ(sigmoid_f32(-0.0f), 0.5f);
  EXPECT_EQ(sigmoid_f32(kInf), 1.0f);
  EXPECT_EQ(sigmoid_f32(-kInf), 0.0f);
  EXPECT_EQ(sigmoid_f32(kMax), 1.0f);
  EXPECT_EQ(sigmoid_f32(-kMax), 0.0f);
  EXPECT_TRUE(std::isnan(sigmoid_f32(-std::numeric_limits<float>::quiet_NaN())));
}

TEST(Silu, SpecialInputs) {
  EXPECT_EQ(oracle::bits_from_float(silu_f32(0.0f)), 0u);
  EXPECT_EQ(oracle::bits_from_float(silu_f32(-0.0f)), 0x80000000u) << "the sign of zero is kept";
  EXPECT_EQ(silu_f32(kMax), kMax);
  EXPECT_EQ(silu_f32(-kMax), 0.0f);
  EXPECT_EQ(silu_f32(kInf), kInf);
  EXPECT_TRUE(std::isnan(silu_f32(-kInf))) << "an infinity that came in stays visible";
  EXPECT_TRUE(std::isnan(silu_f32(std::numeric_limits<float>::quiet_NaN())));
}

// A finite gate never makes a NaN or an infinity, and sigmoid stays in [0, 1].
void check_finite(float x) {
  ASSERT_TRUE(std::isfinite(silu_f32(x))) << x;
  ASSERT_LE(std::fabs(silu_f32(x)), std::fabs(x)) << x;
  ASSERT_GE(sigmoid_f32(x), 0.0f) << x;
  ASSERT_LE(sigmoid_f32(x), 1.0f) << x;
}

TEST(Silu, FiniteForEveryFiniteBF16) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const float x = to_float(bf16{static_cast<std::uint16_t>(bits)});
    if (!std::isfinite(x)) continue;
    ASSERT_NO_FATAL_FAILURE(check_finite(x));
    ASSERT_NO_FATAL_FAILURE(check(x));
  }
}

TEST(Silu, FiniteForAMillionRandomFP32) {
  for (std::uint64_t i = 0; i < 1000000; ++i) {
    const float x = oracle::float_from_bits(static_cast<std::uint32_t>(oracle::mix(i) >> 32));
    if (!std::isfinite(x)) continue;
    ASSERT_NO_FATAL_FAILURE(check_finite(x));
  }
}

}  // namespace
}  // namespace megamoe
