// load_layer.cc: from a place in the index to weights that can run.
#include "layer/load_layer.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/parallel.h"
#include "checkpoint/expert_matrix.h"

namespace megamoe {
namespace {

constexpr std::size_t kGate = 0, kUp = 1, kDown = 2;

// Takes over a vector: its memory lives as long as `storage`.
template <class T>
const T* keep(std::vector<T>&& values, std::vector<std::shared_ptr<const void>>& storage) {
  if (values.empty()) return nullptr;
  auto owner = std::make_shared<std::vector<T>>(std::move(values));
  storage.push_back(owner);
  return owner->data();
}

// One expert on its way in.
struct LoadedExpert {
  ExpertWeights weights;
  std::vector<std::shared_ptr<const void>> storage;
  int filled = 0;  // projections
  bool tensor_scales_differ = false;
  bool input_scales_differ = false;
  int inexact_casts = 0;
};

WeightMatrix load_matrix(const ExpertMatrix& matrix, LoadedExpert& expert) {
  WeightMatrix out;
  out.rows = matrix.rows;
  out.cols = matrix.cols;
  out.tensor_scale = std::numeric_limits<float>::quiet_NaN();  // whoever forgets it will see it
  const auto as_f32 = [&] {
    out.format = WeightFormat::kF32;
    out.f32 = keep(read_f32(matrix), expert.storage);
  };
  const auto as_nvfp4 = [&](Nvfp4Data&& data) {
    out.codes = keep(std::move(data.codes), expert.storage);
    out.scales = keep(std::move(data.scales), expert.storage);
    out.tensor_scale = data.tensor_scale;
  };
  switch (matrix.encoding) {
    case Encoding::kNvfp4:
      if (const auto view = view_nvfp4(matrix)) {
        out.codes = view->codes;
        out.scales = view->scales;
        out.tensor_scale = view->tensor_scale;
      } else {
        as_nvfp4(read_nvfp4(matrix));
      }
      break;
    case Encoding::kMxfp4:
      if (Nvfp4Data data = read_nvfp4(matrix); data.inexact_blocks == 0) {
        as_nvfp4(std::move(data));
      } else {
        ++expert.inexact_casts;
        as_f32();
      }
      break;
    case Encoding::kDense:
      if (matrix.weight->info->dtype == DType::kBF16) {
        out.format = WeightFormat::kBf16;
        out.b16 = view_bf16(matrix);
        if (out.b16 == nullptr) out.b16 = keep(read_bf16(matrix), expert.storage);
        break;
      }
      as_f32();
      break;
    case Encoding::kFp8Block:
    case Encoding::kFp8Tensor: as_f32(); break;
  }
  return out;
}

LoadedExpert load_expert(const std::array<std::optional<ExpertMatrix>, 3>& slots) {
  LoadedExpert out;
  ExpertWeights& weights = out.weights;
  const std::array<WeightMatrix*, 3> matrices = {&weights.gate, &weights.up, &weights.down};
  const std::array<const float**, 3> biases = {&weights.gate_bias, &weights.up_bias, &weights.down_bias};
  for (std::size_t p : {kGate, kUp, kDown}) {
    if (!slots[p]) continue;
    *matrices[p] = load_matrix(*slots[p], out);
    *biases[p] = keep(read_bias(*slots[p]), out.storage);
    ++out.filled;
  }
  const float gate_scale = slots[kGate] ? read_input_scale(*slots[kGate]) : 0.0f;
  const float up_scale = read_input_scale(*slots[kUp]);
  weights.input_scale = std::max(gate_scale, up_scale);
  weights.down_input_scale = read_input_scale(*slots[kDown]);
  out.input_scales_differ = slots[kGate] && gate_scale != up_scale;
  out.tensor_scales_differ = slots[kGate] && weights.gate.format == WeightFormat::kNvfp4 &&
                             weights.up.format == WeightFormat::kNvfp4 &&
                             weights.gate.tensor_scale != weights.up.tensor_scale;
  return out;
}

// The scoring of a config's word for it.
Scoring scoring_of(const std::string& word) {
  if (word == "softmax") return Scoring::kSoftmax;
  if (word == "softmax-over-chosen") return Scoring::kSoftmaxOverChosen;
  if (word == "sigmoid") return Scoring::kSigmoid;
  if (word == "sqrtsoftplus") return Scoring::kSqrtSoftplus;
  fail(ErrorCode::kUnsupported, "config.json: the router scoring \"{}\" is not supported", word);
}

RouterConfig router_of(const ModelConfig& config, const MoeLayerInfo& info) {
  if (config.weighs_input) {
    fail(ErrorCode::kUnsupported,
         "{} multiplies the experts' input by the router's weight, which is not supported",
         config.model_type);
  }
  RouterConfig out;
  out.scoring = info.family == Family::kGptOss ? Scoring::kSoftmaxOverChosen : scoring_of(config.scoring);
  out.renormalize = config.renormalize;
  out.scaling_factor = config.scaling_factor;
  out.num_groups = config.num_groups;
  out.topk_groups = config.topk_groups;
  out.hash_routed = info.hash_table != nullptr;
  if (out.num_groups > 1 && config.topk_method == "group_limited_greedy") {
    fail(ErrorCode::kUnsupported, "config.json: the group choice \"{}\" is not supported",
         config.topk_method);
  }
  if (!info.mtp && info.layer < config.num_hash_layers && !out.hash_routed) {
    fail(ErrorCode::kInvalidFile, "config.json says that layer {} is routed by a table, but {} has none",
         info.layer, info.prefix);
  }
  return out;
}

ActivationConfig activation_of(const ModelConfig& config, const MoeLayerInfo& info) {
  ActivationConfig out;
  if (config.per_layer_limits) {
    fail(ErrorCode::kUnsupported,
         "config.json: \"swiglu_limits\" of their own for each layer are not "
         "supported");
  }
  const std::string& word = config.activation;
  if (config.gpt_oss || info.family == Family::kGptOss) {
    out.kind = Activation::kGptOss;
    out.limit = config.swiglu_limit > 0.0f ? config.swiglu_limit : 7.0f;
    out.alpha = config.swiglu_alpha;
  } else if (word == "relu2" || (word.empty() && !info.gated)) {
    out.kind = Activation::kRelu2;
  } else if (word == "silu" || word == "swish" || word == "swiglu" || word.empty()) {
    out.kind = config.swiglu_limit > 0.0f ? Activation::kSwiGluClamped : Activation::kSwiGlu;
    out.limit = config.swiglu_limit;
  } else {
    fail(ErrorCode::kUnsupported, "config.json: the activation \"{}\" is not supported", word);
  }
  if (out.gated() != info.gated) {
    fail(ErrorCode::kUnsupported, "the activation {} {} a gate projection, but {} has {}",
         to_string(out.kind), out.gated() ? "needs" : "has no use for", info.prefix,
         info.gated ? "one" : "none");
  }
  return out;
}

// One of router_tensors(), or null. A NaN in it would spoil every token, or send it to other experts unseen.
const float* load_router_tensor(const TensorRef* tensor, LayerWeights& out) {
  if (tensor == nullptr) return nullptr;
  std::vector<float> values = read_f32(*tensor);
  if (const std::int64_t nans = count_nans(values); nans > 0) {
    fail(ErrorCode::kInvalidFile, "{}: expected numbers, got {} NaN", named(*tensor), nans);
  }
  return keep(std::move(values), out.storage);
}

void load_router(const MoeLayerInfo& info, LayerWeights& out) {
  // A router of another input than the experts' cannot run as part of this layer.
  if (info.router_weight != nullptr && info.router_weight->info->shape.back() != info.hidden) {
    out.notes.push_back(fmt::format("the router works on {} columns, the experts on {}; it is left out",
                                    info.router_weight->info->shape.back(), info.hidden));
  } else {
    out.router_weight = load_router_tensor(info.router_weight, out);
  }
  out.router_bias = load_router_tensor(info.router_bias, out);
  out.selection_bias = load_router_tensor(info.selection_bias, out);
  if (info.hash_table == nullptr) return;

  const TensorRef& table = *info.hash_table;
  if (table.info->shape[1] != out.config.top_k) {
    fail(ErrorCode::kInvalidFile, "{} has {} experts for a token, expected {}", table.info->name,
         table.info->shape[1], out.config.top_k);
  }
  std::vector<std::int32_t> ids(static_cast<std::size_t>(table.info->elements()));
  const std::byte* bytes = table.bytes().data();
  for (std::size_t i = 0; i < ids.size(); ++i) {
    std::int64_t id = 0;
    if (table.info->dtype == DType::kI64) {
      std::memcpy(&id, bytes + 8 * i, 8);
    } else {
      std::int32_t narrow;
      std::memcpy(&narrow, bytes + 4 * i, 4);
      id = narrow;
    }
    if (id < 0 || id >= info.num_experts) {
      const auto top_k = static_cast<std::size_t>(out.config.top_k);
      fail(ErrorCode::kInvalidFile, "{}: token {}, slot {} names expert {}, expected 0 to {}",
           table.info->name, i / top_k, i % top_k, id, info.num_experts - 1);
    }
    ids[i] = static_cast<std::int32_t>(id);
  }
  out.hash_rows = table.info->shape[0];
  out.hash_table = keep(std::move(ids), out.storage);
}

void load_shared(const MoeLayerInfo& info, LayerWeights& out) {
  if (!info.shared[kUp]) return;
  if (info.shared[kDown]->rows != info.hidden) {
    out.notes.push_back(fmt::format("the shared expert works on {} columns, the others on {}; it is left out",
                                    info.shared[kDown]->rows, info.hidden));
    return;
  }
  LoadedExpert shared = load_expert(info.shared);
  out.shared.present = true;
  out.shared.weights = shared.weights;
  // It always runs in BF16: input scales are of no use to it.
  out.shared.weights.input_scale = out.shared.weights.down_input_scale = 0.0f;
  // DeepSeek-V4 builds its shared expert without the limit.
  out.shared.activation.kind = info.shared[kGate] ? Activation::kSwiGlu : Activation::kRelu2;
  std::move(shared.storage.begin(), shared.storage.end(), std::back_inserter(out.storage));
  out.shared.gate = load_router_tensor(info.shared_gate, out);
}

}  // namespace

LayerConfig layer_config(const ModelIndex& model, const MoeLayerInfo& info) {
  const ModelConfig& config = model.config;
  LayerConfig out;
  out.hidden = info.hidden;
  out.intermediate = info.intermediate;
  out.num_experts = info.num_experts;
  out.top_k = config.top_k;
  if (out.top_k == 0 && info.hash_table != nullptr) {
    out.top_k = static_cast<int>(std::min<std::int64_t>(info.hash_table->info->shape[1], info.num_experts));
  }
  if (out.top_k == 0) {
    fail(ErrorCode::kInvalidFile,
         "{}: no config.json says how many experts a token has (num_experts_per_tok)",
         model.checkpoint->path().string());
  }
  out.router = router_of(config, info);
  out.activation = activation_of(config, info);
  validate(out);
  return out;
}

LayerWeights load_layer(const ModelIndex& model, const MoeLayerInfo& info) {
  LayerWeights out;
  out.config = layer_config(model, info);
  out.name = info.prefix;
  out.storage.push_back(model.checkpoint);

  const auto count = static_cast<std::int64_t>(info.experts.size());
  std::vector<LoadedExpert> loaded(info.experts.size());
  parallel_for(count, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t e = begin; e < end; ++e) {
      const auto i = static_cast<std::size_t>(e);
      loaded[i] = load_expert(info.experts[i]);
    }
  });

  std::int64_t tensor_scales_differ = 0, input_scales_differ = 0, inexact_casts = 0, nvfp4 = 0, scaled = 0;
  out.experts.reserve(loaded.size());
  for (LoadedExpert& expert : loaded) {
    MEGAMOE_CHECK(expert.filled == (info.gated ? 3 : 2));
    out.experts.push_back(expert.weights);
    std::move(expert.storage.begin(), expert.storage.end(), std::back_inserter(out.storage));
    tensor_scales_differ += expert.tensor_scales_differ;
    input_scales_differ += expert.input_scales_differ;
    inexact_casts += expert.inexact_casts;
    nvfp4 += expert.weights.down.format == WeightFormat::kNvfp4;
    scaled += expert.weights.down_input_scale > 0.0f;
  }
  load_shared(info, out);
  load_router(info, out);

  if (nvfp4 > 0 && scaled == 0)
    out.notes.emplace_back("no input scales: weight-only, or dynamic scales in W4A4");
  if (tensor_scales_differ > 0) {
    out.notes.push_back(
        fmt::format("gate and up have different tensor scales in {} of {} experts; each keeps "
                    "its own",
                    tensor_scales_differ, count));
  }
  if (input_scales_differ > 0) {
    out.notes.push_back(
        fmt::format("gate and up have different input scales in {} of {} experts; the larger "
                    "one is used",
                    input_scales_differ, count));
  }
  if (inexact_casts > 0) {
    out.notes.push_back(
        fmt::format("{} MXFP4 matrices have no exact NVFP4 form and are kept as FP32", inexact_casts));
  }
  if (!model.config.scoring_known && info.router_weight != nullptr) {
    out.notes.emplace_back(
        "nothing tells the router's rule: softmax over all experts, renormalised, is assumed");
  }
  validate(out);
  return out;
}

}  // namespace megamoe
