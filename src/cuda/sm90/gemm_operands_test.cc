// gemm_operands_test.cc: both GEMMs over every code and scale, the largest ones, zeros of every kind, NaN and
// infinity: operands whose finite sums are exact, so that every bit of every output is given.
#include <algorithm>

#include "cuda/sm90/gemm_test.h"

namespace megamoe::sm90 {
namespace {

using testing::check_gemm1;
using testing::check_gemm2;
using testing::Operands;
using testing::Rows;

class GemmOperands : public HopperTest {};

// Rows of NVFP4 as they are stored.
struct Pattern {
  std::int64_t rows, cols;
  std::vector<std::uint8_t> codes, scales;
};
// At every place of a chunk of 64 columns, and of a part of the next, every code under every scale but NaN.
Pattern every_code_under_every_scale() {
  Pattern p{16 * 127, 80, {}, {}};
  for (std::int64_t r = 0; r < p.rows; ++r) {
    for (std::int64_t k = 0; k < p.cols; k += 2) {
      p.codes.push_back(static_cast<std::uint8_t>((r + k) % 16 + (r + k + 1) % 16 * 16));
    }
    for (std::int64_t b = 0; b < p.cols / 16; ++b)
      p.scales.push_back(static_cast<std::uint8_t>((r / 16 + 37 * b) % 127));
  }
  return p;
}
// Row i is 1 in column i, else 0.
Pattern unit_rows(std::int64_t n) {
  Pattern p{n, n, std::vector<std::uint8_t>(size(n * n / 2)),
            std::vector<std::uint8_t>(size(n * n / 16), 0x38)};
  for (std::int64_t i = 0; i < n; ++i) p.codes[size((i * n + i) / 2)] = i % 2 == 0 ? 0x02 : 0x20;
  return p;
}

// h * weights^T by each tile: the rows go to three experts, which all have these weights.
void expect_products(const Rows& h, const Pattern& weights) {
  constexpr int kExperts = 3;
  testing::TestLayer layer(
      testing::make_config(weights.rows, weights.cols, kExperts, 1, {Activation::kRelu2}));
  const WeightMatrix down = layer.nvfp4(weights.rows, weights.cols, 1.0f, weights.codes, weights.scales);
  const WeightMatrix up =
      layer.nvfp4(weights.cols, weights.rows, 1.0f, std::vector<std::uint8_t>(weights.codes.size()),
                  std::vector<std::uint8_t>(weights.scales.size()));
  for (ExpertWeights& expert : layer.weights.experts) expert.up = up, expert.down = down;
  const DeviceLayer device(layer.weights);
  RoutedRows routed;
  for (std::int64_t e = 0; e <= kExperts; ++e) routed.offsets.push_back(e * h.rows / kExperts);
  for (const TileChoice& tile : tiles_for(h.format)) {
    SCOPED_TRACE(::testing::Message() << tile << ", " << to_string(h.format));
    const std::vector<float> y = device.gemm2(h, routed, {.tile = tile});
    expect_equal(check_gemm2(second_call(layer.weights, h, routed), y.data(), kEverything));
  }
}

// Rows of 0 and 1 in this format; NVFP4 as they are.
Rows rows_of(const Pattern& rows, ActivationFormat format) {
  Rows h(format, rows.rows, rows.cols, 0);
  for (std::int64_t i = 0; i < rows.rows * rows.cols && format == ActivationFormat::kBf16; ++i) {
    const int code = rows.codes[size(i / 2)] >> (i % 2 * 4) & 15;
    EXPECT_TRUE(code == 0 || code == 2);
    h.values[size(i)] = {static_cast<std::uint16_t>(code == 2 ? 0x3F80 : 0)};
  }
  if (format == ActivationFormat::kFp8) {
    for (std::int64_t i = 0; i < rows.rows * rows.cols; ++i) {
      h.codes[size(i)] = (rows.codes[size(i / 2)] >> (i % 2 * 4) & 15) == 2 ? 0x38 : 0;
    }
    h.scales.assign(h.scales.size(), 1.0f);
  }
  if (format == ActivationFormat::kNvfp4) {
    h.codes = rows.codes, h.block_scales = rows.scales, h.scales.assign(h.scales.size(), 1.0f);
  }
  return h;
}

TEST_F(GemmOperands, EveryWeightCodeUnderEveryScale) {
  for (const ActivationFormat format : kFormats) {
    expect_products(rows_of(unit_rows(80), format), every_code_under_every_scale());
  }
}
TEST_F(GemmOperands, EveryTokenCodeUnderEveryScale) {
  expect_products(rows_of(every_code_under_every_scale(), ActivationFormat::kNvfp4), unit_rows(80));
  Rows fp8(ActivationFormat::kFp8, 256, 80, 0);  // every code, NaN among them, at every place
  for (std::int64_t i = 0; i < 256 * 80; ++i) fp8.codes[size(i)] = static_cast<std::uint8_t>(i / 80 + i % 80);
  for (std::int64_t r = 0; r < 256; ++r) {  // one of a row, for a NaN spoils all
    for (std::int64_t k = 0; k < 80; ++k) fp8.codes[size(r * 80 + k)] *= k == r * 7 % 80;
  }
  std::fill(fp8.scales.begin(), fp8.scales.end(), 0.25f);
  expect_products(fp8, unit_rows(80));
}

// The largest code under the largest scale on both sides: sums up to 8192 * 2688^2, exact.
TEST_F(GemmOperands, TheLargestOperands) {
  const std::int64_t width = 8192;
  for (const int sign : {7, 15}) {
    testing::TestLayer layer(testing::make_config(16, width, 1, 1, {Activation::kRelu2}));
    const auto all = [](int value) { return [value](std::int64_t, std::int64_t) { return value; }; };
    layer.weights.experts[0].up = layer.nvfp4(width, 16, 1e-3f, all(sign), all(0x7E));
    layer.weights.experts[0].down = layer.nvfp4(16, width, 0.75f, all(sign), all(0x7E));
    const DeviceLayer device(layer.weights);
    for (const ActivationFormat format : kFormats) {
      for (const TileChoice& tile : tile_kinds(format)) {
        SCOPED_TRACE(::testing::Message() << tile << ", " << to_string(format));
        const std::int64_t rows = 2 * tile.tokens - 5;
        const RoutedRows routed{{0, rows}, {}};
        const auto fill = [&](std::int64_t cols) {
          Rows x(format, rows, cols, 0);
          std::fill(x.values.begin(), x.values.end(),
                    bf16{static_cast<std::uint16_t>(sign == 7 ? 0x4528 : 0xC528)});
          const int code = format == ActivationFormat::kFp8 ? (sign == 7 ? 0x7E : 0xFE) : 17 * sign;
          std::fill(x.codes.begin(), x.codes.end(), static_cast<std::uint8_t>(code));  // 448; 2688 too
          std::fill(x.block_scales.begin(), x.block_scales.end(), std::uint8_t{0x7E});
          std::fill(x.scales.begin(), x.scales.end(), 1.0f);
          return x;
        };
        const Rows x = fill(16), h = fill(width);
        const HiddenResult result = device.gemm1(x, routed, L1Output::kCompactBf16, {}, {.tile = tile});
        expect_equal(check_gemm1(first_call(layer.weights, x, routed), L1Output::kCompactBf16,
                                 result.h.view(), 20000));
        const std::vector<float> y = device.gemm2(h, routed, {.tile = tile});
        // FP8's folded 6 * 448 / 8 is 320.
        EXPECT_EQ(y[0], 0.75f * 8192.0f *
                            (format == ActivationFormat::kFp8 ? 448.0f * 8 * 320.0f : 2688.0f * 2688.0f));
        expect_equal(check_gemm2(second_call(layer.weights, h, routed), y.data(), kEverything));
      }
    }
  }
}

// ---- Faults

enum class Spoil { kNothing, kNan, kInfinity, kZeroScales, kMinusZero, kZeroUp };

void spoil_weights(testing::TestLayer& layer, Spoil how) {
  const auto change = [&](WeightMatrix& w, const auto& edit) {
    if (w.rows == 0) return;
    std::vector<std::uint8_t> codes(w.codes, w.codes + w.rows * w.cols / 2),
        scales(w.scales, w.scales + w.rows * w.cols / 16);
    edit(codes, scales);
    w = layer.nvfp4(w.rows, w.cols, w.tensor_scale, std::move(codes), std::move(scales));
  };
  using Bytes = std::vector<std::uint8_t>;
  for (std::size_t e = 0; e < layer.weights.experts.size(); ++e) {
    ExpertWeights& expert = layer.weights.experts[e];
    switch (how) {
      case Spoil::kNan:  // one block of one matrix of an expert; none in the last expert
        if (e == 0) change(expert.gate, [](Bytes&, Bytes& scales) { scales[65] = 0x7F; });
        if (e == 1) change(expert.up, [](Bytes&, Bytes& scales) { scales[scales.size() - 1] = 0x7F; });
        if (e == 2) change(expert.down, [](Bytes&, Bytes& scales) { scales[40] = scales[300] = 0x7F; });
        break;
      case Spoil::kZeroScales:
        for (WeightMatrix* w : {&expert.gate, &expert.up, &expert.down}) {
          change(*w, [&](Bytes&, Bytes& scales) {
            for (std::size_t i = e; i < scales.size(); i += 3) scales[i] = 0;
          });
        }
        break;
      case Spoil::kMinusZero:
        for (WeightMatrix* w : {&expert.gate, &expert.up, &expert.down}) {
          change(*w, [&](Bytes& codes, Bytes&) {
            for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = i % 16 == e ? codes[i] : 0x88;
          });
        }
        break;
      case Spoil::kZeroUp:
        change(expert.up, [](Bytes& codes, Bytes&) { codes.assign(codes.size(), 0x80); });
        break;
      default: break;
    }
  }
}

// Tokens 2 and 5; the others stay.
void spoil_rows(Rows& x, Spoil how) {
  const auto at = [&](std::int64_t row, std::int64_t k) { return size(row * x.cols + k); };
  for (const std::int64_t row : {2, 5}) {
    if (row >= x.rows) continue;
    const std::int64_t k = row == 2 ? 17 : x.cols - 1;
    if (x.format == ActivationFormat::kNvfp4) {
      if (how == Spoil::kNan || how == Spoil::kInfinity) x.block_scales[at(row, k) / 16] = 0x7F;
      if (how == Spoil::kMinusZero)
        std::fill_n(x.codes.begin() + row * x.cols / 2, x.cols / 2, std::uint8_t{0x88});
      if (how == Spoil::kZeroScales)
        std::fill_n(x.block_scales.begin() + row * x.cols / 16, x.cols / 16, std::uint8_t{0});
      continue;
    }
    if (x.format == ActivationFormat::kFp8) {
      if (how == Spoil::kNan || how == Spoil::kInfinity) x.codes[at(row, k)] = row == 2 ? 0x7F : 0xFF;
      if (how == Spoil::kMinusZero || how == Spoil::kZeroScales)
        std::fill_n(x.codes.begin() + row * x.cols, x.cols,
                    static_cast<std::uint8_t>(how == Spoil::kMinusZero ? 0x80 : 0));
      continue;
    }
    if (how == Spoil::kNan) x.values[at(row, k)] = {static_cast<std::uint16_t>(row == 2 ? 0x7FC0 : 0xFF81)};
    if (how == Spoil::kInfinity)
      x.values[at(row, k)] = {static_cast<std::uint16_t>(row == 2 ? 0x7F80 : 0xFF80)};
    if (how == Spoil::kMinusZero) std::fill_n(x.values.begin() + row * x.cols, x.cols, bf16{0x8000});
  }
}

bool is_nan(bf16 x) { return (x.bits & 0x7FFF) > 0x7F80; }

// Both GEMMs of a layer and rows so spoilt, by each tile. Sums that are finite are exact, so that NaN,
// infinity, zeros of either sign and all else must stand exactly where FP64 has them.
void expect_faults(Spoil weights_how, Spoil rows_how, const ActivationConfig& activation) {
  testing::Verdict all;
  const auto hold = [&](const testing::Verdict& v) {
    expect_equal(v);
    all.add(v);
  };
  constexpr std::int64_t kRows = 64, kTokens = 9;
  constexpr int kExperts = 16;
  const LayerConfig config = testing::make_config(208, 176, kExperts, 1, activation);
  const auto layer = testing::wide_layer(config, Operands::kExact, false, 5);
  spoil_weights(*layer, weights_how);
  const DeviceLayer device(layer->weights);
  RoutedRows routed;
  for (std::int64_t e = 0; e <= kExperts; ++e) routed.offsets.push_back(e * kRows / kExperts);
  for (std::int64_t r = 0; r < kRows; ++r)
    routed.gather.push_back(static_cast<std::int32_t>(r * 4 % kTokens));
  for (const ActivationFormat format : kFormats) {
    for (const TileChoice& tile : tiles_for(format)) {
      SCOPED_TRACE(::testing::Message()
                   << to_string(activation.kind) << ", " << tile << ", " << to_string(format));
      const GemmOptions options{.tile = tile};
      Rows x = testing::wide_rows(format, kTokens, config.hidden, Operands::kExact, 6);
      spoil_rows(x, rows_how);
      for (const L1Output mode : modes_of(config, format)) {
        if (mode == L1Output::kFp8) continue;  // what it makes of h: gemm_test.cc
        SCOPED_TRACE(to_string(mode));
        const Rows h = device.gemm1(x, routed, mode, testing::h_scales(kRows, 7), options).h;
        hold(check_gemm1(first_call(layer->weights, x, routed), mode, h.view(), kEverything));
        if (mode != L1Output::kCompactBf16) continue;
        // A NaN stays in the rows that read it, and there spoils every column.
        for (std::int64_t r = 0; r < kRows && rows_how == Spoil::kNan && weights_how == Spoil::kNothing;
             ++r) {
          const std::int32_t token = routed.gather[size(r)];
          const auto nans = std::count_if(h.values.begin() + r * config.intermediate,
                                          h.values.begin() + (r + 1) * config.intermediate, is_nan);
          EXPECT_EQ(nans, token == 2 || token == 5 ? config.intermediate : 0) << "row " << r;
        }
        if (weights_how == Spoil::kNan && rows_how == Spoil::kNothing) {
          // One column of the rows of the first expert (where there is a gate) and of the second.
          const std::int64_t spoilt = routed.offsets[2] - (config.activation.gated() ? 0 : routed.offsets[1]);
          EXPECT_EQ(std::count_if(h.values.begin(), h.values.end(), is_nan), spoilt);
        }
      }
      Rows h = testing::wide_rows(format, kRows, config.intermediate, Operands::kExact, 8);
      spoil_rows(h, rows_how);
      const std::vector<float> y = device.gemm2(h, routed, options);
      hold(check_gemm2(second_call(layer->weights, h, routed), y.data(), kEverything));
    }
  }
  EXPECT_EQ(all.zero_signs, 0);  // a sum without anything is +0
}

TEST_F(GemmOperands, FaultyWeightScales) {
  for (const ActivationConfig& a : kActivations) expect_faults(Spoil::kNan, Spoil::kNothing, a);
}
TEST_F(GemmOperands, FaultyTokensSpoilTheirRowsAlone) {
  for (const ActivationConfig& a : kActivations) {
    expect_faults(Spoil::kNothing, Spoil::kNan, a);
    expect_faults(Spoil::kNothing, Spoil::kInfinity, a);
  }
  expect_faults(Spoil::kNan, Spoil::kInfinity, kActivations[0]);
}
TEST_F(GemmOperands, ZerosOfEveryKind) {
  for (const ActivationConfig& a : kActivations) {
    expect_faults(Spoil::kZeroScales, Spoil::kZeroScales, a);
    expect_faults(Spoil::kMinusZero, Spoil::kMinusZero, a);
    expect_faults(Spoil::kZeroUp, Spoil::kNothing, a);  // h is -0 where the gate is negative
  }
}

}  // namespace
}  // namespace megamoe::sm90
