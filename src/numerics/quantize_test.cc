// quantize_test.cc: the public quantize() and dequantize() on inputs that go wrong elsewhere.
#include "megamoe/quantize.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "base/parallel.h"
#include "base/processor.h"
#include "base/test_error.h"
#include "numerics/amax.h"
#include "numerics/bf16.h"
#include "numerics/fp16.h"
#include "numerics/nvfp4.h"
#include "numerics/oracle.h"
#include "numerics/quantize_x86.h"

namespace megamoe {
namespace {

using Bytes = std::vector<std::uint8_t>;
using Floats = std::vector<float>;
using TensorScale = QuantizeOptions::TensorScale;

using oracle::kInf;
using oracle::kMax;
using oracle::kNaN;

MatrixView<const float> view(const Floats& x, std::int64_t rows, std::int64_t cols) {
  return {x.data(), rows, cols};
}
QuantizeOptions given(float g) { return {TensorScale::kGiven, g}; }
// One row of a few values, zeros behind them.
Floats row(std::vector<float> values, std::size_t cols = 16) {
  values.resize(cols, 0.0f);
  return values;
}
Floats random_values(std::int64_t count, std::uint64_t seed) {
  Floats x(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < x.size(); ++i) {
    const std::uint64_t r = oracle::mix(seed << 32 | i);
    x[i] = static_cast<float>(static_cast<std::int64_t>(r % 200001) - 100000) * 1e-4f;
  }
  return x;
}
void expect_equal(const Nvfp4Tensor& a, const Nvfp4Tensor& b) {
  EXPECT_EQ(a.codes, b.codes);
  EXPECT_EQ(a.scales, b.scales);
  EXPECT_EQ(a.tensor_scales, b.tensor_scales);
  EXPECT_EQ(a.saturated_blocks, b.saturated_blocks);
  EXPECT_EQ(a.nonfinite_blocks, b.nonfinite_blocks);
}
using QuantizeRow = BlockCounts(const float* x, float g, std::int64_t blocks, std::uint8_t* codes,
                                std::uint8_t* scales);

TEST(Quantize, TiesGoToTheEvenCode) {
  Floats x = row({2688});
  for (const float v : {6.0f, .25f, .75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f, -.25f, -.75f, -1.25f, -1.75f, -2.5f,
                        -3.5f, -5.0f, 0.0f}) {
    x.push_back(v);
  }
  const Nvfp4Tensor q = quantize(view(x, 1, 32));
  EXPECT_EQ(q.tensor_scales, Floats{1.0f});
  EXPECT_EQ(q.scales, (Bytes{0x7e, 0x38}));
  const Bytes expected = {0x07, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
                          0x07, 0x22, 0x44, 0x66, 0xa8, 0xca, 0xec, 0x0e};
  EXPECT_EQ(q.codes, expected);
  EXPECT_EQ(q.codes[12] & 15, 8) << "-0.25 keeps its sign as -0";
}

TEST(Quantize, DividesAndDoesNotMultiplyWithAReciprocal) {
  const Nvfp4Tensor q = quantize(view(row({0.08203125f, 0.02392577938735485f}), 1, 16), given(1.0f));
  EXPECT_EQ(q.scales[0], 0x07);
  EXPECT_EQ(q.codes[0], 0x37) << "1.74999988 is code 3; a product with the reciprocal gives 1.75, code 4";
}

TEST(Quantize, CodesUseTheRoundedScale) {
  const Nvfp4Tensor q = quantize(view(row({6.18f, 0.2524f}), 1, 16), given(1.0f));
  EXPECT_EQ(q.scales[0], 0x38) << "1.03 rounds to 1";
  EXPECT_EQ(q.codes[0], 0x17) << "0.2524 / 1 is code 1; divided by 1.03 it would be 0";
}

TEST(Quantize, NoHalfSteps) {
  EXPECT_EQ(quantize(view(row({6.0f, 5.25f}), 1, 16), given(1.0f)).codes[0], 0x77);
}

TEST(Quantize, ScaleNeverOverflowsIntoNaN) {
  struct Row {
    float wanted;
    bool saturated;
  };
  for (const Row& r : {Row{447.0f, false}, Row{448.0f, false}, Row{456.0f, true}, Row{463.9f, true},
                       Row{465.0f, true}, Row{480.0f, true}, Row{4480.0f, true}, Row{1e36f, true}}) {
    const Nvfp4Tensor q = quantize(view(row({6.0f * r.wanted, -r.wanted}), 1, 16), given(1.0f));
    EXPECT_EQ(q.scales[0], 0x7e) << r.wanted;
    EXPECT_EQ(q.saturated_blocks, r.saturated ? 1 : 0) << r.wanted;
    EXPECT_EQ(q.codes[0] & 15, 7) << r.wanted;
  }
}

TEST(Quantize, CountsTheBlocksAStaticScaleIsTooSmallFor) {
  Floats x(16 * 6, 1.0f);
  x[5] = 2689.0f;  // beyond 2688 g by more than rounding error
  x[40] = -1e30f;
  x[90] = 2688.0f;
  EXPECT_EQ(quantize(view(x, 2, 48), given(1.0f)).saturated_blocks, 2);
  EXPECT_EQ(quantize(view(x, 2, 48), given(1e27f)).saturated_blocks, 0);
  EXPECT_EQ(quantize(view(x, 2, 48)).saturated_blocks, 0) << "a dynamic scale is never too small";
}

TEST(Quantize, ADynamicScaleNeverSaturates) {
  for (std::uint64_t i = 0; i < 20000; ++i) {
    const float a = oracle::float_from_bits(static_cast<std::uint32_t>(oracle::mix(i) >> 33));
    if (!std::isfinite(a) || a < 0x1p-110f) continue;
    const Nvfp4Tensor q = quantize(view(row({a}), 1, 16));
    ASSERT_EQ(q.saturated_blocks, 0) << a;
    ASSERT_EQ(q.scales[0], 0x7e) << a;
    ASSERT_EQ(q.codes[0], 0x07) << a;
  }
}

TEST(Quantize, ZeroTensorHasAFiniteScale) {
  for (const TensorScale mode : {TensorScale::kTensor, TensorScale::kRow}) {
    for (const bool four_over_six : {false, true}) {
      const Nvfp4Tensor q = quantize(view(Floats(3 * 48, 0.0f), 3, 48), {mode, 0.0f, four_over_six});
      for (const float g : q.tensor_scales) EXPECT_EQ(g, 1.0f);
      EXPECT_EQ(q.scales, Bytes(9, 0x38));
      EXPECT_EQ(q.codes, Bytes(72, 0x00));
      EXPECT_EQ(dequantize(q), Floats(3 * 48, 0.0f));
    }
  }
  const Nvfp4Tensor negative = quantize(view(Floats(16, -0.0f), 1, 16));
  EXPECT_EQ(negative.codes, Bytes(8, 0x88)) << "-0 stays -0";
}

TEST(Quantize, AZeroRowAmongOthersIsExactlyZero) {
  Floats x = random_values(3 * 48, 1);
  std::fill(x.begin() + 48, x.begin() + 96, 0.0f);
  for (const TensorScale mode : {TensorScale::kTensor, TensorScale::kRow}) {
    const Nvfp4Tensor q = quantize(view(x, 3, 48), {mode});
    const Floats y = dequantize(q);
    for (std::size_t i = 48; i < 96; ++i) EXPECT_EQ(y[i], 0.0f);
    if (mode == TensorScale::kRow) {
      EXPECT_EQ(q.tensor_scales[1], 1.0f);
    }
  }
}

TEST(Quantize, RowAndTensorScalesAreAmaxOver2688) {
  Floats x = random_values(4 * 32, 2);
  x[3] = -77.0f;
  x[32] = 11.0f;
  x[95] = 12.5f;
  x[100] = -2688.0f;
  EXPECT_EQ(quantize(view(x, 4, 32)).tensor_scales, Floats{1.0f});
  const Nvfp4Tensor q = quantize(view(x, 4, 32), {TensorScale::kRow});
  EXPECT_EQ(q.tensor_scales, (Floats{77.0f / 2688.0f, 11.0f / 2688.0f, 12.5f / 2688.0f, 1.0f}));
  const Nvfp4Tensor f = quantize(view(x, 4, 32), {TensorScale::kRow, 0.0f, true});
  EXPECT_EQ(f.tensor_scales, (Floats{77.0f / 1536.0f, 11.0f / 1536.0f, 12.5f / 1536.0f, 1.75f}));
  for (std::int64_t r = 0; r < 4; ++r) {  // a row of its own gives the same bytes
    const Nvfp4Tensor alone = quantize(MatrixView<const float>{x.data() + r * 32, 1, 32});
    EXPECT_TRUE(std::equal(alone.codes.begin(), alone.codes.end(), q.codes.begin() + r * 16));
    EXPECT_TRUE(std::equal(alone.scales.begin(), alone.scales.end(), q.scales.begin() + r * 2));
  }
}

TEST(Quantize, AFaultStaysInItsBlock) {
  const Floats clean = random_values(4 * 64, 3);
  for (const TensorScale mode : {TensorScale::kGiven, TensorScale::kTensor, TensorScale::kRow}) {
    for (const bool four_over_six : {false, true}) {
      const QuantizeOptions options = {mode, 0.01f, four_over_six};
      Floats zeroed = clean;  // the block of the fault is worth nothing to an amax
      std::fill(zeroed.begin() + 80, zeroed.begin() + 96, 0.0f);
      const Nvfp4Tensor expected = quantize(view(zeroed, 4, 64), options);
      for (const float fault : {kNaN, -kNaN, kInf, -kInf}) {
        Floats x = zeroed;
        x[84] = fault;
        const Nvfp4Tensor q = quantize(view(x, 4, 64), options);
        EXPECT_EQ(q.nonfinite_blocks, 1);
        EXPECT_EQ(q.saturated_blocks, expected.saturated_blocks);
        EXPECT_EQ(q.scales[5], 0x7F);
        for (std::size_t i = 40; i < 48; ++i) EXPECT_EQ(q.codes[i], 0);
        Nvfp4Tensor mended = q;
        mended.scales[5] = expected.scales[5];
        mended.nonfinite_blocks = 0;
        expect_equal(mended, expected);
        const Floats y = dequantize(q);
        for (std::size_t i = 0; i < y.size(); ++i) EXPECT_EQ(std::isnan(y[i]), i >= 80 && i < 96) << i;
      }
    }
  }
}

TEST(Quantize, TheFiniteValuesOfAFaultyBlockStillCountForTheAmax) {
  Floats x(32, 1.0f);
  x[0] = kNaN;
  x[1] = 2688.0f;
  EXPECT_EQ(quantize(view(x, 1, 32)).tensor_scales, Floats{1.0f});
  EXPECT_EQ(quantize(view(Floats(16, kNaN), 1, 16)).tensor_scales, Floats{1.0f});
}

TEST(Quantize, SubnormalsAndExtremes) {
  // All subnormal: g underflows to the least positive FP32 and the block still shows where values are.
  const Nvfp4Tensor tiny = quantize(view(row({0x1p-149f, -0x1p-149f, 0x1.8p-140f}), 1, 16));
  EXPECT_EQ(tiny.tensor_scales, Floats{0x1p-149f});
  EXPECT_EQ(tiny.nonfinite_blocks, 0);
  EXPECT_GT(tiny.codes[1] & 15, 0) << "the largest value is not lost";
  for (const float y : dequantize(tiny)) EXPECT_TRUE(std::isfinite(y));
  // A subnormal beside a normal value is 0 with its sign, not a flushed or a NaN code.
  const Nvfp4Tensor mixed = quantize(view(row({1.0f, -0x1p-149f, 0x1p-149f}), 1, 16));
  EXPECT_EQ(mixed.codes[0], 0x87);
  EXPECT_EQ(mixed.codes[1], 0x00);
  // The largest FP32 overflows nowhere on its way.
  const Nvfp4Tensor huge = quantize(view(row({kMax, -kMax, kMax / 2}), 1, 16));
  EXPECT_EQ(huge.scales[0], 0x7e);
  EXPECT_EQ(huge.codes[0], 0xF7);
  EXPECT_EQ(huge.codes[1], 0x05);
  EXPECT_EQ(huge.saturated_blocks, 0);
  // A static scale far too large: the least block scale, everything fades to signed zeros.
  const Nvfp4Tensor faded = quantize(view(row({1.0f, -1.0f}), 1, 16), given(1e30f));
  EXPECT_EQ(faded.scales[0], 0x01);
  EXPECT_EQ(faded.codes[0], 0x80);
  // A static scale so small that s * g underflows: what is zero stays zero, the rest saturates.
  const Nvfp4Tensor lost = quantize(view(row({1.0f, 0.0f, -1.0f}), 1, 16), given(0x1p-149f));
  EXPECT_EQ(lost.codes[0], 0x07);
  EXPECT_EQ(lost.codes[1], 0x0F);
  EXPECT_EQ(lost.saturated_blocks, 1);
}

TEST(Quantize, StridedViewsEqualCompactCopies) {
  const Floats x = random_values(5 * 96, 4);
  Floats columns, every_second;
  for (std::size_t r = 0; r < 5; ++r) {
    columns.insert(columns.end(), x.begin() + static_cast<std::ptrdiff_t>(r * 96 + 16),
                   x.begin() + static_cast<std::ptrdiff_t>(r * 96 + 64));
    if (r % 2 == 0) {
      every_second.insert(every_second.end(), x.begin() + static_cast<std::ptrdiff_t>(r * 96),
                          x.begin() + static_cast<std::ptrdiff_t>(r * 96 + 96));
    }
  }
  for (const TensorScale mode : {TensorScale::kGiven, TensorScale::kTensor, TensorScale::kRow}) {
    const QuantizeOptions options = {mode, 0.004f};
    expect_equal(quantize(MatrixView<const float>{x.data() + 16, 5, 48, 96}, options),
                 quantize(view(columns, 5, 48), options));
    expect_equal(quantize(MatrixView<const float>{x.data(), 3, 96, 192}, options),
                 quantize(view(every_second, 3, 96), options));
  }
}

TEST(Quantize, SixteenBitInputsEqualTheirFP32Values) {
  const Floats x = random_values(7 * 80, 5);
  std::vector<bf16> b(x.size());
  std::vector<fp16> h(x.size());
  Floats xb(x.size()), xh(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    b[i] = to_bf16(x[i]);
    h[i] = to_fp16(x[i]);
    xb[i] = to_float(b[i]);
    xh[i] = to_float(h[i]);
  }
  for (const TensorScale mode : {TensorScale::kGiven, TensorScale::kTensor, TensorScale::kRow}) {
    const QuantizeOptions options = {mode, 0.004f};
    expect_equal(quantize(MatrixView<const bf16>{b.data(), 7, 80}, options),
                 quantize(view(xb, 7, 80), options));
    expect_equal(quantize(MatrixView<const fp16>{h.data(), 7, 80}, options),
                 quantize(view(xh, 7, 80), options));
  }
}

// What this machine has for the rows of quantize().
std::vector<QuantizeRow*> row_quantizers() {
  std::vector<QuantizeRow*> all;
#ifdef __x86_64__
  if (has_avx2()) all.push_back(quantize_row_avx2);
  if (has_avx512()) all.push_back(quantize_row_avx512);
#endif
  return all;
}

// Rows are quantised many blocks at a time where the processor can: no block may see where it stands in its
// row, and none its neighbours' faults, zeros or sizes.
TEST(Quantize, ARowOfAnyLengthIsItsBlocks) {
  const Floats bits = {0.0f, -0.0f, 0x1p-149f, -0x1p-130f, 0x1p-126f, 1.0f, -6.0f, 448.0f, kMax, kNaN, -kInf};
  for (const std::int64_t blocks : {1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 71, 72, 79, 80, 130}) {
    Floats x = random_values(blocks * 16, static_cast<std::uint64_t>(blocks));
    for (std::int64_t b = 0; b < blocks; ++b) {
      const std::uint64_t r = oracle::mix(static_cast<std::uint64_t>(b * 131 + blocks));
      for (std::size_t i = 0; i < 16; ++i) {
        float& v = x[static_cast<std::size_t>(b) * 16 + i];
        v = r % 5 == 0 ? bits[(r / 5) % bits.size()] : std::ldexp(v, static_cast<int>(r / 7 % 40) - 30);
        if (r % 11 == 0 && i == r / 11 % 16) v = bits[r / 176 % bits.size()];
      }
    }
    for (const float g : {0.004f, 1.0f, 0x1p-149f, 0x1p-20f}) {
      SCOPED_TRACE(::testing::Message() << blocks << " blocks under " << g);
      Nvfp4Tensor expected;
      expected.tensor_scales = {g};
      expected.codes.resize(static_cast<std::size_t>(blocks) * 8);
      for (std::int64_t b = 0; b < blocks; ++b) {
        const Nvfp4Scale scale = nvfp4_quantize_block(x.data() + b * 16, g, expected.codes.data() + b * 8);
        expected.scales.push_back(scale.code);
        expected.saturated_blocks += scale.saturated;
        expected.nonfinite_blocks += scale.code == kE4M3NaN;
      }
      expect_equal(quantize(view(x, 1, blocks * 16), given(g)), expected);
      for (QuantizeRow* const quantize_row : row_quantizers()) {
        Nvfp4Tensor row = expected;
        std::fill(row.codes.begin(), row.codes.end(), std::uint8_t{0xFF});
        std::fill(row.scales.begin(), row.scales.end(), std::uint8_t{0xFF});
        const BlockCounts counts = quantize_row(x.data(), g, blocks, row.codes.data(), row.scales.data());
        row.saturated_blocks = counts.saturated, row.nonfinite_blocks = counts.nonfinite;
        expect_equal(row, expected);
      }
    }
  }
}

TEST(Quantize, AnAmaxLooksAtEveryElementAndPastFaults) {
  for (std::int64_t cols = 1; cols < 40; ++cols) {
    for (std::int64_t at = 0; at < cols; ++at) {
      Floats x(static_cast<std::size_t>(cols), -1.0f);
      x[static_cast<std::size_t>(at)] = -3.0f;
      x[static_cast<std::size_t>((at + 1) % cols)] = at % 2 == 0 ? kNaN : -kInf;
      EXPECT_EQ(tensor_amax(view(x, 1, cols)), cols == 1 ? 0.0f : 3.0f) << at << " of " << cols;
    }
  }
}

TEST(Quantize, ThreadCountDoesNotMatter) {
  const Floats x = random_values(257 * 1408, 6);
  set_num_threads(1);
  const Nvfp4Tensor one = quantize(view(x, 257, 1408), {TensorScale::kTensor, 0.0f, true});
  const Floats y = dequantize(one);
  for (const int threads : {0, 2, 3}) {
    set_num_threads(threads);
    const Nvfp4Tensor many = quantize(view(x, 257, 1408), {TensorScale::kTensor, 0.0f, true});
    expect_equal(many, one);
    EXPECT_EQ(dequantize(many), y);
  }
  set_num_threads(0);
}

TEST(Quantize, EmptyMatrices) {
  EXPECT_TRUE(quantize(MatrixView<const float>{nullptr, 0, 48}).codes.empty());
  EXPECT_EQ(quantize(MatrixView<const float>{nullptr, 0, 48}).tensor_scales, Floats{1.0f});
  const Nvfp4Tensor rows = quantize(MatrixView<const float>{nullptr, 0, 48}, {TensorScale::kRow});
  EXPECT_TRUE(rows.tensor_scales.empty());
  EXPECT_TRUE(dequantize(rows).empty());
  EXPECT_TRUE(dequantize(quantize(MatrixView<const float>{nullptr, 3, 0}, {TensorScale::kRow})).empty());
}

TEST(Quantize, RefusesWhatItCannotQuantize) {
  const Floats x(64, 1.0f);
  std::string message;
  EXPECT_EQ(code_of([&] { quantize(view(x, 2, 24)); }, &message), ErrorCode::kInvalidArgument);
  EXPECT_NE(message.find("[2, 24]"), std::string::npos) << message;
  EXPECT_EQ(code_of([&] {
              quantize(MatrixView<const float>{x.data(), 2, 32, 16});
            }),
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of([&] {
              quantize(MatrixView<const float>{x.data(), 2, 32, -32});
            }),
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of([&] { quantize(MatrixView<const float>{nullptr, 2, 32}); }), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of([&] {
              quantize(MatrixView<const float>{x.data(), -2, 32});
            }),
            ErrorCode::kInvalidArgument);
  for (const float g : {0.0f, -0.0f, -1.0f, kNaN, kInf, kMax}) {
    EXPECT_EQ(code_of([&] { quantize(view(x, 2, 32), given(g)); }), ErrorCode::kInvalidArgument) << g;
  }
}

TEST(Dequantize, EveryScaleByteDecodesExactly) {
  Nvfp4Tensor q{127, 16, Bytes(127 * 8, 0x22), Bytes(127), Floats{1.0f}};
  for (std::size_t s = 0; s < 127; ++s) q.scales[s] = static_cast<std::uint8_t>(s);
  const Floats y = dequantize(q);
  for (std::size_t s = 0; s < 127; ++s) {
    for (std::size_t i = 0; i < 16; ++i) ASSERT_EQ(y[s * 16 + i], oracle::e4m3_value(static_cast<int>(s)));
  }
  EXPECT_EQ(y[0x01 * 16], 0.001953125f);
  EXPECT_EQ(y[0x07 * 16], 0.013671875f);
  EXPECT_EQ(y[0x08 * 16], 0.015625f);
  EXPECT_EQ(y[0x7e * 16], 448.0f);
}

TEST(Dequantize, LowNibbleFirst) {
  const Nvfp4Tensor q{1, 16, {0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe}, {0x38}, {1.0f}};
  const Floats expected = {0, .5, 1, 1.5, 2, 3, 4, 6, -0.0f, -.5, -1, -1.5, -2, -3, -4, -6};
  const Floats y = dequantize(q);
  EXPECT_EQ(y, expected);
  EXPECT_TRUE(std::signbit(y[8]));
}

TEST(Dequantize, RefusesWrongSizes) {
  const Nvfp4Tensor good = quantize(view(Floats(64, 1.0f), 2, 32), {TensorScale::kRow});
  const std::function<void(Nvfp4Tensor&)> faults[] = {
      [](Nvfp4Tensor& q) { q.codes.pop_back(); },
      [](Nvfp4Tensor& q) { q.scales.push_back(0); },
      [](Nvfp4Tensor& q) { q.tensor_scales.clear(); },
      [](Nvfp4Tensor& q) { q.tensor_scales.push_back(1); },
      [](Nvfp4Tensor& q) { q.cols = 24; },
      [](Nvfp4Tensor& q) { q.rows = -1; },
  };
  EXPECT_EQ(dequantize(good).size(), 64u);
  for (const auto& fault : faults) {
    Nvfp4Tensor bad = good;
    fault(bad);
    EXPECT_EQ(code_of([&] { dequantize(bad); }), ErrorCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace megamoe
