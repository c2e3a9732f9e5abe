// mxfp4_test.cc: MXFP4 blocks, and their cast to NVFP4.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "base/test_error.h"
#include "numerics/mxfp4.h"
#include "numerics/mxfp4_to_nvfp4.h"
#include "numerics/nvfp4.h"
#include "numerics/oracle.h"

namespace megamoe {
namespace {

using Bytes = std::vector<std::uint8_t>;

struct Matrix {
  std::int64_t rows, cols;
  Bytes codes, scales;
  Mxfp4View view() const { return {codes.data(), scales.data(), rows, cols}; }
};

// Random codes; exponents k (not biased) from the generator.
Matrix make(std::int64_t rows, std::int64_t cols, const std::function<int(std::int64_t)>& exponent_of_block) {
  Matrix m{rows, cols, Bytes(static_cast<std::size_t>(rows * cols / 2)),
           Bytes(static_cast<std::size_t>(rows * cols / 32))};
  for (std::size_t i = 0; i < m.codes.size(); ++i) {
    m.codes[i] = static_cast<std::uint8_t>(oracle::mix(i) >> 8 | 1);  // no block of zeros by chance
  }
  for (std::size_t b = 0; b < m.scales.size(); ++b) {
    m.scales[b] = static_cast<std::uint8_t>(exponent_of_block(static_cast<std::int64_t>(b)) + 127);
  }
  return m;
}

struct Result {
  Mxfp4Cast cast;
  Bytes codes, scales;
};
Result cast(const Matrix& m, std::optional<int> k_max, std::uint8_t poison = 0x7f) {
  Result r{{}, Bytes(m.codes.size(), poison), Bytes(m.scales.size() * 2, poison)};
  r.cast = cast_mxfp4_to_nvfp4(m.view(), k_max, r.codes.data(), r.scales.data());
  return r;
}

double source_value(const Matrix& m, std::int64_t i) {
  const int code = m.codes[static_cast<std::size_t>(i / 2)] >> (i % 2 * 4) & 15;
  return std::ldexp(oracle::e2m1_value(code), m.scales[static_cast<std::size_t>(i / 32)] - 127);
}
double cast_value(const Result& r, std::int64_t i) {
  const int code = r.codes[static_cast<std::size_t>(i / 2)] >> (i % 2 * 4) & 15;
  return oracle::e2m1_value(code) * oracle::e4m3_value(r.scales[static_cast<std::size_t>(i / 16)]) *
         static_cast<double>(r.cast.tensor_scale);
}

TEST(Mxfp4ToNvfp4, ExactWhereverTheExponentsAllowIt) {
  // The largest exponent over its whole range: the tensor scale from a subnormal 2^-135 to 2^119.
  for (const int k_max : {-127, -120, -118, -110, -20, 0, 5, 100, 126, 127}) {
    const Matrix m =
        make(3, 32 * 18, [&](std::int64_t b) { return std::max(-127, k_max - static_cast<int>(b % 18)); });
    ASSERT_EQ(mxfp4_max_exponent(m.view()), k_max);
    const Result r = cast(m, k_max);
    EXPECT_EQ(r.cast.inexact_blocks, 0);
    EXPECT_EQ(r.cast.tensor_scale, std::ldexp(1.0, k_max - 8));
    EXPECT_EQ(r.codes, m.codes) << "no code is touched";
    EXPECT_EQ(r.scales[0], 0x78) << "the largest exponent becomes 2^8";
    EXPECT_EQ(r.scales[1], 0x78) << "for both halves";
    for (std::int64_t i = 0; i < m.rows * m.cols; ++i) ASSERT_EQ(cast_value(r, i), source_value(m, i)) << i;
  }
}

TEST(Mxfp4ToNvfp4, ReachesSeventeenAndNoFurther) {
  const Matrix m = make(1, 96, [](std::int64_t b) { return b == 0 ? 10 : b == 1 ? 10 - 17 : 10 - 18; });
  const Result r = cast(m, mxfp4_max_exponent(m.view()));
  EXPECT_EQ(r.cast.inexact_blocks, 1);
  EXPECT_EQ(r.scales, (Bytes{0x78, 0x78, 0x01, 0x01, 0x01, 0x01}));
  // The third block is quantised anew: each value to the nearest multiple that a scale of 2^-9 leaves.
  const float g = r.cast.tensor_scale;
  for (std::int64_t half = 4; half < 6; ++half) {
    float x[16];
    for (int i = 0; i < 16; ++i) x[i] = static_cast<float>(source_value(m, half * 16 + i));
    const oracle::Block expected = oracle::nvfp4(x, g);
    EXPECT_EQ(r.scales[static_cast<std::size_t>(half)], expected.scale);
    for (std::int64_t i = 0; i < 16; ++i) {
      const std::int64_t at = half * 16 + i;
      EXPECT_EQ(r.codes[static_cast<std::size_t>(at / 2)] >> (at % 2 * 4) & 15, expected.codes[i]);
    }
  }
}

TEST(Mxfp4ToNvfp4, FarBlocksFadeToZeroAndAreCounted) {
  const Matrix m = make(2, 64, [](std::int64_t b) { return b == 0 ? 127 : -127; });
  const Result r = cast(m, 127);
  EXPECT_EQ(r.cast.inexact_blocks, 3);
  for (std::int64_t i = 32; i < 128; ++i) ASSERT_EQ(cast_value(r, i), 0.0) << i;
}

TEST(Mxfp4ToNvfp4, ZeroBlocksHaveNoSay) {
  Matrix m = make(1, 96, [](std::int64_t b) { return b == 1 ? 100 : b == 2 ? -120 : -3; });
  for (std::size_t i = 16; i < 48; ++i) m.codes[i] = i % 2 ? 0x80 : 0x08;  // blocks 1 and 2: 0 and -0
  EXPECT_EQ(mxfp4_max_exponent(m.view()), -3);
  const Result r = cast(m, mxfp4_max_exponent(m.view()));
  EXPECT_EQ(r.cast.inexact_blocks, 0);
  EXPECT_EQ(r.codes, m.codes) << "the sign of zero is kept";
  EXPECT_EQ(r.scales, (Bytes{0x78, 0x78, 0x38, 0x38, 0x38, 0x38}));
}

TEST(Mxfp4ToNvfp4, AllZeroMatrixAndEmptyMatrix) {
  Matrix m = make(2, 32, [](std::int64_t) { return 5; });
  m.codes.assign(m.codes.size(), 0);
  EXPECT_EQ(mxfp4_max_exponent(m.view()), std::nullopt);
  const Result r = cast(m, std::nullopt);
  EXPECT_EQ(r.cast.tensor_scale, 1.0f);
  EXPECT_EQ(r.scales, Bytes(4, 0x38));
  const Matrix empty{0, 32, {}, {}};
  EXPECT_EQ(cast(empty, mxfp4_max_exponent(empty.view())).cast.inexact_blocks, 0);
}

TEST(Mxfp4ToNvfp4, TwoMatricesShareATensorScale) {
  const Matrix gate = make(4, 64, [](std::int64_t b) { return static_cast<int>(b % 3); });
  const Matrix up = make(4, 64, [](std::int64_t b) { return 6 - static_cast<int>(b % 5); });
  const int k_max = std::max(*mxfp4_max_exponent(gate.view()), *mxfp4_max_exponent(up.view()));
  const Result g = cast(gate, k_max), u = cast(up, k_max);
  EXPECT_EQ(g.cast.tensor_scale, u.cast.tensor_scale);
  for (std::int64_t i = 0; i < 4 * 64; ++i) {
    ASSERT_EQ(cast_value(g, i), source_value(gate, i));
    ASSERT_EQ(cast_value(u, i), source_value(up, i));
  }
}

TEST(Mxfp4ToNvfp4, InPlaceAndPoisonGiveTheSame) {
  Matrix m = make(5, 96, [](std::int64_t b) { return -static_cast<int>(b * 3); });
  const std::optional<int> k_max = mxfp4_max_exponent(m.view());
  const Result a = cast(m, k_max, 0x7f), b = cast(m, k_max, 0xff), c = cast(m, k_max, 0x00);
  EXPECT_GT(a.cast.inexact_blocks, 0);
  EXPECT_EQ(a.codes, b.codes);
  EXPECT_EQ(a.codes, c.codes);
  EXPECT_EQ(a.scales, b.scales);
  EXPECT_EQ(a.scales, c.scales);
  Bytes scales(m.scales.size() * 2);
  cast_mxfp4_to_nvfp4(m.view(), k_max, m.codes.data(), scales.data());
  EXPECT_EQ(m.codes, a.codes);
  EXPECT_EQ(scales, a.scales);
}

TEST(Mxfp4ToNvfp4, RefusesWhatItCannotCast) {
  Matrix m = make(3, 64, [](std::int64_t) { return 0; });
  EXPECT_EQ(code_of([&] { cast(m, -1); }), ErrorCode::kInvalidArgument) << "below the matrix's own largest";
  EXPECT_EQ(code_of([&] { cast(m, std::nullopt); }), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of([&] { cast(m, 128); }), ErrorCode::kInvalidArgument);
  m.scales[3] = 0xFF;
  std::string message;
  EXPECT_EQ(code_of([&] { mxfp4_max_exponent(m.view()); }, &message), ErrorCode::kInvalidArgument);
  EXPECT_NE(message.find("row 1, block 1"), std::string::npos) << message;
  m.cols = 48;
  EXPECT_EQ(code_of([&] { mxfp4_max_exponent(m.view()); }), ErrorCode::kInvalidArgument);
}

TEST(Mxfp4, BlockScaleIsTheLeastThatHoldsTheBlock) {
  std::int64_t tested = 0;
  const auto check = [&](float a) {
    const std::uint8_t scale = mxfp4_block_scale(a);
    const double six = 6.0 * std::ldexp(1.0, scale - 127);
    ASSERT_LE(a, six) << a;
    ASSERT_TRUE(scale == 0 || a > six / 2) << a;
    ++tested;
  };
  for (std::uint64_t i = 0; i < 200000; ++i) {
    const float a = oracle::float_from_bits(static_cast<std::uint32_t>(oracle::mix(i) >> 33));
    if (std::isfinite(a) && a > 0) check(a);
  }
  for (int e = -127; e <= 125; ++e) {  // next to 6 * 2^e, where a / 6 may round onto the power of two
    const float edge = std::ldexp(6.0f, e);
    for (int k = -3; k <= 3; ++k) {
      check(oracle::float_from_bits(oracle::bits_from_float(edge) + static_cast<std::uint32_t>(k)));
    }
  }
  EXPECT_GT(tested, 190000);
  EXPECT_EQ(mxfp4_block_scale(0.0f), 127);
}

TEST(Mxfp4, QuantizeBlock) {
  for (std::uint64_t trial = 0; trial < 20000; ++trial) {
    float x[32];
    for (std::uint64_t i = 0; i < 32; ++i) {
      const std::uint64_t r = oracle::mix(trial * 32 + i);
      x[i] = std::ldexp(static_cast<float>(r % 4001) - 2000.0f, static_cast<int>(trial % 240) - 140);
    }
    std::uint8_t codes[16];
    const std::uint8_t scale = mxfp4_quantize_block(x, codes);
    for (std::int64_t i = 0; i < 32; ++i) {
      const double q = std::ldexp(static_cast<double>(x[i]), 127 - scale);
      ASSERT_EQ(nibble(codes, i), oracle::e2m1(q)) << trial << " " << i;
    }
  }
  float x[32] = {1.0f, std::numeric_limits<float>::infinity()};
  std::uint8_t codes[16];
  EXPECT_EQ(mxfp4_quantize_block(x, codes), 0xFF) << "a fault is a block of NaN";
  for (const std::uint8_t pair : codes) EXPECT_EQ(pair, 0);
  EXPECT_TRUE(std::isnan(mxfp4_value(0, 0xFF)));
}

}  // namespace
}  // namespace megamoe
