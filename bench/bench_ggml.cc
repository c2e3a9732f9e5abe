// bench_ggml.cc: a layer on the `cpu` backend beside the same one as a graph of ggml, whose weights are ours
// quantised once more by ggml itself, in its plain layouts. Both run in turn, in rounds, with routings that
// come back to an expert late; their results are compared before.
//
//     bench_ggml MODEL EXPERTS THREADS TOKENS...        (EXPERTS 0: all that the model has)
#include <fmt/format.h>
#include <ggml-cpu.h>
#include <ggml.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/check.h"
#include "base/median.h"
#include "base/parallel.h"
#include "engine/bench_inputs.h"
#include "layer/geometries.h"
#include "megamoe/moe_layer.h"
#include "numerics/bf16.h"
#include "numerics/nvfp4.h"

namespace megamoe {
namespace {

struct Inputs {
  std::int64_t tokens;
  std::vector<bf16> x;
  std::vector<float> weights;
  std::vector<std::vector<std::int32_t>> ids;  // of each pass
};

std::vector<float> values_of(const WeightMatrix& w) {
  std::vector<float> values(static_cast<std::size_t>(w.rows * w.cols));
  for (std::int64_t i = 0; i < w.rows * w.cols; ++i) {
    values[static_cast<std::size_t>(i)] =
        nvfp4_value(nibble(w.codes, i), w.scales[i / kNvfp4Block], w.tensor_scale);
  }
  return values;
}

// The layer as ggml runs it, with one type for all weights.
class GgmlLayer {
 public:
  GgmlLayer(const LayerWeights& layer, ggml_type type, int threads)
      : config_(layer.config), threads_(threads) {
    const std::int64_t h = config_.hidden, i = config_.intermediate, e = config_.num_experts;
    const std::size_t bytes = (2 * ggml_row_size(type, h) * static_cast<std::size_t>(i) +
                               ggml_row_size(type, i) * static_cast<std::size_t>(h)) *
                              static_cast<std::size_t>(e);
    weights_.reset(ggml_init({bytes + (1 << 20), nullptr, false}));
    gate_ = matrices(layer, &ExpertWeights::gate, type);
    up_ = matrices(layer, &ExpertWeights::up, type);
    down_ = matrices(layer, &ExpertWeights::down, type);
  }

  // The graph for so many tokens.
  void load(const Inputs& inputs) {
    const std::int64_t h = config_.hidden, k = config_.top_k, tokens = inputs.tokens;
    const std::size_t floats = static_cast<std::size_t>(tokens * k * (3 * config_.intermediate + 4 * h));
    graph_memory_.reset(ggml_init({4 * floats + (16 << 20), nullptr, false}));
    ggml_context* c = graph_memory_.get();
    ggml_tensor* x = ggml_new_tensor_3d(c, GGML_TYPE_F32, h, 1, tokens);
    for (std::size_t j = 0; j < inputs.x.size(); ++j) static_cast<float*>(x->data)[j] = to_float(inputs.x[j]);
    ids_ = ggml_new_tensor_2d(c, GGML_TYPE_I32, k, tokens);
    ggml_tensor* w = ggml_new_tensor_3d(c, GGML_TYPE_F32, 1, k, tokens);
    std::copy(inputs.weights.begin(), inputs.weights.end(), static_cast<float*>(w->data));
    ggml_tensor* act =
        ggml_swiglu_split(c, ggml_mul_mat_id(c, gate_, x, ids_), ggml_mul_mat_id(c, up_, x, ids_));
    ggml_tensor* each = ggml_mul(c, ggml_mul_mat_id(c, down_, act, ids_), w);
    y_ = nullptr;
    for (std::int64_t slot = 0; slot < k; ++slot) {
      ggml_tensor* one =
          ggml_view_2d(c, each, h, tokens, each->nb[2], static_cast<std::size_t>(slot) * each->nb[1]);
      y_ = y_ == nullptr ? one : ggml_add(c, y_, one);
    }
    graph_ = ggml_new_graph(c);
    ggml_build_forward_expand(graph_, y_);
    plan_ = ggml_graph_plan(graph_, threads_, nullptr);
    work_.resize(plan_.work_size);
    plan_.work_data = work_.data();
  }

  void run(const std::vector<std::int32_t>& ids) {
    std::copy(ids.begin(), ids.end(), static_cast<std::int32_t*>(ids_->data));
    MEGAMOE_CHECK(ggml_graph_compute(graph_, &plan_) == GGML_STATUS_SUCCESS);
  }
  const float* y() const { return static_cast<const float*>(y_->data); }

 private:
  struct Free {
    void operator()(ggml_context* context) const { ggml_free(context); }
  };

  ggml_tensor* matrices(const LayerWeights& layer, WeightMatrix ExpertWeights::*which, ggml_type type) {
    const WeightMatrix& first = layer.experts[0].*which;
    ggml_tensor* out = ggml_new_tensor_3d(weights_.get(), type, first.cols, first.rows, config_.num_experts);
    parallel_for(config_.num_experts, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t e = begin; e < end; ++e) {
        const std::vector<float> values = values_of(layer.experts[static_cast<std::size_t>(e)].*which);
        ggml_quantize_chunk(type, values.data(),
                            static_cast<char*>(out->data) + static_cast<std::size_t>(e) * out->nb[2], 0,
                            first.rows, first.cols, nullptr);
      }
    });
    return out;
  }

  LayerConfig config_;
  int threads_;
  std::unique_ptr<ggml_context, Free> weights_, graph_memory_;
  ggml_tensor *gate_, *up_, *down_, *ids_ = nullptr, *y_ = nullptr;
  ggml_cgraph* graph_ = nullptr;
  ggml_cplan plan_ = {};
  std::vector<std::uint8_t> work_;
};

// Relative L2 difference.
double difference(const std::vector<bf16>& ours, const float* theirs) {
  double error = 0, size = 0;
  for (std::size_t i = 0; i < ours.size(); ++i) {
    const double a = to_float(ours[i]), b = theirs[i];
    error += (a - b) * (a - b), size += a * a;
  }
  return std::sqrt(error / size);
}

double seconds_of(const auto& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void compare(const MoeLayer& layer, std::vector<std::pair<std::string, std::unique_ptr<GgmlLayer>>>& others,
             std::int64_t tokens) {
  // Two quantisations of the weights, of about 9.5 % each, and of x and h.
  constexpr double kMostDifference = 0.3;
  constexpr int kRounds = 5;
  const LayerConfig& config = layer.config();
  Inputs inputs{.tokens = tokens,
                .x = random_tokens(tokens * config.hidden, 1),
                .weights = random_expert_weights(tokens, config.top_k, 2),
                .ids = {}};
  RoutingSequence routings(RoutingKind::kUniform, config.num_experts, config.top_k, tokens, 3);
  const std::int64_t passes = std::max<std::int64_t>(1, 2 * config.num_experts / (tokens * config.top_k));
  for (std::int64_t pass = 0; pass < passes; ++pass) inputs.ids.push_back(routings.next());

  std::vector<bf16> y(inputs.x.size());
  const AlignedBuffer<std::byte> workspace(layer.workspace_bytes(tokens));
  const auto run = [&](const std::vector<std::int32_t>& ids) {
    layer.forward({inputs.x.data(), tokens, config.hidden}, {ids.data(), tokens, config.top_k},
                  {inputs.weights.data(), tokens, config.top_k}, {y.data(), tokens, config.hidden},
                  workspace);
  };
  run(inputs.ids[0]);
  for (auto& [name, other] : others) {
    other->load(inputs);
    other->run(inputs.ids[0]);
    const double error = difference(y, other->y());
    if (!(error < kMostDifference)) {
      fail(ErrorCode::kInternal, "{} differs from ours by {:.2g}; nothing is timed", name, error);
    }
  }
  std::vector<std::vector<double>> seconds(1 + others.size());
  for (int round = 0; round <= kRounds; ++round) {  // the first warms up
    const auto time = [&](std::size_t at, const auto& one) {
      const double all = seconds_of([&] {
        for (const auto& ids : inputs.ids) one(ids);
      });
      if (round > 0) seconds[at].push_back(all / static_cast<double>(passes));
    };
    time(0, run);
    for (std::size_t i = 0; i < others.size(); ++i) {
      time(i + 1, [&](const std::vector<std::int32_t>& ids) { others[i].second->run(ids); });
    }
  }
  const double flops = 6.0 * static_cast<double>(tokens * config.top_k * config.hidden * config.intermediate);
  const double ours = median(seconds[0]);
  for (std::size_t i = 0; i < seconds.size(); ++i) {
    const double s = median(seconds[i]);
    std::printf("%6lld  %-14s %10.3f ms %8.1f GFLOP/s  %6.2f of ours\n", static_cast<long long>(tokens),
                i == 0 ? "megamoe W4A4" : others[i - 1].first.c_str(), 1e3 * s, 1e-9 * flops / s, s / ours);
  }
}

int run(int count, char** arguments) {
  if (count < 5) {
    std::fprintf(stderr, "usage: %s MODEL EXPERTS THREADS TOKENS...\n", arguments[0]);
    return 2;
  }
  LayerConfig config = find_geometry(arguments[1]).config;
  config.router = {};
  const auto number = [&](int i, const char* name, std::int64_t least) {
    const std::int64_t value = std::atoll(arguments[i]);
    if (value < least) {
      fail(ErrorCode::kInvalidArgument, "{} must be a number from {} on, got '{}'", name, least,
           arguments[i]);
    }
    return value;
  };
  if (const std::int64_t experts = number(2, "EXPERTS", 0); experts > 0) {
    if (experts < config.top_k) {
      fail(ErrorCode::kInvalidArgument, "EXPERTS must be 0 or {} at least, got {}", config.top_k, experts);
    }
    config.num_experts = experts;
  }
  const int threads = static_cast<int>(number(3, "THREADS", 1));
  if (config.activation.kind != Activation::kSwiGlu) {
    fail(ErrorCode::kUnsupported, "expected a model with swiglu, got {}", to_string(config.activation.kind));
  }
  set_num_threads(threads);
  ggml_cpu_init();
  const LayerWeights weights = random_layer(config, 1);
  MoeLayerOptions options;
  options.backend = "cpu";
  options.activations = ActivationFormat::kNvfp4;
  const MoeLayer layer(weights, options);
  std::vector<std::pair<std::string, std::unique_ptr<GgmlLayer>>> others;
  for (const ggml_type type : {GGML_TYPE_NVFP4, GGML_TYPE_MXFP4}) {
    others.emplace_back(fmt::format("ggml {}", ggml_type_name(type)),
                        std::make_unique<GgmlLayer>(weights, type, threads));
  }
  for (int i = 4; i < count; ++i) compare(layer, others, number(i, "TOKENS", 1));
  return 0;
}

}  // namespace
}  // namespace megamoe

int main(int count, char** arguments) {
  try {
    return megamoe::run(count, arguments);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
