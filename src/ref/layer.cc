// layer.cc: the two GEMMs and the shared expert. An expert's rows are multiplied, then the epilogue runs.
#include <string>
#include <vector>

#include "base/check.h"
#include "layer/activation.h"
#include "numerics/bf16.h"
#include "ref/operations.h"

namespace megamoe::ref {
namespace {

// x * w^T + bias for `count` rows; empty where the expert has no such matrix.
std::vector<float> linear(const ActivationRows& x, const std::int32_t* row_map, std::int64_t first,
                          std::int64_t count, const WeightMatrix& w, const float* bias,
                          const std::string& where) {
  std::vector<float> y(static_cast<std::size_t>(count * w.rows));
  if (w.rows == 0) return y;
  matmul(x, row_map, first, count, w, where, y.data());
  if (bias != nullptr) {
    for (std::size_t i = 0; i < y.size(); ++i) y[i] += bias[i % static_cast<std::size_t>(w.rows)];
  }
  return y;
}

// The activated pairs of every element, from what the two linear maps gave.
std::vector<ActivatedPair> activate_all(const ActivationConfig& config, const std::vector<float>& gate,
                                        const std::vector<float>& up) {
  std::vector<ActivatedPair> result(up.size());
  for (std::size_t i = 0; i < up.size(); ++i) {
    result[i] = activate(config, config.gated() ? gate[i] : 0.0f, up[i]);
  }
  return result;
}

class RefLayer final : public PreparedLayer {
 public:
  explicit RefLayer(const LayerWeights& weights) : weights_(weights) {}

  const LayerConfig& config() const override { return weights_.config; }

  std::int64_t gemm1(const ActivationRows& x, bool x_is_gathered, const Routing& routing, L1Output mode,
                     const ActivationRows& out) const override {
    const LayerConfig& c = config();
    if (mode == L1Output::kInterleavedBf16 && !c.activation.gated()) {
      fail(ErrorCode::kUnsupported, "interleaved output needs an activation with a gate, got {}",
           to_string(c.activation.kind));
    }
    const std::int32_t* row_map = x_is_gathered ? nullptr : routing.row_to_token;
    std::int64_t saturated = 0;
    for (std::int64_t e = 0; e < c.num_experts; ++e) {
      const std::int64_t first = routing.offsets[e], count = routing.offsets[e + 1] - first;
      if (count == 0) continue;
      const ExpertWeights& expert = weights_.experts[static_cast<std::size_t>(e)];
      const std::vector<ActivatedPair> pairs = activate_all(
          c.activation, linear(x, row_map, first, count, expert.gate, expert.gate_bias, name(e, "gate")),
          linear(x, row_map, first, count, expert.up, expert.up_bias, name(e, "up")));
      for (std::int64_t j = 0; j < count; ++j) {
        saturated += store(pairs.data() + j * c.intermediate, first + j, mode, out);
      }
    }
    return saturated;
  }

  void gemm2(const ActivationRows& h, const Routing& routing, float* out) const override {
    for (std::int64_t e = 0; e < config().num_experts; ++e) {
      const std::int64_t first = routing.offsets[e], count = routing.offsets[e + 1] - first;
      if (count == 0) continue;
      const ExpertWeights& expert = weights_.experts[static_cast<std::size_t>(e)];
      const std::vector<float> y =
          linear(h, nullptr, first, count, expert.down, expert.down_bias, name(e, "down"));
      std::copy(y.begin(), y.end(), out + first * config().hidden);
    }
  }

  void shared_expert(const ActivationRows& x, float* out) const override {
    const SharedExpert& shared = weights_.shared;
    const ExpertWeights& w = shared.weights;
    const std::string where = weights_.name + ", shared expert";
    const std::vector<ActivatedPair> pairs =
        activate_all(shared.activation, linear(x, nullptr, 0, x.rows, w.gate, w.gate_bias, where),
                     linear(x, nullptr, 0, x.rows, w.up, w.up_bias, where));
    std::vector<bf16> h(pairs.size());
    for (std::size_t i = 0; i < pairs.size(); ++i) h[i] = to_bf16(pairs[i].h);
    const ActivationRows h_rows{.format = ActivationFormat::kBf16,
                                .rows = x.rows,
                                .cols = w.up.rows,
                                .row_stride = w.up.rows,
                                .values = h.data()};
    const std::vector<float> y = linear(h_rows, nullptr, 0, x.rows, w.down, w.down_bias, where);
    for (std::int64_t t = 0; t < x.rows; ++t) {
      const float factor = shared.gate == nullptr ? 1.0f : gate_factor(x.values + t * x.row_stride);
      for (std::int64_t c = 0; c < x.cols; ++c) {
        const float value = y[static_cast<std::size_t>(t * x.cols + c)];
        out[t * x.cols + c] = shared.gate == nullptr ? value : value * factor;
      }
    }
  }

 private:
  std::string name(std::int64_t e, std::string_view matrix) const {
    return fmt::format("{}, expert {}, {}", weights_.name, e, matrix);
  }

  // sigmoid(x . gate): the dot product in FP64, rounded to FP32, then the FP32 sigmoid.
  float gate_factor(const bf16* x) const {
    double sum = 0.0;
    for (std::int64_t k = 0; k < config().hidden; ++k) {
      sum += static_cast<double>(to_float(x[k])) * static_cast<double>(weights_.shared.gate[k]);
    }
    return sigmoid_f32(static_cast<float>(sum));
  }

  // Row `r` of the first GEMM's output, from its activated pairs [I].
  std::int64_t store(const ActivatedPair* pairs, std::int64_t r, L1Output mode,
                     const ActivationRows& out) const {
    const std::int64_t intermediate = config().intermediate;
    if (mode == L1Output::kInterleavedBf16) {
      bf16* row = out.values + r * out.row_stride;
      for (std::int64_t i = 0; i < intermediate; ++i) {
        const std::int64_t gate_column = i / 8 * 16 + i % 8;
        row[gate_column] = to_bf16(pairs[i].gate);
        row[gate_column + 8] = to_bf16(pairs[i].h);
      }
      return 0;
    }
    std::vector<bf16> h(static_cast<std::size_t>(intermediate));
    for (std::int64_t i = 0; i < intermediate; ++i) h[static_cast<std::size_t>(i)] = to_bf16(pairs[i].h);
    return store_row(h.data(), r, out);
  }

  LayerWeights weights_;
};

}  // namespace

std::unique_ptr<PreparedLayer> prepare(const LayerWeights& weights) {
  return std::make_unique<RefLayer>(weights);
}

}  // namespace megamoe::ref
