// cases_test.cc: small inputs, written by hand with their answers, each a fault that other software had.
#include <cmath>

#include "tests/compare.h"
#include "tests/exact.h"

namespace megamoe::testing {
namespace {

constexpr int kOne = 0x38;  // the scale byte of 1.0
constexpr int kTwoCode = 4, kOneCode = 2;

float value(bf16 x) { return static_cast<float>(independent::bf16_value(x)); }
float value(float x) { return static_cast<float>(independent::bf16_value(independent::nearest_bf16(x))); }

class Cases : public Conformance {
 protected:
  // h of one token, the layer's single expert: [I] values.
  std::vector<float> h_of(const LayerWeights& layer, const Input& input, RunOptions options) const {
    options.l1 = L1Output::kCompactBf16;
    std::vector<float> h;
    for (const bf16 v : run(backend(), layer, input, options).h_bf16.values) h.push_back(value(v));
    return h;
  }
};
MEGAMOE_FOR_EVERY_BACKEND(Cases);

// One expert whose gate, up and down codes and scales are everywhere the same.
std::unique_ptr<TestLayer> uniform_layer(const LayerConfig& config, int gate_code, float gate_scale,
                                         int up_code, float up_scale, int down_code, float down_scale) {
  auto layer = std::make_unique<TestLayer>(config);
  const auto all = [](int code) { return [code](std::int64_t, std::int64_t) { return code; }; };
  ExpertWeights& expert = layer->weights.experts[0];
  const std::int64_t h = config.hidden, i = config.intermediate;
  if (config.activation.gated()) expert.gate = layer->nvfp4(i, h, gate_scale, all(gate_code), all(kOne));
  expert.up = layer->nvfp4(i, h, up_scale, all(up_code), all(kOne));
  expert.down = layer->nvfp4(h, i, down_scale, all(down_code), all(kOne));
  return layer;
}

TEST_P(Cases, GateAndUpHaveTheirOwnTensorScale) {
  const auto layer = uniform_layer(make_config(16, 16, 1, 1), kOneCode, 0.5f, kOneCode, 2.0f, kOneCode, 1.0f);
  for (const ActivationFormat format : formats()) {
    for (const float h : h_of(layer->weights, ones_input(layer->weights.config, 1), {.format = format})) {
      EXPECT_EQ(h, 256.0f) << to_string(format);  // bf16 of 255.914; 64 or 1024: one scale for both
    }
  }
}

TEST_P(Cases, LowNibbleFirst) {
  // Row n of up reads element n alone, through codes 0..15 in order; relu2 gives the square.
  LayerConfig config = make_config(16, 16, 1, 1, {.kind = Activation::kRelu2});
  const auto layer = uniform_layer(config, 0, 1.0f, 0, 1.0f, kOneCode, 1.0f);
  ExpertWeights& expert = layer->weights.experts[0];
  expert.up = layer->nvfp4(
      16, 16, 1.0f, [](std::int64_t, std::int64_t k) { return static_cast<int>(k); },
      [](std::int64_t, std::int64_t) { return kOne; });
  const std::uint8_t expected_bytes[] = {0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe};
  for (int i = 0; i < 8; ++i) ASSERT_EQ(expert.up.codes[i], expected_bytes[i]);
  const float magnitudes[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  for (const ActivationFormat format : formats()) {
    for (int k = 0; k < 16; ++k) {
      Input input = ones_input(config, 1);
      for (int i = 0; i < 16; ++i) input.x[static_cast<std::size_t>(i)] = i == k ? bf16{0x3F80} : bf16{0};
      const float want = k < 8 ? magnitudes[k] * magnitudes[k] : 0.0f;
      for (const float h : h_of(layer->weights, input, {.format = format})) {
        EXPECT_EQ(h, want) << to_string(format) << ", element " << k;
      }
      // The down matrix reads h by the same order: h is the same everywhere, y its sum.
      const RunResult result = run(backend(), layer->weights, input, {.format = format});
      EXPECT_NEAR(result.expert_out[0], 16.0f * want, 16.0f * want * 0.17f);
    }
  }
}

TEST_P(Cases, GateThenUpOverFortyEightRows) {
  if (formats(WeightFormat::kF32).empty()) GTEST_SKIP() << "no FP32 weights";
  // Gate rows give 2 + r / 64, up rows -3, so that a permuted row shows. As BF16 weights: r / 64 is no code.
  const LayerConfig config = make_config(16, 48, 1, 1);
  TestLayer layer(config);
  std::vector<float> gate(48 * 16, 0.0f), up(48 * 16, 0.0f), down(16 * 48, 0.0f);
  for (std::size_t r = 0; r < 48; ++r) {
    gate[r * 16] = 2.0f + static_cast<float>(r) / 64.0f;
    up[r * 16 + 1] = -3.0f;
  }
  const auto matrix = [&](std::int64_t rows, std::int64_t cols, std::vector<float> values) {
    WeightMatrix w{.format = WeightFormat::kF32, .rows = rows, .cols = cols};
    w.f32 = layer.floats(std::move(values));
    return w;
  };
  layer.weights.experts[0].gate = matrix(48, 16, gate);
  layer.weights.experts[0].up = matrix(48, 16, up);
  layer.weights.experts[0].down = matrix(16, 48, down);
  const std::vector<float> h = h_of(layer.weights, ones_input(config, 1), {});
  for (std::size_t r = 0; r < 48; ++r) {
    const double g = 2.0 + static_cast<double>(r) / 64.0;
    const double exact = g / (1.0 + std::exp(-g)) * -3.0;
    EXPECT_NEAR(h[r], exact, std::abs(exact) * 0x1.01p-8) << "row " << r;
  }
  EXPECT_EQ(h[0], value(-5.28478f));
}

struct ClampCase {
  ActivationConfig activation;
  float gate, up, h;
};

TEST_P(Cases, ClampsComeBeforeTheProduct) {
  const ActivationConfig limit10 = {.kind = Activation::kSwiGluClamped, .limit = 10.0f};
  const ActivationConfig oai = {.kind = Activation::kGptOss, .limit = 7.0f, .alpha = 1.702f};
  for (const ClampCase& c : {ClampCase{limit10, 20, -30, -99.9955f}, ClampCase{limit10, -20, 2, -8.24461e-8f},
                             ClampCase{limit10, 5, 5, 24.8327f}, ClampCase{oai, 20, -30, -41.9997f}}) {
    // The gate and up values enter as biases on all-zero weights.
    const LayerConfig config = make_config(16, 16, 1, 1, c.activation);
    const auto layer = uniform_layer(config, 0, 1.0f, 0, 1.0f, 0, 1.0f);
    layer->weights.experts[0].gate_bias = layer->floats(std::vector<float>(16, c.gate));
    layer->weights.experts[0].up_bias = layer->floats(std::vector<float>(16, c.up));
    for (const ActivationFormat format : formats()) {
      for (const float h : h_of(layer->weights, ones_input(config, 1), {.format = format})) {
        EXPECT_NEAR(h, c.h, std::abs(c.h) * 0x1.01p-8) << to_string(c.activation.kind);
      }
    }
  }
}

TEST_P(Cases, EveryScaleByteDecodesExactly) {
  // Row r of up has scale byte r in its only block, all codes 1.0: x . w = 16 * s. relu2 gives its square.
  const LayerConfig config = make_config(16, 128, 1, 1, {.kind = Activation::kRelu2});
  const auto layer = uniform_layer(config, 0, 1.0f, 0, 1.0f, 0, 1.0f);
  layer->weights.experts[0].up = layer->nvfp4(
      128, 16, 1.0f, [](std::int64_t, std::int64_t) { return kOneCode; },
      [](std::int64_t r, std::int64_t) { return static_cast<int>(r < 127 ? r : 0); });
  for (const ActivationFormat format : {ActivationFormat::kBf16, ActivationFormat::kNvfp4}) {
    const std::vector<float> h = h_of(layer->weights, ones_input(config, 1), {.format = format});
    for (int r = 0; r < 127; ++r) {
      double s = r == 0 ? 0.0 : r < 8 ? r * 0.001953125 : std::ldexp(1.0 + r % 8 / 8.0, r / 8 - 7);
      EXPECT_EQ(h[static_cast<std::size_t>(r)], value(static_cast<float>(256.0 * s * s))) << "byte " << r;
    }
  }
}

TEST_P(Cases, SumsBeyondTheRangeOfFp16) {
  // 64 * 6 * 448 = 172032 before the tensor scale of 1 / 2688.
  const LayerConfig config = make_config(64, 16, 1, 1, {.kind = Activation::kRelu2});
  const auto layer = uniform_layer(config, 0, 1.0f, 0, 1.0f, 0, 1.0f);
  layer->weights.experts[0].up = layer->nvfp4(
      16, 64, 1.0f / 2688.0f, [](std::int64_t, std::int64_t) { return 7; },
      [](std::int64_t, std::int64_t) { return 0x7E; });
  for (const ActivationFormat format : formats()) {
    for (const float h : h_of(layer->weights, ones_input(config, 1), {.format = format})) {
      // 64 squared; in fp8 the folded weight, 6 * 448 / 8 = 336, rounds to 320, and 64 to 60.95.
      EXPECT_EQ(h, format == ActivationFormat::kFp8 ? 3712.0f : 4096.0f) << to_string(format);
    }
  }
}

TEST_P(Cases, LongSumsKeepSmallTerms) {
  // 128 * 128 and 8176 times 1: 24560, where short accumulators stay near 16384. 128 is code 1 at scale 128.
  const LayerConfig config = make_config(16, 8192, 1, 1, {.kind = Activation::kRelu2});
  TestLayer layer(config);
  ExpertWeights& expert = layer.weights.experts[0];
  expert.up = layer.nvfp4(
      8192, 16, 1.0f, [](std::int64_t, std::int64_t k) { return k == 0 ? kOneCode : 0; },
      [](std::int64_t, std::int64_t) { return kOne; });
  expert.down = layer.nvfp4(
      16, 8192, 1.0f, [](std::int64_t, std::int64_t k) { return k == 0 || k >= 16 ? kOneCode : 0; },
      [](std::int64_t, std::int64_t b) { return b == 0 ? 0x70 : kOne; });
  for (const ActivationFormat format : formats()) {
    // h written by hand: 128, fifteen zeros, then ones.
    Rows bf(ActivationFormat::kBf16, 1, 8192, 0);
    for (std::size_t k = 0; k < 8192; ++k)
      bf.values[k] = k == 0 ? bf16{0x4300} : k < 16 ? bf16{0} : bf16{0x3F80};
    Rows h(format, 1, 8192, 0x7F);
    if (format == ActivationFormat::kBf16) h = bf;
    if (format == ActivationFormat::kFp8) backend().quantize_fp8(bf.view(), h.view());
    if (format == ActivationFormat::kNvfp4) {  // code 1.0 under scales of 128 and 1: no rounding
      h.scales[0] = 1.0f;
      for (std::size_t j = 0; j < 4096; ++j)
        h.codes[j] = j == 0 ? kOneCode : j < 8 ? 0 : 16 * kOneCode + kOneCode;
      for (std::size_t j = 0; j < 512; ++j) h.block_scales[j] = j == 0 ? 0x70 : kOne;
    }
    OwnedRouting routing(1, 1, 1, 0x7F);
    const std::int32_t id = 0;
    const float weight = 1.0f;
    backend().sort(&id, &weight, routing.view());
    std::vector<float> y(16, -1.0f);
    backend().prepare(layer.weights)->gemm2(h.view(), routing.view(), y.data());
    // Partial sums are integers, but in fp8 d = 128 / 448 and d = 1 / 448 are not: each of 64 tiles may cost
    // a rounding of at most 2^-10. A tensor core may lose all that is small beside 128 * 128 in its group.
    const float fp8 = backend().keeps_order() ? 0x1p-3f : 128 * 128 * static_cast<float>(kFp8GroupError);
    for (const float v : y) EXPECT_NEAR(v, 24560.0f, format == ActivationFormat::kFp8 ? fp8 : 0.0f);
  }
}

TEST_P(Cases, AnExpertThatIsZeroAndATokenThatIsZero) {
  const LayerConfig config = make_config(48, 32, 3, 1);
  const auto layer = random_layer(config, WeightFormat::kNvfp4, 5);
  layer->weights.experts[1].down = layer->nvfp4(
      48, 32, 1.0f, [](std::int64_t, std::int64_t) { return 0; },
      [](std::int64_t, std::int64_t) { return 0; });
  Input input = random_input(config, 3, 6);
  input.ids = {0, 2, 1};
  input.weights = {1.0f, 1.0f, 1.0f};
  std::fill_n(input.x.begin() + 48, 48, bf16{0});
  for (const ActivationFormat format : formats()) {
    const RunResult result = run(backend(), layer->weights, input, {.format = format});
    for (std::size_t i = 0; i < result.y.size(); ++i) {
      EXPECT_TRUE(std::isfinite(value(result.y[i])));
      if (i >= 48) {
        EXPECT_EQ(result.y[i].bits & 0x7FFF, 0) << i;
      }
    }
  }
}

TEST_P(Cases, WeightsActOnceAndAreNotRenormalised) {
  // y_e = 8: 16 elements of h = 1 (relu2 of 1) times 0.5.
  const LayerConfig config = make_config(16, 16, 1, 1, {.kind = Activation::kRelu2});
  const auto layer = uniform_layer(config, 0, 1.0f, kOneCode, 1.0f / 16.0f, 1, 1.0f);
  for (const auto& [weight, want] : {std::pair{0.5f, 4.0f}, {0.0f, 0.0f}, {-1.0f, -8.0f}, {3.0f, 24.0f}}) {
    Input input = ones_input(config, 1);
    input.weights[0] = weight;
    for (const ActivationFormat format : formats()) {
      RunOptions options{.format = format};
      options.h_scale = 1.0f / 2688.0f;
      for (const bf16 y : run(backend(), layer->weights, input, options).y) EXPECT_EQ(value(y), want);
    }
  }
}

TEST_P(Cases, AWeightOfZeroHidesEvenAnInfiniteExpert) {
  const LayerConfig config = make_config(16, 16, 1, 1, {.kind = Activation::kRelu2});
  const auto layer = uniform_layer(config, 0, 1.0f, kOneCode, 1e30f, kOneCode, 1e30f);
  Input input = ones_input(config, 1);
  EXPECT_TRUE(std::isinf(value(run(backend(), layer->weights, input, {}).y[0])));
  for (const float zero : {0.0f, -0.0f}) {
    input.weights[0] = zero;
    for (const bf16 y : run(backend(), layer->weights, input, {}).y) EXPECT_EQ(y.bits, 0);
  }
}

}  // namespace
}  // namespace megamoe::testing
