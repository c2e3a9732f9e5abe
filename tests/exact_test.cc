// exact_test.cc: both GEMMs of every backend against FP64; and the check itself against sums cut short as a
// tensor core cuts them, and against single faults.
#include "tests/exact.h"

#include <algorithm>
#include <cmath>

#include "layer/geometries.h"
#include "tests/independent.h"

namespace megamoe::testing {
namespace {

constexpr ActivationFormat kFormats[] = {ActivationFormat::kBf16, ActivationFormat::kNvfp4};

// Rows for three experts, the second one without any; they read `tokens` rows, some twice.
OwnedRouting some_routing(std::int64_t tokens, std::int64_t rows) {
  OwnedRouting routing(rows, 1, 3, 0x7F);
  routing.offsets = {0, rows / 3, rows / 3, rows};
  for (std::int64_t r = 0; r < rows; ++r) {
    routing.row_to_token[static_cast<std::size_t>(r)] = static_cast<std::int32_t>(r * 5 % tokens);
    routing.row_to_slot[static_cast<std::size_t>(r)] = 0;
  }
  return routing;
}

LayerConfig few_experts(LayerConfig config) {
  config.num_experts = 3;
  config.top_k = 1;
  config.router = {};  // groups do not divide so few
  return config;
}

std::vector<L1Output> modes_of(const LayerConfig& config) {
  if (!config.activation.gated()) return {L1Output::kCompactBf16, L1Output::kNvfp4};
  return {L1Output::kCompactBf16, L1Output::kInterleavedBf16, L1Output::kNvfp4};
}

// Room for h.
Rows h_rows(const LayerConfig& config, L1Output mode, std::int64_t rows) {
  Rows h(mode == L1Output::kNvfp4 ? ActivationFormat::kNvfp4 : ActivationFormat::kBf16, rows,
         config.intermediate * (mode == L1Output::kInterleavedBf16 ? 2 : 1), 0x7F);
  if (mode == L1Output::kNvfp4) h.scales = h_scales(rows, 9);
  return h;
}

class Fp64 : public Conformance {
 protected:
  // Both GEMMs of both formats over `rows` rows, each one's verdict handed to `judge`.
  template <class Judge>
  void run_both(const LayerConfig& config, Operands operands, std::int64_t rows, std::int64_t samples,
                const Judge& judge) const {
    const std::int64_t tokens = rows / 2 + 1;
    const auto layer = wide_layer(config, operands, config.activation.kind == Activation::kGptOss, 1);
    const auto prepared = backend().prepare(layer->weights);
    const OwnedRouting routing = some_routing(tokens, rows);
    for (const ActivationFormat format : kFormats) {
      const Rows x = wide_rows(format, tokens, config.hidden, operands, 2);
      for (const L1Output mode : modes_of(config)) {
        SCOPED_TRACE(::testing::Message() << to_string(format) << ", h as " << to_string(mode));
        const Rows h = h_rows(config, mode, rows);
        prepared->gemm1(x.view(), false, routing.view(), mode, h.view());
        judge(check_gemm1({layer->weights, x.view(), routing.offsets.data(), routing.row_to_token.data()},
                          mode, h.view(), samples));
      }
      SCOPED_TRACE(::testing::Message() << to_string(format) << ", second GEMM");
      const Rows h = wide_rows(format, rows, config.intermediate, operands, 3);
      std::vector<float> y(static_cast<std::size_t>(rows * config.hidden), NAN);
      prepared->gemm2(h.view(), routing.view(), y.data());
      judge(check_gemm2({layer->weights, h.view(), routing.offsets.data()}, y.data(), samples));
    }
  }
};
MEGAMOE_FOR_EVERY_BACKEND(Fp64);

TEST_P(Fp64, RandomLayersStayWithinTheError) {
  for (const char* name : {"qwen3-30b-a3b", "nemotron-3-nano", "gpt-oss-120b"}) {
    SCOPED_TRACE(name);
    LayerConfig config = few_experts(find_geometry(name).config);
    config.intermediate = std::min<std::int64_t>(config.intermediate, 768);  // the reference takes its time
    run_both(config, Operands::kRandom, 4, 2048, [](const Verdict& v) {
      EXPECT_GE(v.checked, 2048);
      EXPECT_EQ(v.beyond, 0) << v.first_beyond;
      EXPECT_LE(v.worst, 1.0);
      if (v.scales > 0) {
        EXPECT_LT(v.different_share(), kDifferentShare) << v.first_different;
      }
    });
  }
}

// Sums that FP32 holds exactly in any order leave nothing to an error: every bit of every output is given.
TEST_P(Fp64, ExactSumsLeaveNoChoice) {
  for (const ActivationConfig& activation :
       {ActivationConfig{}, ActivationConfig{.kind = Activation::kSwiGluClamped, .limit = 1.5f},
        ActivationConfig{.kind = Activation::kGptOss, .limit = 2.0f},
        ActivationConfig{.kind = Activation::kRelu2}}) {
    SCOPED_TRACE(to_string(activation.kind));
    run_both(make_config(1008, 176, 3, 1, activation), Operands::kExact, 7, 1 << 20, [](const Verdict& v) {
      EXPECT_GE(v.checked, 7 * 176);
      EXPECT_EQ(v.different, 0) << v.first_different;
      EXPECT_EQ(v.zero_signs, 0);
      EXPECT_EQ(v.different_scales, 0) << v.first_different;
      EXPECT_EQ(v.beyond, 0) << v.first_beyond;
      EXPECT_GT(v.largest_sum, kExactLimit * 0x1p-7);
      EXPECT_LT(v.largest_sum, kExactLimit);
    });
  }
}

// ---- The check itself

// v without what lies below the last of 24 bits under `top`, toward zero.
double cut_below(double v, double top) {
  const double unit = std::ldexp(1.0, std::ilogb(top) - 23);
  return std::trunc(v / unit) * unit;
}

// The sum as a tensor core makes it, the chunks of 64 dealt out to `split` accumulators.
float tensor_core_sum(const std::vector<double>& products, std::size_t split) {
  float total = 0;
  for (std::size_t part = 0; part < split; ++part) {
    double acc = 0;
    for (std::size_t step = 0; step < products.size(); step += 16) {
      if (step / 64 % split != part) continue;
      const double* p = products.data() + step;
      double top = std::abs(acc);
      for (int i = 0; i < 16; ++i) top = std::max(top, std::abs(p[i]));
      if (top == 0) continue;
      double sum = cut_below(acc, top);
      for (int i = 0; i < 16; ++i) sum += cut_below(p[i], top);
      acc = sum == 0 ? 0 : cut_below(sum, sum);
    }
    total += static_cast<float>(acc);
  }
  return total;
}

std::vector<double> decode(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t count) {
  std::vector<double> values(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    values[static_cast<std::size_t>(i)] =
        independent::e2m1_value(codes[i / 2] >> (i % 2 * 4) & 15) * independent::e4m3_value(scales[i / 16]);
  }
  return values;
}

// x * w^T + bias by tensor_core_sum.
std::vector<float> tensor_core_linear(const Rows& x, const WeightMatrix& w, const float* bias,
                                      std::size_t split) {
  const std::vector<double> weights = decode(w.codes, w.scales, w.rows * w.cols);
  std::vector<double> tokens;
  if (x.format == ActivationFormat::kNvfp4) {
    tokens = decode(x.codes.data(), x.block_scales.data(), x.rows * x.cols);
  } else {
    for (const bf16 v : x.values) tokens.push_back(independent::bf16_value(v));
  }
  std::vector<float> y(static_cast<std::size_t>(x.rows * w.rows));
#pragma omp parallel for
  for (std::size_t i = 0; i < y.size(); ++i) {
    const auto row = static_cast<std::int64_t>(i) / w.rows, col = static_cast<std::int64_t>(i) % w.rows;
    std::vector<double> products;
    for (std::int64_t k = 0; k < w.cols; ++k) {
      products.push_back(tokens[static_cast<std::size_t>(row * w.cols + k)] *
                         weights[static_cast<std::size_t>(col * w.cols + k)]);
    }
    float sum = tensor_core_sum(products, split);
    if (x.format == ActivationFormat::kNvfp4) sum *= x.scales[static_cast<std::size_t>(row)];
    y[i] = sum * w.tensor_scale + bias[col];
  }
  return y;
}

// The first GEMM of one expert by tensor_core_sum; a test may then spoil what went in or came out.
struct Emulated {
  Emulated(const LayerConfig& config, ActivationFormat format, std::int64_t rows, std::size_t split)
      : layer(wide_layer(config, Operands::kRandom, true, 11)),
        x(wide_rows(format, rows, config.hidden, Operands::kRandom, 12)),
        h(ActivationFormat::kNvfp4, rows, config.intermediate, 0),
        compact(ActivationFormat::kBf16, rows, config.intermediate, 0),
        offsets({0, rows}) {
    const ExpertWeights& expert = layer->weights.experts[0];
    const std::vector<float> gate = tensor_core_linear(x, expert.gate, expert.gate_bias, split),
                             up = tensor_core_linear(x, expert.up, expert.up_bias, split);
    for (std::size_t i = 0; i < gate.size(); ++i) {
      compact.values[i] =
          independent::nearest_bf16(independent::activation(config.activation, gate[i], up[i]));
    }
    h.scales = h_scales(rows, 13);
    for (std::int64_t r = 0; r < rows; ++r) {
      const auto first = compact.values.begin() + r * h.cols;
      const independent::Row row = independent::make_row({first, first + h.cols}, ActivationFormat::kNvfp4,
                                                         h.scales[static_cast<std::size_t>(r)]);
      std::copy(row.codes.begin(), row.codes.end(), h.codes.begin() + r * h.cols / 2);
      std::copy(row.block_scales.begin(), row.block_scales.end(), h.block_scales.begin() + r * h.cols / 16);
    }
  }
  Verdict check(L1Output mode) const {
    return check_gemm1({layer->weights, x.view(), offsets.data()}, mode,
                       mode == L1Output::kNvfp4 ? h.view() : compact.view(), 1 << 20);
  }

  std::unique_ptr<TestLayer> layer;
  Rows x, h, compact;
  std::vector<std::int64_t> offsets;
};

TEST(Fp64Check, AcceptsSumsThatATensorCoreCuts) {
  for (const ActivationConfig& activation :
       {ActivationConfig{.kind = Activation::kSwiGluClamped, .limit = 10.0f},
        ActivationConfig{.kind = Activation::kGptOss, .limit = 7.0f}}) {
    for (const ActivationFormat format : kFormats) {
      for (const std::size_t split : {1, 4}) {
        SCOPED_TRACE(::testing::Message()
                     << to_string(activation.kind) << ", " << to_string(format) << ", split " << split);
        const Emulated run(make_config(7168, 256, 1, 1, activation), format, 4, split);
        const Verdict h = run.check(L1Output::kCompactBf16), codes = run.check(L1Output::kNvfp4);
        EXPECT_EQ(h.checked, 4 * 256);
        EXPECT_EQ(h.beyond, 0) << h.first_beyond;
        EXPECT_EQ(codes.checked, 4 * 256);
        EXPECT_EQ(codes.beyond, 0) << codes.first_beyond;
        EXPECT_LE(codes.different_share(), kDifferentShare) << codes.first_different;
        EXPECT_LT(codes.open, codes.checked / 2);  // most codes are given no choice

        const LayerConfig config = make_config(256, 7168, 1, 1, activation);
        const auto layer = wide_layer(config, Operands::kRandom, true, 14);
        const Rows x = wide_rows(format, 4, 7168, Operands::kRandom, 15);
        const std::vector<std::int64_t> offsets = {0, 4};
        const ExpertWeights& expert = layer->weights.experts[0];
        const Verdict y =
            check_gemm2({layer->weights, x.view(), offsets.data()},
                        tensor_core_linear(x, expert.down, expert.down_bias, split).data(), 1 << 20);
        EXPECT_EQ(y.beyond, 0) << y.first_beyond;
        EXPECT_GT(y.different, y.checked / 2);  // it does cut
        EXPECT_LT(y.worst, 1);
      }
    }
  }
}

TEST(Fp64Check, SeesSingleFaults) {
  LayerConfig config = make_config(2048, 64, 1, 1);
  const Emulated good(config, ActivationFormat::kNvfp4, 3, 1);
  ASSERT_EQ(good.check(L1Output::kCompactBf16).beyond, 0);
  ASSERT_EQ(good.check(L1Output::kNvfp4).beyond, 0);
  const auto faults = [&](const std::function<void(Emulated&)>& spoil, L1Output mode) {
    Emulated bad(config, ActivationFormat::kNvfp4, 3, 1);
    spoil(bad);
    return bad.check(mode).beyond;
  };
  // What was written.
  EXPECT_EQ(faults([](Emulated& e) { e.compact.values[70].bits ^= 0x8000; }, L1Output::kCompactBf16), 1);
  EXPECT_EQ(faults([](Emulated& e) { e.compact.values[5].bits = 0x7FC0; }, L1Output::kCompactBf16), 1);
  EXPECT_GE(faults([](Emulated& e) { e.h.codes[33] ^= 0x06; }, L1Output::kNvfp4), 1);
  EXPECT_EQ(
      faults([](Emulated& e) { e.h.block_scales[4] = static_cast<std::uint8_t>(e.h.block_scales[4] + 2); },
             L1Output::kNvfp4),
      16);
  EXPECT_EQ(faults([](Emulated& e) { e.h.block_scales[4] = 0x7F; }, L1Output::kNvfp4), 16);
  EXPECT_GE(faults([](Emulated& e) { std::swap(e.h.codes[0], e.h.codes[8]); }, L1Output::kNvfp4), 1);
  // What was read: the outputs belong to other operands than the check is told.
  const auto other = [&](const std::function<void(Emulated&)>& change) {
    return faults(change, L1Output::kCompactBf16);
  };
  EXPECT_GE(
      other([](Emulated& e) { std::swap(e.layer->weights.experts[0].gate, e.layer->weights.experts[0].up); }),
      150);
  EXPECT_GE(other([](Emulated& e) {
              std::swap(e.layer->weights.experts[0].gate.tensor_scale,
                        e.layer->weights.experts[0].up.tensor_scale);
            }),
            150);
  EXPECT_GE(other([](Emulated& e) { std::swap(e.x.scales[0], e.x.scales[1]); }), 100);
  EXPECT_GE(other([](Emulated& e) { e.x.codes[1030] ^= 0x77; }), 20);  // two products of 2048, in one row
  EXPECT_GE(other([](Emulated& e) { std::swap(e.x.codes[7], e.x.codes[8]); }), 20);
  EXPECT_GE(other([](Emulated& e) { e.x.block_scales[3] = 0; }), 40);
  // An output of NaN where there should be a number, and the other way round.
  EXPECT_EQ(other([](Emulated& e) { e.x.block_scales[0] = 0x7F; }), 64);
}

}  // namespace
}  // namespace megamoe::testing
