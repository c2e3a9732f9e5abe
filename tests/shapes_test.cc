// shapes_test.cc: the whole layer on every backend over shapes, formats, activations and routings.
#include "megamoe/error.h"
#include "tests/compare.h"

namespace megamoe::testing {
namespace {

class Shapes : public Conformance {};
MEGAMOE_FOR_EVERY_BACKEND(Shapes);

// The seed run: fused, compact + quantize, interleaved + deinterleave_quantize and the independent
// implementation agree on every nibble and scale byte.
TEST_P(Shapes, SeedRunOf500Trials) {
  constexpr struct {
    std::int64_t hidden, intermediate, experts;
    int top_k;
  } kShapes[] = {{16, 16, 1, 1}, {48, 32, 3, 2}, {32, 48, 4, 3}, {80, 16, 5, 2}, {16, 80, 2, 1}};
  for (std::uint64_t trial = 0; trial < 500; ++trial) {
    Random random(trial);
    const auto& s = kShapes[trial % std::size(kShapes)];
    const LayerConfig config = make_config(s.hidden, s.intermediate, s.experts, s.top_k);
    const auto layer = random_layer(config, WeightFormat::kNvfp4, trial, trial % 3 == 0);
    const std::int64_t tokens = trial % 50 == 0 ? 64 : random.integer(1, 9);
    RunOptions options{.format = ActivationFormat::kNvfp4};
    options.h_scale = random.uniform(0.0005f, 0.01f);
    options.gathered = trial % 2 == 1;
    options.x_scale = trial % 4 == 1 ? 0.003f : 0.0f;
    expect_conforms(backend(), layer->weights, random_input(config, tokens, trial + 1), options);
    ASSERT_FALSE(HasFailure()) << "trial " << trial;
  }
}

TEST_P(Shapes, WidthsThatAreMultiplesOfSixteenOnly) {
  constexpr struct {
    std::int64_t hidden, intermediate, experts, tokens;
  } kShapes[] = {{16, 16, 3, 3},   {48, 80, 3, 3},    {80, 48, 3, 3},   {176, 176, 2, 2},
                 {1408, 48, 2, 2}, {176, 1408, 1, 1}, {1856, 16, 1, 1}, {2688, 1856, 1, 1},
                 {32, 2688, 1, 1}, {2880, 80, 1, 1},  {16, 2880, 1, 1}};
  for (const auto& s : kShapes) {
    const LayerConfig config = make_config(s.hidden, s.intermediate, s.experts, 1);
    const auto layer = random_layer(config, WeightFormat::kNvfp4, 7);
    Input input = random_input(config, s.tokens, 8);
    input.ids[0] = 0;
    input.weights[0] = 0.75f;
    for (const ActivationFormat format : formats()) {
      SCOPED_TRACE(::testing::Message() << s.hidden << "x" << s.intermediate << " " << to_string(format));
      expect_conforms(backend(), layer->weights, input, {.format = format, .h_scale = kHScale});
    }
  }
}

TEST_P(Shapes, ExpertsTokensAndSlots) {
  constexpr struct {
    std::int64_t experts, tokens;
    int top_k;
  } kCases[] = {{1, 1, 1},   {3, 0, 2},   {3, 257, 2}, {127, 17, 6}, {512, 17, 22}, {512, 1, 10}, {32, 5, 1},
                {32, 5, 2},  {32, 5, 6},  {32, 5, 8},  {32, 5, 9},   {32, 5, 10},   {32, 5, 14},  {32, 5, 16},
                {32, 5, 17}, {32, 5, 22}, {32, 5, 32}, {5, 17, 5},   {36, 17, 4}};
  for (const auto& s : kCases) {
    const LayerConfig config = make_config(48, 16, s.experts, s.top_k);
    const auto layer = random_layer(config, WeightFormat::kNvfp4, 3);
    const Input input = random_input(config, s.tokens, 4);
    for (const ActivationFormat format : formats()) {
      SCOPED_TRACE(::testing::Message() << "E " << s.experts << ", T " << s.tokens << ", top-k " << s.top_k
                                        << " " << to_string(format));
      expect_conforms(backend(), layer->weights, input,
                      {.format = format, .gathered = format == ActivationFormat::kNvfp4, .h_scale = kHScale});
    }
  }
}

TEST_P(Shapes, EveryActivationWithAndWithoutBias) {
  for (const ActivationConfig& activation :
       {ActivationConfig{}, ActivationConfig{.kind = Activation::kSwiGluClamped, .limit = 1.5f},
        ActivationConfig{.kind = Activation::kGptOss, .limit = 2.0f},
        ActivationConfig{.kind = Activation::kRelu2}}) {
    for (const bool bias : {false, true}) {
      const LayerConfig config = make_config(48, 80, 3, 2, activation);
      const auto layer = random_layer(config, WeightFormat::kNvfp4, 11, bias);
      const Input input = random_input(config, 9, 12);
      for (const ActivationFormat format : formats()) {
        SCOPED_TRACE(::testing::Message() << to_string(activation.kind) << " " << to_string(format));
        expect_conforms(backend(), layer->weights, input, {.format = format, .h_scale = kHScale});
      }
    }
  }
}

// Holds for every backend, the ones that are compared byte for byte too.
TEST_P(Shapes, SumsStayWithinWhatATensorCoreMayLose) {
  const LayerConfig config = make_config(176, 144, 4, 3, {.kind = Activation::kSwiGluClamped, .limit = 1.5f});
  const auto layer = random_layer(config, WeightFormat::kNvfp4, 13, true);
  const Input input = random_input(config, 33, 14);
  for (const ActivationFormat format : formats()) {
    if (format == ActivationFormat::kFp8) continue;
    for (const bool gathered : {false, true}) {
      if (gathered && format != ActivationFormat::kNvfp4) continue;
      const RunOptions options{
          .format = format, .x_scale = gathered ? 0.003f : 0.0f, .gathered = gathered, .h_scale = kHScale};
      expect_cut(layer->weights, input, options, run(backend(), layer->weights, input, options));
    }
  }
}

TEST_P(Shapes, Bf16AndF32Weights) {
  if (formats(WeightFormat::kBf16).empty()) GTEST_SKIP() << "NVFP4 weights only";
  for (const WeightFormat format : {WeightFormat::kBf16, WeightFormat::kF32}) {
    const LayerConfig config = make_config(80, 48, 3, 2);
    const auto layer = random_layer(config, format, 21, true);
    expect_conforms(backend(), layer->weights, random_input(config, 9, 22), {});
  }
}

TEST_P(Shapes, QuantisedActivationsNeedNvfp4Weights) {
  const LayerConfig config = make_config(16, 16, 1, 1);
  const auto layer = random_layer(config, WeightFormat::kBf16, 1);
  const Input input = ones_input(config, 1);
  for (const ActivationFormat format : {ActivationFormat::kFp8, ActivationFormat::kNvfp4}) {
    try {
      run(backend(), layer->weights, input, {.format = format});
      FAIL() << "accepted " << to_string(format);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << error.what();
    }
  }
}

TEST_P(Shapes, InterleavedOutputNeedsAGate) {
  const LayerConfig config = make_config(16, 16, 1, 1, {.kind = Activation::kRelu2});
  const auto layer = random_layer(config, WeightFormat::kNvfp4, 1);
  EXPECT_THROW(run(backend(), layer->weights, ones_input(config, 1), {.l1 = L1Output::kInterleavedBf16}),
               Error);
}

}  // namespace
}  // namespace megamoe::testing
