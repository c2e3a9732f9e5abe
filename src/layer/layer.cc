#include "megamoe/layer.h"

#include <array>
#include <cmath>
#include <limits>

#include "base/check.h"

namespace megamoe {
namespace {

// In the order of the enumerations.
constexpr std::array<std::string_view, 3> kActivationFormats = {"bf16", "fp8", "nvfp4"};
constexpr std::array<std::string_view, 4> kScaleSources = {"static", "layer-max", "token", "tensor"};
constexpr std::array<std::string_view, 4> kActivations = {"swiglu", "swiglu-clamped", "gpt-oss", "relu2"};
constexpr std::array<std::string_view, 4> kScorings = {"softmax", "softmax-over-chosen", "sigmoid",
                                                       "sqrt-softplus"};
constexpr std::array<std::string_view, 3> kWeightFormats = {"f32", "bf16", "nvfp4"};

template <class Enum, std::size_t N>
Enum parse(const std::array<std::string_view, N>& names, std::string_view what, std::string_view name) {
  for (std::size_t i = 0; i < N; ++i) {
    if (names[i] == name) return static_cast<Enum>(i);
  }
  fail(ErrorCode::kInvalidArgument, "{} must be one of {}, got \"{}\"", what, fmt::join(names, ", "), name);
}

constexpr int kBlock = 16;  // every width is cut into blocks of 16

bool is_positive(float value) { return std::isfinite(value) && value > 0.0f; }

void check_width(std::string_view what, std::int64_t value) {
  if (value <= 0 || value % kBlock != 0) {
    fail(ErrorCode::kInvalidArgument, "{} must be a positive multiple of {}, got {}", what, kBlock, value);
  }
}

void check_activation(const ActivationConfig& activation) {
  const bool clamped =
      activation.kind == Activation::kSwiGluClamped || activation.kind == Activation::kGptOss;
  if (clamped && !is_positive(activation.limit)) {
    fail(ErrorCode::kInvalidArgument, "the activation {} needs a limit that is finite and positive, got {}",
         to_string(activation.kind), activation.limit);
  }
  if (activation.kind == Activation::kGptOss && !std::isfinite(activation.alpha)) {
    fail(ErrorCode::kInvalidArgument, "the activation gpt-oss needs a finite alpha, got {}",
         activation.alpha);
  }
}

void check_router(const LayerConfig& config) {
  const RouterConfig& router = config.router;
  if (!is_positive(router.scaling_factor)) {
    fail(ErrorCode::kInvalidArgument, "the router's scaling factor must be finite and positive, got {}",
         router.scaling_factor);
  }
  if (router.num_groups < 1 || config.num_experts % router.num_groups != 0) {
    fail(ErrorCode::kInvalidArgument, "{} experts cannot be cut into {} equal groups", config.num_experts,
         router.num_groups);
  }
  if (router.topk_groups < 1 || router.topk_groups > router.num_groups) {
    fail(ErrorCode::kInvalidArgument, "topk_groups must be 1 to {} (the number of groups), got {}",
         router.num_groups, router.topk_groups);
  }
  if (router.num_groups > 1 && router.scoring != Scoring::kSigmoid &&
      router.scoring != Scoring::kSqrtSoftplus) {
    fail(ErrorCode::kUnsupported, "expert groups need the scoring sigmoid or sqrt-softplus, got {}",
         to_string(router.scoring));
  }
  const std::int64_t eligible = config.num_experts / router.num_groups * router.topk_groups;
  if (config.top_k > eligible) {
    fail(ErrorCode::kInvalidArgument, "top_k {} is more than the {} experts of {} of {} groups", config.top_k,
         eligible, router.topk_groups, router.num_groups);
  }
}

// `where` names the matrix; [rows, cols] is what the layer's sizes ask for.
void check_matrix(const std::string& where, const WeightMatrix& matrix, std::int64_t rows,
                  std::int64_t cols) {
  if (matrix.rows != rows || matrix.cols != cols) {
    fail(ErrorCode::kInvalidArgument, "{} must be [{}, {}], got [{}, {}]", where, rows, cols, matrix.rows,
         matrix.cols);
  }
  const bool there = matrix.format == WeightFormat::kF32 ? matrix.f32 != nullptr
                     : matrix.format == WeightFormat::kBf16
                         ? matrix.b16 != nullptr
                         : matrix.codes != nullptr && matrix.scales != nullptr;
  if (!there) {
    fail(ErrorCode::kInvalidArgument, "{} is {} but has no data", where, to_string(matrix.format));
  }
  if (matrix.format == WeightFormat::kNvfp4 && !is_positive(matrix.tensor_scale)) {
    fail(ErrorCode::kInvalidArgument, "{} needs a tensor scale that is finite and positive, got {}", where,
         matrix.tensor_scale);
  }
}

void check_input_scale(const std::string& where, std::string_view what, float scale) {
  if (scale != 0.0f && !is_positive(scale)) {
    fail(ErrorCode::kInvalidArgument, "{}: {} must be finite and positive (or 0 for none), got {}", where,
         what, scale);
  }
}

void check_expert(const std::string& where, const ExpertWeights& expert, std::int64_t hidden,
                  std::int64_t intermediate, bool gated) {
  if (gated) {
    check_matrix(where + ", gate", expert.gate, intermediate, hidden);
  } else if (expert.gate.rows != 0 || expert.gate_bias != nullptr) {
    fail(ErrorCode::kInvalidArgument, "{}: the activation has no gate, but the expert has one", where);
  }
  check_matrix(where + ", up", expert.up, intermediate, hidden);
  check_matrix(where + ", down", expert.down, hidden, intermediate);
  check_input_scale(where, "the input scale", expert.input_scale);
  check_input_scale(where, "the input scale of down", expert.down_input_scale);
}

void check_hash_table(const LayerWeights& weights, const std::string& where) {
  const LayerConfig& config = weights.config;
  if (weights.hash_table == nullptr || weights.hash_rows <= 0) {
    fail(ErrorCode::kInvalidArgument, "{} is hash-routed but has no table of expert ids", where);
  }
  const std::int64_t count = checked_mul(weights.hash_rows, config.top_k);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int32_t id = weights.hash_table[i];
    if (id < 0 || id >= config.num_experts) {
      fail(ErrorCode::kInvalidArgument, "{}: the hash table's row {}, slot {} must be 0 to {}, got {}", where,
           i / config.top_k, i % config.top_k, config.num_experts - 1, id);
    }
  }
}

}  // namespace

std::string_view to_string(ActivationFormat format) {
  return kActivationFormats[static_cast<std::size_t>(format)];
}
std::string_view to_string(ScaleSource source) { return kScaleSources[static_cast<std::size_t>(source)]; }
std::string_view to_string(Activation kind) { return kActivations[static_cast<std::size_t>(kind)]; }
std::string_view to_string(Scoring scoring) { return kScorings[static_cast<std::size_t>(scoring)]; }
std::string_view to_string(WeightFormat format) { return kWeightFormats[static_cast<std::size_t>(format)]; }

ActivationFormat parse_activation_format(std::string_view name) {
  return parse<ActivationFormat>(kActivationFormats, "the activation format", name);
}
ScaleSource parse_scale_source(std::string_view name) {
  return parse<ScaleSource>(kScaleSources, "the source of a tensor scale", name);
}

void validate(const LayerConfig& config) {
  check_width("the hidden size", config.hidden);
  check_width("the intermediate size", config.intermediate);
  if (config.num_experts < 1 || config.num_experts > std::numeric_limits<std::int32_t>::max()) {
    fail(ErrorCode::kInvalidArgument, "the number of experts must be 1 to {}, got {}",
         std::numeric_limits<std::int32_t>::max(), config.num_experts);
  }
  if (config.top_k < 1 || config.top_k > config.num_experts) {
    fail(ErrorCode::kInvalidArgument, "top_k must be 1 to {} (the number of experts), got {}",
         config.num_experts, config.top_k);
  }
  checked_mul(checked_mul(config.hidden, config.intermediate), checked_mul(config.num_experts, 3));
  check_activation(config.activation);
  check_router(config);
}

void validate(const LayerWeights& weights) {
  const LayerConfig& config = weights.config;
  validate(config);
  const std::string where = weights.name.empty() ? "the layer" : weights.name;
  if (static_cast<std::int64_t>(weights.experts.size()) != config.num_experts) {
    fail(ErrorCode::kInvalidArgument, "{} must have {} experts, got {}", where, config.num_experts,
         weights.experts.size());
  }
  for (std::int64_t e = 0; e < config.num_experts; ++e) {
    check_expert(fmt::format("{}, expert {}", where, e), weights.experts[static_cast<std::size_t>(e)],
                 config.hidden, config.intermediate, config.activation.gated());
  }
  const SharedExpert& shared = weights.shared;
  if (shared.present) {
    check_activation(shared.activation);
    check_width("the shared expert's intermediate size", shared.weights.up.rows);
    check_expert(where + ", shared expert", shared.weights, config.hidden, shared.weights.up.rows,
                 shared.activation.gated());
  }
  if (config.router.hash_routed) check_hash_table(weights, where);
}

}  // namespace megamoe
