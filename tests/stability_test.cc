// stability_test.cc: the same bits whatever the memory held, the batch size, the threads; faults stay put.
#include <algorithm>
#include <cmath>
#include <limits>

#include "base/parallel.h"
#include "tests/compare.h"

namespace megamoe::testing {
namespace {

std::vector<L1Output> modes_of(ActivationFormat format) {
  if (format == ActivationFormat::kFp8) return {L1Output::kCompactBf16, L1Output::kFp8};
  if (format == ActivationFormat::kBf16) return {L1Output::kCompactBf16};
  return {L1Output::kCompactBf16, L1Output::kInterleavedBf16, L1Output::kNvfp4};
}

class Stability : public Conformance {};
MEGAMOE_FOR_EVERY_BACKEND(Stability);

TEST_P(Stability, WhatTheMemoryHeldDoesNotMatter) {
  // Three tokens, all to the last expert, the second one zero; then to the first, then the middle.
  for (const std::int32_t id : {3, 0, 1}) {
    const LayerConfig config = make_config(48, 32, 4, 1);
    const auto layer = random_layer(config, WeightFormat::kNvfp4, 31);
    Input input = random_input(config, 3, 32);
    input.ids = {id, id, id};
    input.weights = {1.0f, 1.0f, 1.0f};
    std::fill_n(input.x.begin() + 48, 48, bf16{0});
    for (const ActivationFormat format : formats()) {
      for (const L1Output l1 : modes_of(format)) {
        RunOptions options{.format = format, .l1 = l1, .h_scale = kHScale};
        const RunResult first = run(backend(), layer->weights, input, options);
        for (std::size_t i = 0; i < first.y.size(); ++i) {
          EXPECT_TRUE(std::isfinite(independent::bf16_value(first.y[i])));
          if (i / 48 == 1) {
            EXPECT_EQ(first.y[i].bits & 0x7FFF, 0);
          }
        }
        for (const int poison : {0xFF, 0x00}) {
          options.poison = poison;
          const RunResult again = run(backend(), layer->weights, input, options);
          EXPECT_EQ(first.y, again.y);
          EXPECT_EQ(first.h.codes, again.h.codes);
          EXPECT_EQ(first.h.block_scales, again.h.block_scales);
        }
      }
    }
  }
}

// Where sums keep no order, another number of tokens may mean another one: a last bit now and then.
TEST_P(Stability, ATokensResultDoesNotDependOnItsBatch) {
  const LayerConfig config = make_config(48, 80, 3, 2);
  const auto layer = random_layer(config, WeightFormat::kNvfp4, 41);
  Input alone = random_input(config, 1, 42);
  alone.ids = {2, 0};
  alone.weights = {0.7f, 0.6f};
  std::int64_t compared = 0, different = 0;
  for (const ActivationFormat format : formats()) {
    const RunOptions options{.format = format, .h_scale = kHScale};
    const RunResult want = run(backend(), layer->weights, alone, options);
    for (const std::int64_t m : {1, 2, 4, 5, 8, 9, 16, 17, 33, 64, 65, 128, 129}) {
      Input batch = random_input(config, m, static_cast<std::uint64_t>(m));
      const std::int64_t j = m * 2 / 3;
      std::copy(alone.x.begin(), alone.x.end(), batch.x.begin() + j * config.hidden);
      std::copy(alone.ids.begin(), alone.ids.end(), batch.ids.begin() + j * 2);
      std::copy(alone.weights.begin(), alone.weights.end(), batch.weights.begin() + j * 2);
      const RunResult got = run(backend(), layer->weights, batch, options);
      for (std::size_t i = 0; i < want.y.size(); ++i, ++compared) {
        const bool same_bits = want.y[i] == got.y[static_cast<std::size_t>(j * config.hidden) + i];
        different += same_bits ? 0 : 1;
        EXPECT_TRUE(same_bits || !backend().keeps_order()) << to_string(format) << ", " << m << " tokens";
      }
    }
  }
  EXPECT_LE(different, compared / 1000);
}

TEST_P(Stability, ThreadsDoNotChangeABit) {
  const LayerConfig config = make_config(176, 80, 5, 3);
  const auto layer = random_layer(config, WeightFormat::kNvfp4, 51);
  const Input input = random_input(config, 33, 52);
  for (const ActivationFormat format : formats()) {
    const RunOptions options{.format = format, .h_scale = kHScale};
    set_num_threads(1);
    const RunResult one = run(backend(), layer->weights, input, options);
    for (const int threads : {2, 3, available_cores() + 1, 4 * available_cores(), 0}) {
      set_num_threads(threads);
      const RunResult many = run(backend(), layer->weights, input, options);
      EXPECT_EQ(one.y, many.y) << threads << " threads, " << to_string(format);
      EXPECT_EQ(one.saturated, many.saturated);
      EXPECT_EQ(one.routing.row_to_token, many.routing.row_to_token);
    }
    set_num_threads(0);
  }
}

TEST_P(Stability, FaultsStayInTheirToken) {
  const LayerConfig config = make_config(48, 80, 3, 2);
  const auto layer = random_layer(config, WeightFormat::kNvfp4, 61);
  Input clean = random_input(config, 9, 62);
  for (std::size_t i = 0; i < clean.ids.size(); ++i) {
    clean.ids[i] = static_cast<std::int32_t>(i % 3);
    clean.weights[i] = 0.5f;
  }
  for (const ActivationFormat format : formats()) {
    const RunOptions options{.format = format, .h_scale = kHScale};
    const RunResult want = run(backend(), layer->weights, clean, options);
    for (const std::uint16_t fault : {0x7FC0, 0xFFC0, 0x7F80, 0xFF80}) {
      Input input = clean;
      input.x[4 * 48 + 17] = {fault};
      const RunResult got = run(backend(), layer->weights, input, options);
      for (std::int64_t t = 0; t < 9; ++t) {
        const auto begin = static_cast<std::ptrdiff_t>(t * 48);
        if (t == 4) {
          EXPECT_TRUE(std::none_of(got.y.begin() + begin, got.y.begin() + begin + 48, [](bf16 v) {
            return std::isfinite(independent::bf16_value(v));
          })) << to_string(format);
        } else {
          EXPECT_TRUE(std::equal(want.y.begin() + begin, want.y.begin() + begin + 48, got.y.begin() + begin))
              << to_string(format) << ", token " << t;
        }
      }
    }
    Input input = clean;  // a NaN among the weights
    input.weights[4 * 2 + 1] = std::numeric_limits<float>::quiet_NaN();
    const RunResult got = run(backend(), layer->weights, input, options);
    for (std::size_t i = 0; i < got.y.size(); ++i) {
      if (i / 48 == 4) {
        EXPECT_TRUE(std::isnan(independent::bf16_value(got.y[i])));
      } else {
        EXPECT_EQ(want.y[i], got.y[i]);
      }
    }
  }
}

TEST_P(Stability, DuplicateIdsAddUp) {
  const LayerConfig config = make_config(48, 16, 3, 2);
  const auto layer = random_layer(config, WeightFormat::kNvfp4, 71);
  Input twice = random_input(config, 3, 72);
  twice.ids = {1, 1, 2, 2, 0, 0};
  twice.weights = {0.25f, 0.25f, 0.5f, 0.5f, 1.0f, 1.0f};
  Input once = twice;
  once.ids = {1, -1, 2, -1, 0, -1};
  once.weights = {0.5f, 1.0f, 1.0f, 1.0f, 2.0f, 1.0f};
  for (const ActivationFormat format : formats()) {
    const RunOptions options{.format = format, .h_scale = kHScale};
    EXPECT_EQ(run(backend(), layer->weights, twice, options).y,
              run(backend(), layer->weights, once, options).y);
  }
}

TEST_P(Stability, StridedTokensReadAsTheirCopy) {
  // x is columns 16 .. 64 of rows of 96.
  const LayerConfig config = make_config(48, 16, 2, 1);
  const auto layer = random_layer(config, WeightFormat::kNvfp4, 81);
  Input input = random_input(config, 5, 82);
  input.ids = {0, 1, 1, 0, 1};
  input.weights.assign(5, 1.0f);
  std::vector<bf16> wide(5 * 96, bf16{0x7FC0});
  for (std::int64_t t = 0; t < 5; ++t) std::copy_n(input.x.begin() + t * 48, 48, wide.begin() + t * 96 + 16);
  const ActivationRows strided{.rows = 5, .cols = 48, .row_stride = 96, .values = wide.data() + 16};
  std::vector<float> amax(5), amax_strided(5);
  Rows plain(ActivationFormat::kBf16, 5, 48, 0);
  plain.values = input.x;
  backend().row_amax(plain.view(), amax.data());
  backend().row_amax(strided, amax_strided.data());
  EXPECT_EQ(amax, amax_strided);
  for (const ActivationFormat format : formats()) {
    if (format == ActivationFormat::kBf16) continue;  // not quantised
    Rows a(format, 5, 48, 0x7F), b(format, 5, 48, 0xFF);
    if (format == ActivationFormat::kNvfp4) {
      a.scales = b.scales = std::vector<float>(5, 0.002f);
      backend().quantize(plain.view(), nullptr, a.view());
      backend().quantize(strided, nullptr, b.view());
    } else {
      backend().quantize_fp8(plain.view(), a.view());
      backend().quantize_fp8(strided, b.view());
    }
    EXPECT_EQ(a.codes, b.codes);
    EXPECT_EQ(a.block_scales, b.block_scales);
    EXPECT_EQ(a.scales, b.scales);
  }
  const RunResult want = run(backend(), layer->weights, input, {});
  Rows h(ActivationFormat::kBf16, 5, 16, 0x7F);
  backend()
      .prepare(layer->weights)
      ->gemm1(strided, false, want.routing.view(), L1Output::kCompactBf16, h.view());
  EXPECT_EQ(h.values, want.h_bf16.values);
}

}  // namespace
}  // namespace megamoe::testing
