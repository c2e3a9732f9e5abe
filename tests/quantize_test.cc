// quantize_test.cc: the quantising operations and the shared expert on every backend.
#include <cmath>

#include "megamoe/error.h"
#include "tests/compare.h"

namespace megamoe::testing {
namespace {

class Quantising : public Conformance {};
MEGAMOE_FOR_EVERY_BACKEND(Quantising);

// Rows with ties, zeros of both signs, faults, saturation and values of every magnitude.
Rows difficult_rows(std::int64_t rows, std::int64_t cols, std::uint64_t seed) {
  Random random(seed);
  Rows x(ActivationFormat::kBf16, rows, cols, 0);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t k = 0; k < cols; ++k) {
      const std::int64_t kind = random.integer(0, 9);
      float v = random.bell() * std::exp2(static_cast<float>(r % 40 - 20));
      if (kind == 0) v = 0.0f;
      if (kind == 1) v = -0.0f;
      if (kind == 2) v = static_cast<float>(random.integer(-24, 24)) * 0.25f;
      bf16 b = independent::nearest_bf16(v);
      if (r % 7 == 3 && k == 20) b = {0x7F80};
      if (r % 7 == 5 && k == cols - 1) b = {0xFFC1};
      if (r % 11 == 2) b = {static_cast<std::uint16_t>(random.integer(0, 0x0080))};  // BF16 subnormals
      x.values[static_cast<std::size_t>(r * cols + k)] = b;
    }
  }
  return x;
}

std::vector<bf16> row_of(const Rows& x, std::int64_t r) {
  return {x.values.begin() + r * x.cols, x.values.begin() + (r + 1) * x.cols};
}

TEST_P(Quantising, Nvfp4EqualsASecondImplementation) {
  for (const std::int64_t cols : {32, 48, 176, 2688}) {
    const Rows x = difficult_rows(64, cols, 1);
    for (const bool mapped : {false, true}) {
      Rows out(ActivationFormat::kNvfp4, 64, cols, 0x7F);
      std::vector<std::int32_t> map(64);
      for (int r = 0; r < 64; ++r) {
        map[static_cast<std::size_t>(r)] = r * 29 % 64;
        out.scales[static_cast<std::size_t>(r)] =
            r % 3 == 0 ? 0.001f : std::exp2(static_cast<float>(r % 40 - 32));
      }
      const std::int64_t saturated = backend().quantize(x.view(), mapped ? map.data() : nullptr, out.view());
      std::int64_t expected_saturated = 0;
      for (std::int64_t r = 0; r < 64; ++r) {
        const auto i = static_cast<std::size_t>(r);
        const independent::Row want =
            independent::make_row(row_of(x, mapped ? map[i] : r), ActivationFormat::kNvfp4, out.scales[i]);
        ASSERT_TRUE(std::equal(want.codes.begin(), want.codes.end(), out.codes.begin() + r * cols / 2)) << r;
        ASSERT_TRUE(std::equal(want.block_scales.begin(), want.block_scales.end(),
                               out.block_scales.begin() + r * cols / 16))
            << r;
        expected_saturated += want.saturated;
      }
      EXPECT_EQ(saturated, expected_saturated);
      EXPECT_GT(saturated, 0);
    }
  }
}

TEST_P(Quantising, Fp8EqualsASecondImplementation) {
  if (!backend().runs(ActivationFormat::kFp8, WeightFormat::kNvfp4)) GTEST_SKIP() << "no FP8";
  for (const std::int64_t cols : {16, 128, 144, 2880}) {
    const Rows x = difficult_rows(32, cols, 2);
    Rows out(ActivationFormat::kFp8, 32, cols, 0x7F);
    backend().quantize_fp8(x.view(), out.view());
    const std::int64_t tiles = (cols + 127) / 128;
    for (std::int64_t r = 0; r < 32; ++r) {
      const independent::Row want = independent::make_row(row_of(x, r), ActivationFormat::kFp8, 0.0f);
      ASSERT_TRUE(std::equal(want.codes.begin(), want.codes.end(), out.codes.begin() + r * cols)) << r;
      ASSERT_TRUE(std::equal(want.scales.begin(), want.scales.end(), out.scales.begin() + r * tiles)) << r;
    }
  }
}

TEST_P(Quantising, DeinterleaveTakesTheUpColumns) {
  const Rows h = difficult_rows(16, 48, 3);
  Rows both(ActivationFormat::kBf16, 16, 96, 0x7F), want(ActivationFormat::kNvfp4, 16, 48, 0), got = want;
  for (std::int64_t r = 0; r < 16; ++r) {
    for (std::int64_t i = 0; i < 48; ++i) {
      both.values[static_cast<std::size_t>(r * 96 + i / 8 * 16 + 8 + i % 8)] =
          h.values[static_cast<std::size_t>(r * 48 + i)];
    }
  }
  want.scales.assign(16, 0.01f);
  got.scales = want.scales;
  EXPECT_EQ(backend().quantize(h.view(), nullptr, want.view()),
            backend().deinterleave_quantize(both.view(), got.view()));
  EXPECT_EQ(want.codes, got.codes);
  EXPECT_EQ(want.block_scales, got.block_scales);
}

TEST_P(Quantising, TiesAndScaleBytesWrittenByHand) {
  // Row 0: amax 2688 gives a tensor scale of 1. Row 1: a scale that rounds before the codes are made.
  Rows x(ActivationFormat::kBf16, 1, 32, 0), out(ActivationFormat::kNvfp4, 1, 32, 0x7F);
  const float ties[] = {6,     .25f,  .75f,   1.25f,  1.75f, 2.5f,  3.5f, 5,
                        -.25f, -.75f, -1.25f, -1.75f, -2.5f, -3.5f, -5,   0};
  x.values[0] = independent::nearest_bf16(2688.0f);
  for (std::size_t i = 0; i < 16; ++i) x.values[16 + i] = independent::nearest_bf16(ties[i]);
  float amax = 0.0f;
  backend().row_amax(x.view(), &amax);
  EXPECT_EQ(amax, 2688.0f);
  out.scales[0] = 1.0f;
  EXPECT_EQ(backend().quantize(x.view(), nullptr, out.view()), 0);
  EXPECT_EQ(out.block_scales, (std::vector<std::uint8_t>{0x7E, 0x38}));
  EXPECT_EQ(std::vector(out.codes.begin() + 8, out.codes.end()),
            (std::vector<std::uint8_t>{0x07, 0x22, 0x44, 0x66, 0xA8, 0xCA, 0xEC, 0x0E}));
}

TEST_P(Quantising, RowAmaxSkipsFaults) {
  const Rows x = difficult_rows(32, 48, 4);
  std::vector<float> amax(32, -1.0f);
  backend().row_amax(x.view(), amax.data());
  for (std::int64_t r = 0; r < 32; ++r) {
    double want = 0;
    for (const bf16 v : row_of(x, r)) {
      const double a = std::abs(independent::bf16_value(v));
      if (std::isfinite(a) && a > want) want = a;
    }
    EXPECT_EQ(amax[static_cast<std::size_t>(r)], want) << r;
  }
}

class SharedExperts : public Conformance {};
MEGAMOE_FOR_EVERY_BACKEND(SharedExperts);

TEST_P(SharedExperts, PassEveryTokenWithTheirOwnWidthAndGate) {
  const LayerConfig config = make_config(48, 16, 1, 1);
  for (const WeightFormat format : {WeightFormat::kNvfp4, WeightFormat::kBf16, WeightFormat::kF32}) {
    for (const bool gated : {false, true}) {
      const auto layer = random_layer(config, WeightFormat::kNvfp4, 1);
      LayerConfig wide = config;
      wide.intermediate = 80;
      const auto donor = random_layer(wide, format, 2);
      SharedExpert& shared = layer->weights.shared;
      shared.present = true;
      shared.weights = donor->weights.experts[0];
      shared.activation = {.kind = Activation::kSwiGluClamped, .limit = 1.5f};
      std::vector<float> gate(48);
      Random random(3);
      for (float& v : gate) v = random.bell() * 0.2f;
      shared.gate = gated ? layer->floats(gate) : nullptr;
      validate(layer->weights);
      wide.activation = shared.activation;
      if (!backend().runs(ActivationFormat::kBf16, format)) {
        EXPECT_THROW(backend().prepare(layer->weights), Error) << to_string(format);
        continue;
      }

      const Input input = random_input(config, 5, 4);
      Rows x(ActivationFormat::kBf16, 5, 48, 0);
      x.values = input.x;
      std::vector<float> out(5 * 48, NAN);
      backend().prepare(layer->weights)->shared_expert(x.view(), out.data());
      for (std::int64_t t = 0; t < 5; ++t) {
        const independent::Row row = independent::make_row(row_of(x, t), ActivationFormat::kBf16, 0.0f);
        const auto want = independent::run_expert(wide, shared.weights, row, 0.0f);
        const auto size = independent::absolute_linear(want.h_row, shared.weights.down);
        double logit = 0;
        for (std::size_t k = 0; k < 48; ++k) logit += row.values[k] * gate[k];
        const double factor = gated ? 1.0 / (1.0 + std::exp(-logit)) : 1.0;
        for (std::size_t c = 0; c < 48; ++c) {
          // An h that rounds the other way to BF16 moves y by up to 2^-7 of its share; the rest is far less.
          const double bound = backend().name() == "ref" && !gated ? 0.0 : size[c] * factor * 0x1p-7;
          EXPECT_NEAR(out[static_cast<std::size_t>(t * 48) + c], want.y[c] * factor, bound);
        }
      }
    }
  }
}

}  // namespace
}  // namespace megamoe::testing
