#include "tests/compare.h"

#include <algorithm>
#include <cmath>

#include "ref/ref_backend.h"
#include "tests/exact.h"

namespace megamoe::testing {
namespace {

template <class T>
std::vector<T> slice(const std::vector<T>& v, std::int64_t row, std::int64_t width) {
  return {v.begin() + row * width, v.begin() + (row + 1) * width};
}

// The row of x that routed row r came from, made by the independent quantiser.
independent::Row x_row(const LayerConfig& config, const Input& input, const RunOptions& options,
                       std::int64_t token) {
  const std::vector<bf16> x = slice(input.x, token, config.hidden);
  const float g = options.x_scale != 0.0f ? options.x_scale : independent::dynamic_scale(x);
  return independent::make_row(x, options.format, g);
}

void expect_row(const independent::Row& expected, const Rows& rows, std::int64_t r) {
  if (rows.format == ActivationFormat::kFp8) {
    EXPECT_TRUE(all_same(expected.codes, slice(rows.codes, r, rows.cols)));
    EXPECT_TRUE(all_same(expected.scales, slice(rows.scales, r, (rows.cols + 127) / 128)));
  } else if (rows.format == ActivationFormat::kNvfp4) {
    EXPECT_TRUE(all_same(expected.codes, slice(rows.codes, r, rows.cols / 2)));
    EXPECT_TRUE(all_same(expected.block_scales, slice(rows.block_scales, r, rows.cols / 16)));
    EXPECT_TRUE(same(expected.scales[0], rows.scales[static_cast<std::size_t>(r)]));
  }
}

// How far h may be from act(gate, up) when gate and up are off by so much: silu and gate * sigmoid rise by at
// most 1.1 and stay below |gate|; then the rounding to BF16.
double h_bound(const ActivationConfig& config, double gate, double gate_error, double up, double up_error,
               double h) {
  const double error =
      config.gated() ? 1.1 * gate_error * (std::abs(up) + 1.0 + up_error) + (std::abs(gate) + 0.3) * up_error
                     : up_error * (2.0 * std::abs(up) + up_error);
  return error * 1.01 + (std::abs(h) + error) * 0x1p-8 + 0x1p-133;
}

void expect_near(float expected, double bound, float got, const char* what, std::int64_t r, std::size_t i) {
  if (std::isnan(expected) || std::isinf(expected)) {
    EXPECT_TRUE(same(expected, got)) << what << " row " << r << ", column " << i;
  } else {
    EXPECT_LE(std::abs(static_cast<double>(expected) - static_cast<double>(got)), bound)
        << what << " row " << r << ", column " << i << ": expected " << expected << ", got " << got;
  }
}

// Sorting, and x in its format, byte for byte. False where rows cannot be told apart any further.
bool expect_sorted_and_quantized(const LayerConfig& c, const Input& input, const RunOptions& options,
                                 const RunResult& run) {
  std::int64_t row = 0;
  EXPECT_EQ(run.routing.offsets[0], 0);
  for (std::int32_t e = 0; e < c.num_experts; ++e) {
    for (std::int64_t pair = 0; pair < input.tokens * c.top_k; ++pair) {
      const auto p = static_cast<std::size_t>(pair);
      if (input.ids[p] != e || input.weights[p] == 0.0f) continue;
      const std::int64_t token = pair / c.top_k;
      if (row >= run.routing.rows() || run.routing.row_to_token[static_cast<std::size_t>(row)] != token ||
          run.routing.row_to_slot[static_cast<std::size_t>(row)] != pair % c.top_k) {
        ADD_FAILURE() << "row " << row << " is not token " << token << ", slot " << pair % c.top_k;
        return false;
      }
      expect_row(x_row(c, input, options, token), run.x, options.gathered ? row : token);
      ++row;
    }
    if (run.routing.offsets[static_cast<std::size_t>(e) + 1] != row) {
      ADD_FAILURE() << "expert " << e << " ends at row " << row << ", got "
                    << run.routing.offsets[static_cast<std::size_t>(e) + 1];
      return false;
    }
  }
  return true;
}

// y from the run's own expert outputs.
void expect_combined(const LayerConfig& c, const Input& input, const RunResult& run) {
  std::vector<bf16> y(run.y.size());
  ref_backend().combine(run.expert_out.data(), run.routing.view(), input.weights.data(), nullptr,
                        MatrixView<bf16>(y.data(), input.tokens, c.hidden));
  EXPECT_TRUE(all_same(y, run.y));
}

}  // namespace

void expect_independent(const LayerWeights& layer, const Input& input, const RunOptions& options,
                        const RunResult& run) {
  const LayerConfig& c = layer.config;
  if (!expect_sorted_and_quantized(c, input, options, run)) return;
  std::int64_t saturated = 0;
  std::vector<float> pair_y(input.ids.size() * static_cast<std::size_t>(c.hidden), 0.0f);
  std::vector<bool> present(input.ids.size(), false);
  for (std::size_t e = 0; e < layer.experts.size(); ++e) {
    for (std::int64_t row = run.routing.offsets[e]; row < run.routing.offsets[e + 1]; ++row) {
      const auto r = static_cast<std::size_t>(row);
      const std::int64_t pair = run.routing.row_to_token[r] * c.top_k + run.routing.row_to_slot[r];
      const independent::PairResult expected = independent::run_expert(
          c, layer.experts[e], x_row(c, input, options, pair / c.top_k), options.h_scale);
      if (options.l1 == L1Output::kCompactBf16) {
        EXPECT_TRUE(all_same(expected.h, slice(run.h_bf16.values, row, c.intermediate)));
      }
      expect_row(expected.h_row, run.h, row);
      saturated += expected.h_row.saturated;
      EXPECT_TRUE(all_same(expected.y, slice(run.expert_out, row, c.hidden)));
      std::copy(expected.y.begin(), expected.y.end(), pair_y.begin() + pair * c.hidden);
      present[static_cast<std::size_t>(pair)] = true;
    }
  }
  if (options.format == ActivationFormat::kNvfp4) {
    EXPECT_EQ(run.saturated, saturated);
  }
  for (std::int64_t t = 0; t < input.tokens; ++t) {
    for (std::int64_t col = 0; col < c.hidden; ++col) {
      float sum = 0.0f;
      for (std::int64_t pair = t * c.top_k; pair < (t + 1) * c.top_k; ++pair) {
        const auto p = static_cast<std::size_t>(pair);
        if (!present[p]) continue;
        const double y = pair_y[static_cast<std::size_t>(pair * c.hidden + col)];
        const auto product = static_cast<float>(static_cast<double>(input.weights[p]) * y);
        sum = static_cast<float>(static_cast<double>(sum) + static_cast<double>(product));
      }
      ASSERT_TRUE(same(independent::nearest_bf16(sum), run.y[static_cast<std::size_t>(t * c.hidden + col)]))
          << "token " << t << ", column " << col;
    }
  }
}

void expect_bounded(const Backend& backend, const LayerWeights& layer, const Input& input,
                    const RunOptions& options) {
  const LayerConfig& c = layer.config;
  const RunResult got = run(backend, layer, input, options);
  for (std::int64_t e = 0; e < c.num_experts; ++e) {
    const ExpertWeights& expert = layer.experts[static_cast<std::size_t>(e)];
    for (std::int64_t r = got.routing.offsets[static_cast<std::size_t>(e)];
         r < got.routing.offsets[static_cast<std::size_t>(e) + 1]; ++r) {
      const std::int64_t token = got.routing.row_to_token[static_cast<std::size_t>(r)];
      const independent::Row x = x_row(c, input, options, token);
      expect_row(x, got.x, token);
      const bool gated = c.activation.gated();
      const auto up = linear(x, expert.up, expert.up_bias);
      const auto gate = gated ? linear(x, expert.gate, expert.gate_bias) : up;
      const auto up_size = absolute_linear(x, expert.up);
      const auto gate_size = gated ? absolute_linear(x, expert.gate) : up_size;
      const double b1 = accumulation_bound(c.hidden);
      for (std::size_t i = 0; i < up.size(); ++i) {
        const float h = independent::activation(c.activation, gate[i], up[i]);
        const float h_got = static_cast<float>(
            independent::bf16_value(got.h_bf16.values[static_cast<std::size_t>(r * c.intermediate) + i]));
        const auto rounding = [](float v) { return std::abs(static_cast<double>(v)) * 0x1p-22; };
        expect_near(h,
                    h_bound(c.activation, gate[i], b1 * gate_size[i] + rounding(gate[i]), up[i],
                            b1 * up_size[i] + rounding(up[i]), h),
                    h_got, "h", r, i);
      }
      const independent::Row h_row =
          independent::make_row(slice(got.h_bf16.values, r, c.intermediate), options.format, 1.0f);
      expect_row(h_row, got.h, r);
      const auto y = linear(h_row, expert.down, expert.down_bias);
      const auto y_size = absolute_linear(h_row, expert.down);
      for (std::size_t i = 0; i < y.size(); ++i) {
        const double bound =
            accumulation_bound(c.intermediate) * y_size[i] + std::abs(static_cast<double>(y[i])) * 0x1p-22;
        expect_near(y[i], bound, got.expert_out[static_cast<std::size_t>(r * c.hidden) + i], "y", r, i);
      }
    }
  }
  expect_combined(c, input, got);
}

void expect_cut(const LayerWeights& layer, const Input& input, const RunOptions& options,
                const RunResult& run) {
  const LayerConfig& c = layer.config;
  if (!expect_sorted_and_quantized(c, input, options, run)) return;
  constexpr std::int64_t kAll = std::int64_t{1} << 40;
  const std::int64_t* offsets = run.routing.offsets.data();
  const GemmCall first{layer, run.x.view(), offsets,
                       options.gathered ? nullptr : run.routing.row_to_token.data()};
  const Verdict h = check_gemm1(first, L1Output::kCompactBf16, run.h_bf16.view(), kAll);
  EXPECT_EQ(h.beyond, 0) << "h: " << h.first_beyond;
  if (options.format == ActivationFormat::kNvfp4) {
    std::int64_t saturated = 0;
    for (std::int64_t r = 0; r < run.routing.rows(); ++r) {
      const independent::Row row =
          independent::make_row(slice(run.h_bf16.values, r, c.intermediate), options.format, options.h_scale);
      expect_row(row, run.h, r);
      saturated += row.saturated;
    }
    EXPECT_EQ(run.saturated, saturated);
    // A few codes of a small layer say nothing about a share of a thousandth.
    static Verdict all_codes;
    const Verdict codes = check_gemm1(first, L1Output::kNvfp4, run.h.view(), kAll);
    EXPECT_EQ(codes.beyond, 0) << "codes of h: " << codes.first_beyond;
    all_codes.add(codes);
    EXPECT_TRUE(all_codes.checked < 100000 || all_codes.different_share() < kDifferentShare)
        << all_codes.different << " of " << all_codes.checked << ", the first: " << all_codes.first_different;
  }
  const Verdict y = check_gemm2({layer, run.h.view(), offsets}, run.expert_out.data(), kAll);
  EXPECT_EQ(y.beyond, 0) << "y: " << y.first_beyond;
  expect_combined(c, input, run);
}

void expect_conforms(const Backend& backend, const LayerWeights& layer, const Input& input,
                     RunOptions options) {
  options.l1 = L1Output::kCompactBf16;
  const RunResult compact = run(backend, layer, input, options);
  if (!backend.keeps_order()) {
    expect_cut(layer, input, options, compact);
  } else if (options.format == ActivationFormat::kNvfp4 || backend.name() == "ref") {
    expect_independent(layer, input, options, compact);
  } else {
    expect_bounded(backend, layer, input, options);
  }
  if (layer.config.activation.gated()) {
    options.l1 = L1Output::kInterleavedBf16;
    const std::int64_t width = layer.config.intermediate;
    if (options.format == ActivationFormat::kNvfp4) {
      const RunResult interleaved = run(backend, layer, input, options);
      EXPECT_TRUE(all_same(compact.h.codes, interleaved.h.codes));
      EXPECT_TRUE(all_same(compact.h.block_scales, interleaved.h.block_scales));
      EXPECT_TRUE(all_same(compact.y, interleaved.y));
      EXPECT_EQ(compact.saturated, interleaved.saturated);
      for (std::int64_t r = 0; r < interleaved.h_bf16.rows; ++r) {
        for (std::int64_t i = 0; i < width; ++i) {
          const std::int64_t up = r * 2 * width + i / 8 * 16 + 8 + i % 8;
          ASSERT_TRUE(same(compact.h_bf16.values[static_cast<std::size_t>(r * width + i)],
                           interleaved.h_bf16.values[static_cast<std::size_t>(up)]));
        }
      }
    }
  }
  if (options.format == ActivationFormat::kBf16) return;
  options.l1 = options.format == ActivationFormat::kNvfp4 ? L1Output::kNvfp4 : L1Output::kFp8;
  const RunResult fused = run(backend, layer, input, options);
  EXPECT_TRUE(all_same(compact.h.codes, fused.h.codes));
  EXPECT_TRUE(all_same(compact.h.block_scales, fused.h.block_scales));
  EXPECT_TRUE(all_same(compact.h.scales, fused.h.scales));
  EXPECT_TRUE(all_same(compact.y, fused.y));
  if (options.format == ActivationFormat::kNvfp4) {
    EXPECT_EQ(compact.saturated, fused.saturated);
  }
}

}  // namespace megamoe::testing
