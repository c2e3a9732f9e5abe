// nvfp4_test.cc: the recipe against a second one that was written independently, and four-over-six against
// both.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "megamoe/quantize.h"
#include "numerics/four_over_six.h"
#include "numerics/nvfp4.h"
#include "numerics/oracle.h"

namespace megamoe {
namespace {

constexpr std::int64_t kCols = 256;
constexpr std::int64_t kBlocks = kCols / 16;

// Values whose magnitudes differ in five ways, so that scales cover everything from underflow to saturation:
// alike, over many binades, on a grid that makes ties, mostly zeros, and with an outlier.
double value_for(std::uint64_t r, std::uint64_t block) {
  const double u = static_cast<double>(r >> 11) * 0x1p-53 * 2 - 1;
  switch (block % 5) {
    case 0: return u;
    case 1: return std::ldexp(u, static_cast<int>(r % 41) - 20);
    case 2: return static_cast<double>(static_cast<std::int64_t>(r % 193) - 96) / 16;
    case 3: return r % 7 == 0 ? u * 100 : r % 7 == 1 ? -0.0 : 0.0;
    default: return r % 16 == 3 ? u * 1000 : u;
  }
}

// One matrix in the precision T; `to_bits` gives an element from a double.
template <class T>
struct Sample {
  std::vector<T> x;
  std::vector<double> values;  // what the elements are worth, decoded without the code under test
};

// Rows of each sample have a magnitude of their own.
double row_factor(std::int64_t r, int spread) {
  return std::ldexp(1.0 + static_cast<double>(oracle::mix(static_cast<std::uint64_t>(r)) % 1000) / 1000,
                    static_cast<int>(oracle::mix(static_cast<std::uint64_t>(r) + 99) %
                                     static_cast<std::uint64_t>(2 * spread + 1)) -
                        spread);
}

Sample<float> make_f32(std::int64_t rows, std::uint64_t seed) {
  Sample<float> s;
  for (std::int64_t i = 0; i < rows * kCols; ++i) {
    const std::uint64_t r = oracle::mix(seed << 40 | static_cast<std::uint64_t>(i));
    s.x.push_back(
        static_cast<float>(value_for(r, static_cast<std::uint64_t>(i / 16)) * row_factor(i / kCols, 60)));
    s.values.push_back(s.x.back());
  }
  return s;
}

// Finite 16-bit patterns: sign, an exponent near that of the row, any mantissa.
template <class T>
Sample<T> make_16(std::int64_t rows, std::uint64_t seed, int mantissa_bits, int bias, int max_exponent) {
  Sample<T> s;
  const int spread = 12;
  for (std::int64_t i = 0; i < rows * kCols; ++i) {
    const std::uint64_t r = oracle::mix(seed << 40 | static_cast<std::uint64_t>(i));
    const auto centre = static_cast<int>(oracle::mix(static_cast<std::uint64_t>(i / kCols)) %
                                         static_cast<std::uint64_t>(max_exponent + 1));
    int e = centre + static_cast<int>(r % (2 * spread + 1)) - spread;
    e = std::min(std::max(e, 0), max_exponent);
    const auto m = static_cast<int>(r >> 20 & ((1u << mantissa_bits) - 1));
    const bool negative = (r >> 40 & 1) != 0;
    s.x.push_back(T{static_cast<std::uint16_t>((negative ? 0x8000 : 0) | e << mantissa_bits | m)});
    const double magnitude = e == 0 ? std::ldexp(m, 1 - bias - mantissa_bits)
                                    : std::ldexp((1 << mantissa_bits) + m, e - bias - mantissa_bits);
    s.values.push_back(negative ? -magnitude : magnitude);
  }
  return s;
}

// The expected tensor scales, by another route than the library's.
std::vector<float> expected_scales(const std::vector<double>& values, std::int64_t rows,
                                   const QuantizeOptions& options, double range) {
  if (options.mode == QuantizeOptions::TensorScale::kGiven) return {options.tensor_scale};
  const bool per_row = options.mode == QuantizeOptions::TensorScale::kRow;
  std::vector<double> amax(per_row ? static_cast<std::size_t>(rows) : 1, 0.0);
  for (std::size_t i = 0; i < values.size(); ++i) {
    double& a = amax[per_row ? i / kCols : 0];
    a = std::max(a, std::fabs(values[i]));
  }
  std::vector<float> scales;
  for (const double a : amax) scales.push_back(a == 0 ? 1.0f : static_cast<float>(a / range));
  return scales;
}

template <class T>
void compare(const Sample<T>& sample, std::int64_t rows, const QuantizeOptions& options) {
  const Nvfp4Tensor q = quantize(MatrixView<const T>{sample.x.data(), rows, kCols}, options);
  ASSERT_EQ(q.tensor_scales, expected_scales(sample.values, rows, options, 2688.0));
  std::int64_t wrong_scales = 0, wrong_codes = 0;
  for (std::int64_t b = 0; b < rows * kBlocks; ++b) {
    float x[16];
    for (int i = 0; i < 16; ++i)
      x[i] = static_cast<float>(sample.values[static_cast<std::size_t>(b * 16 + i)]);
    const float g = q.tensor_scales[q.tensor_scales.size() == 1 ? 0 : static_cast<std::size_t>(b / kBlocks)];
    const oracle::Block expected = oracle::nvfp4(x, g);
    wrong_scales += q.scales[static_cast<std::size_t>(b)] != expected.scale;
    for (int i = 0; i < 16; ++i) {
      const std::uint8_t pair = q.codes[static_cast<std::size_t>(b * 8 + i / 2)];
      wrong_codes += (i % 2 == 0 ? pair & 15 : pair >> 4) != expected.codes[i];
    }
  }
  EXPECT_EQ(wrong_scales, 0);
  EXPECT_EQ(wrong_codes, 0);
}

// 12 x 6,144 rows x 16 blocks: 1.18 million.
TEST(Nvfp4, AgreesWithASecondQuantiserOnAMillionBlocks) {
  constexpr std::int64_t kRows = 6144;
  const QuantizeOptions ways[] = {
      {QuantizeOptions::TensorScale::kRow, 0.0f, false},
      {QuantizeOptions::TensorScale::kTensor, 0.0f, false},
      {QuantizeOptions::TensorScale::kGiven, 1.0f / 2688.0f, false},
      {QuantizeOptions::TensorScale::kGiven, 0.0123f, false},
  };
  std::uint64_t seed = 1;
  for (const QuantizeOptions& options : ways) {
    SCOPED_TRACE(static_cast<int>(options.mode));
    compare(make_f32(kRows, seed++), kRows, options);
    compare(make_16<bf16>(kRows, seed++, 7, 127, 254), kRows, options);
    compare(make_16<fp16>(kRows, seed++, 10, 15, 30), kRows, options);
  }
}

double squared_error(const std::vector<float>& x, const std::vector<float>& y, std::int64_t block) {
  double sum = 0;
  for (std::int64_t i = block * 16; i < block * 16 + 16; ++i) {
    const double error = static_cast<double>(y[static_cast<std::size_t>(i)]) - x[static_cast<std::size_t>(i)];
    sum += error * error;
  }
  return sum;
}

TEST(FourOverSix, NoBlockGetsWorseUnderTheSameTensorScale) {
  constexpr std::int64_t kRows = 1024;
  const Sample<float> sample = make_f32(kRows, 77);
  const MatrixView<const float> x{sample.x.data(), kRows, kCols};
  for (const float g : {1.0f / 1536.0f, 1e-6f, 0.3f}) {
    const Nvfp4Tensor plain = quantize(x, {QuantizeOptions::TensorScale::kGiven, g, false});
    const Nvfp4Tensor four = quantize(x, {QuantizeOptions::TensorScale::kGiven, g, true});
    const std::vector<float> y_plain = dequantize(plain), y_four = dequantize(four);
    std::int64_t better = 0, worse = 0, same = 0;
    for (std::int64_t b = 0; b < kRows * kBlocks; ++b) {
      const double e_plain = squared_error(sample.x, y_plain, b), e_four = squared_error(sample.x, y_four, b);
      better += e_four < e_plain;
      worse += e_four > e_plain;
      if (e_four == e_plain) {  // a tie goes to the ordinary scale
        same += 1;
        ASSERT_EQ(four.scales[static_cast<std::size_t>(b)], plain.scales[static_cast<std::size_t>(b)]);
      }
    }
    EXPECT_EQ(worse, 0) << g;
    EXPECT_GT(better, 1000) << g << ": or the option does nothing";
    EXPECT_GT(same, 1000) << g;
    EXPECT_EQ(four.saturated_blocks, plain.saturated_blocks);
  }
}

// By hand: 6, 5, 5, ... On 6 the fives are ties that go to 4. On 4 (scale 1.5) they are 3.33, code 5 (3
// = 4.5).
TEST(FourOverSix, TakesFourWhereItPays) {
  std::vector<float> x(16, 5.0f);
  x[0] = 6.0f;
  const Nvfp4Tensor q =
      quantize(MatrixView<const float>{x.data(), 1, 16}, {QuantizeOptions::TensorScale::kGiven, 1.0f, true});
  EXPECT_EQ(q.scales[0], 0x3C) << "1.5";
  EXPECT_EQ(q.codes[0], 0x56);
  for (std::size_t j = 1; j < 8; ++j) EXPECT_EQ(q.codes[j], 0x55);
}

TEST(FourOverSix, KeepsSixOnATieAndWhereItIsExact) {
  std::vector<float> x(16, 0.0f);
  x[0] = 6.0f;  // exact on 6 (scale 1) and on 4 (scale 1.5): a tie
  const QuantizeOptions options = {QuantizeOptions::TensorScale::kGiven, 1.0f, true};
  EXPECT_EQ(quantize(MatrixView<const float>{x.data(), 1, 16}, options).scales[0], 0x38);
  x[1] = 0.5f;
  EXPECT_EQ(quantize(MatrixView<const float>{x.data(), 1, 16}, options).scales[0], 0x38);
}

// s4 comes from the scale before it was rounded: 6.18 wants 1.03, rounded 1, but 1.5 * 1.03 = 1.545 is nearer
// to 1.5 (0x3C) and 6.6 wants 1.1, rounded 1.125 (1.5 * that is 1.6875), while 1.5 * 1.1 = 1.65 rounds
// to 1.625.
TEST(FourOverSix, RaisesTheUnroundedScale) {
  std::vector<float> x(16, 6.6f * 5.0f / 6.0f);
  x[0] = 6.6f;
  const Nvfp4Tensor q =
      quantize(MatrixView<const float>{x.data(), 1, 16}, {QuantizeOptions::TensorScale::kGiven, 1.0f, true});
  EXPECT_EQ(q.scales[0], 0x3D) << "1.625";
}

TEST(FourOverSix, DynamicScalesLeaveRoomForTheRaisedScale) {
  std::vector<float> x(16, 5.0f);
  x[0] = 6.0f;
  const Nvfp4Tensor q =
      quantize(MatrixView<const float>{x.data(), 1, 16}, {QuantizeOptions::TensorScale::kTensor, 0.0f, true});
  EXPECT_EQ(q.tensor_scales[0], 6.0f / 1536.0f);
  EXPECT_EQ(q.scales[0], 0x7C) << "1.5 * 256 = 384";
  EXPECT_EQ(q.saturated_blocks, 0);
}

TEST(FourOverSix, ReducesTheErrorOfANormalMatrix) {
  std::vector<float> x;
  for (std::uint64_t i = 0; i < 512 * 256; ++i) {  // a sum of uniforms: bell-shaped
    double sum = 0;
    for (std::uint64_t k = 0; k < 12; ++k)
      sum += static_cast<double>(oracle::mix(i * 12 + k) >> 11) * 0x1p-53;
    x.push_back(static_cast<float>(sum - 6));
  }
  const MatrixView<const float> view{x.data(), 512, 256};
  double error[2] = {0, 0}, norm = 0;
  for (const bool four : {false, true}) {
    const std::vector<float> y =
        dequantize(quantize(view, {QuantizeOptions::TensorScale::kTensor, 0.0f, four}));
    for (std::int64_t b = 0; b < 512 * kBlocks; ++b) error[four] += squared_error(x, y, b);
  }
  for (const float v : x) norm += static_cast<double>(v) * v;
  const double plain = std::sqrt(error[0] / norm), four = std::sqrt(error[1] / norm);
  EXPECT_NEAR(plain, 0.0945, 0.002) << "NVFP4's relative error on a bell-shaped matrix is 9.3 to 9.5 %";
  EXPECT_LT(four, 0.96 * plain);
}

}  // namespace
}  // namespace megamoe
