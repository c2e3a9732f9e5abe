// harness.h: layers, rows and runs for tests of backends.
//
// Buffers are vectors of exactly the size asked for, filled with a poison byte: a sanitizer sees what reaches
// beyond them, a comparison sees what was left unwritten.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "backend/backend.h"
#include "megamoe/layer.h"

namespace megamoe::testing {

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  std::uint64_t bits() { return engine_(); }
  std::int64_t integer(std::int64_t low, std::int64_t high) {  // both included
    return low + static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(high - low + 1));
  }
  float uniform(float low, float high) {
    return low + (high - low) * static_cast<float>(engine_() >> 40) * 0x1p-24f;
  }
  float bell() { return uniform(-1, 1) + uniform(-1, 1) + uniform(-1, 1); }  // variance 1

 private:
  std::mt19937_64 engine_;
};

// A layer that owns its memory.
class TestLayer {
 public:
  explicit TestLayer(const LayerConfig& config);

  LayerWeights weights;

  // Matrices by element: code 0..15 of (row, column), scale byte of (row, block).
  WeightMatrix nvfp4(std::int64_t rows, std::int64_t cols, float tensor_scale,
                     const std::function<int(std::int64_t, std::int64_t)>& code,
                     const std::function<int(std::int64_t, std::int64_t)>& scale);
  // From what is stored: codes [rows, cols / 2] and scales [rows, cols / 16].
  WeightMatrix nvfp4(std::int64_t rows, std::int64_t cols, float tensor_scale,
                     std::vector<std::uint8_t> codes, std::vector<std::uint8_t> scales);
  WeightMatrix random(WeightFormat format, std::int64_t rows, std::int64_t cols, Random& random);
  const float* floats(std::vector<float> values);

 private:
  std::deque<std::vector<std::uint8_t>> bytes_;
  std::deque<std::vector<float>> floats_;
  std::deque<std::vector<bf16>> bf16s_;
};

LayerConfig make_config(std::int64_t hidden, std::int64_t intermediate, std::int64_t experts, int top_k,
                        ActivationConfig activation = {});
// Every matrix random, the experts and their tensor scales all different; biases where `bias`.
std::unique_ptr<TestLayer> random_layer(const LayerConfig& config, WeightFormat format, std::uint64_t seed,
                                        bool bias = false);

// With it h stays within a few units in layers of random_layer: neither all saturated nor all zero.
inline constexpr float kHScale = 0.002f;

// Rows of activations that own their memory.
struct Rows {
  Rows(ActivationFormat format, std::int64_t rows, std::int64_t cols, int poison);
  ActivationRows view() const;

  ActivationFormat format;
  std::int64_t rows, cols;
  mutable std::vector<bf16> values;
  mutable std::vector<std::uint8_t> codes, block_scales;
  mutable std::vector<float> scales;
};

struct OwnedRouting {
  OwnedRouting(std::int64_t tokens, int top_k, std::int64_t num_experts, int poison);
  Routing view() const;
  std::int64_t rows() const { return offsets.back(); }

  std::int64_t tokens;
  int top_k;
  std::int64_t num_experts;
  mutable std::vector<std::int64_t> offsets;
  mutable std::vector<std::int32_t> row_to_token, row_to_slot;
};

// What goes into one run of a layer.
struct Input {
  std::int64_t tokens = 0;
  std::vector<bf16> x;            // [tokens, H]
  std::vector<std::int32_t> ids;  // [tokens, top_k]
  std::vector<float> weights;     // [tokens, top_k]
};
Input random_input(const LayerConfig& config, std::int64_t tokens, std::uint64_t seed);
std::vector<bf16> to_bf16s(const std::vector<float>& values);
Input ones_input(const LayerConfig& config, std::int64_t tokens);  // x = 1, token t's slots to 0, 1, ...

struct RunOptions {
  ActivationFormat format = ActivationFormat::kBf16;
  L1Output l1 = L1Output::kCompactBf16;
  float x_scale = 0.0f;   // kNvfp4: the tensor scale of every row of x; 0: each row's own
  bool gathered = false;  // x is quantised once for each routed row
  float h_scale = 1.0f;   // kNvfp4: the tensor scale of every row of h
  int poison = 0x7F;
};

struct RunResult {
  OwnedRouting routing;
  Rows x, h_bf16, h;
  std::vector<float> expert_out;  // [rows, H]
  std::vector<bf16> y;            // [tokens, H]
  std::int64_t saturated = 0;     // blocks of h
};
RunResult run(const Backend& backend, const LayerWeights& layer, const Input& input,
              const RunOptions& options);

// The backends of this build that this machine can run.
std::vector<const Backend*> backends_under_test();

// Whether two floats are the same number, bit for bit; all NaNs count as one.
bool same(float a, float b);
bool same(bf16 a, bf16 b);
bool same(std::uint8_t a, std::uint8_t b);
template <class T>
::testing::AssertionResult all_same(const std::vector<T>& a, const std::vector<T>& b) {
  if (a.size() != b.size()) return ::testing::AssertionFailure() << a.size() << " against " << b.size();
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!same(a[i], b[i])) return ::testing::AssertionFailure() << "first difference at " << i;
  }
  return ::testing::AssertionSuccess();
}

// Tests of a backend, run once for each.
class Conformance : public ::testing::TestWithParam<const Backend*> {
 protected:
  const Backend& backend() const { return *GetParam(); }
  // The activation formats that it runs with such weights, in the order of the enumeration.
  std::vector<ActivationFormat> formats(WeightFormat weights = WeightFormat::kNvfp4) const;
};

}  // namespace megamoe::testing

#define MEGAMOE_FOR_EVERY_BACKEND(suite)                                                                    \
  INSTANTIATE_TEST_SUITE_P(Backends, suite, ::testing::ValuesIn(::megamoe::testing::backends_under_test()), \
                           [](const auto& param_info) { return std::string(param_info.param->name()); })
