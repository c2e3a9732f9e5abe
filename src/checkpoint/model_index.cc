// model_index.cc: sorts a checkpoint's tensors into layers, experts and projections.
#include "checkpoint/model_index.h"

#include <algorithm>
#include <map>

#include "base/check.h"
#include "checkpoint/json.h"
#include "checkpoint/layer_index.h"
#include "checkpoint/tensor_names.h"

namespace megamoe {
namespace {

constexpr std::size_t kMaxNameBytes = 1000;

using Layers = std::map<std::string, LayerTensors, std::less<>>;

void add_part(MatrixParts& parts, const TensorName& name, const TensorRef& tensor) {
  if (parts.any() && parts.module != name.module) {
    fail(ErrorCode::kInvalidFile, "{} and {} claim the same place", parts.module, tensor.info->name);
  }
  parts.module = name.module;
  const TensorRef*& slot = parts.tensors[static_cast<std::size_t>(name.part)];
  if (slot != nullptr) {
    fail(ErrorCode::kInvalidFile, "{} and {} claim the same place", slot->info->name, tensor.info->name);
  }
  slot = &tensor;
}

// The first pass: experts by name. Tells which tensors it took.
std::vector<bool> collect_experts(const Checkpoint& checkpoint, Layers& layers) {
  std::vector<bool> taken(checkpoint.tensors().size(), false);
  for (std::size_t i = 0; i < checkpoint.tensors().size(); ++i) {
    const TensorRef& tensor = checkpoint.tensors()[i];
    const TensorName name = parse_tensor_name(tensor.info->name);
    if (name.role != TensorRole::kOther && printable(tensor.info->name, kMaxNameBytes) != tensor.info->name) {
      fail(ErrorCode::kInvalidFile, "{}: the name of an expert's tensor must be plain text",
           printable(tensor.info->name));
    }
    const auto projection = static_cast<std::size_t>(name.projection);
    switch (name.role) {
      case TensorRole::kOther: break;
      case TensorRole::kUnknown:
        fail(ErrorCode::kInvalidFile, "{} is named as an expert's but is no tensor that is known",
             tensor.info->name);
      case TensorRole::kUnsupported:
        fail(ErrorCode::kUnsupported, "{} belongs to a quantisation scheme that is not supported",
             tensor.info->name);
      case TensorRole::kExpert:
        add_part(layers[std::string(name.prefix)].experts[name.expert][projection], name, tensor);
        taken[i] = true;
        break;
      case TensorRole::kAllExperts:
        add_part(layers[std::string(name.prefix)].all_experts[projection], name, tensor);
        taken[i] = true;
        break;
      case TensorRole::kSharedExpert:
        add_part(layers[std::string(name.prefix)].shared[projection], name, tensor);
        break;
    }
  }
  // A shared expert without routed ones is an ordinary part of a dense layer.
  std::erase_if(layers, [](const auto& entry) {
    return entry.second.experts.empty() &&
           std::none_of(entry.second.all_experts.begin(), entry.second.all_experts.end(),
                        [](const MatrixParts& parts) { return parts.any(); });
  });
  return taken;
}

void sort_and_number(const ModelConfig& config, std::vector<MoeLayerInfo>& layers) {
  int last = static_cast<int>(config.num_layers) - 1;
  for (MoeLayerInfo& layer : layers) {
    // DeepSeek-V3 counts its multi-token-prediction layers on behind the ordinary ones.
    if (!layer.mtp && config.num_layers != 0 && layer.layer >= config.num_layers) layer.mtp = true;
    if (!layer.mtp) last = std::max(last, layer.layer);
  }
  for (MoeLayerInfo& layer : layers) {
    if (layer.mtp && layer.layer <= last) layer.layer += last + 1;
  }
  std::sort(layers.begin(), layers.end(),
            [](const MoeLayerInfo& a, const MoeLayerInfo& b) { return a.layer < b.layer; });
  for (std::size_t i = 1; i < layers.size(); ++i) {
    if (layers[i - 1].layer == layers[i].layer) {
      fail(ErrorCode::kUnsupported,
           "\"{}\" and \"{}\" are both layer {}; a checkpoint of several models is "
           "not supported",
           layers[i - 1].prefix, layers[i].prefix, layers[i].layer);
    }
  }
}

}  // namespace

std::string_view to_string(Projection projection) {
  switch (projection) {
    case Projection::kGate: return "gate";
    case Projection::kUp: return "up";
    case Projection::kDown: return "down";
  }
  return "unknown";
}

std::string_view to_string(Encoding encoding) {
  switch (encoding) {
    case Encoding::kDense: return "dense";
    case Encoding::kNvfp4: return "nvfp4";
    case Encoding::kMxfp4: return "mxfp4";
    case Encoding::kFp8Block: return "fp8-block";
    case Encoding::kFp8Tensor: return "fp8";
  }
  return "unknown";
}

std::string_view to_string(Family family) {
  switch (family) {
    case Family::kPlain: return "plain";
    case Family::kModelOpt: return "modelopt";
    case Family::kCompressedTensors: return "compressed-tensors";
    case Family::kDeepSeekV4: return "deepseek-v4";
    case Family::kGptOss: return "gpt-oss";
  }
  return "unknown";
}

ModelIndex index_model(std::shared_ptr<const Checkpoint> checkpoint, const ModelIndexOptions& options) {
  if (!options.fused_layout.empty() && options.fused_layout != "rows-first" &&
      options.fused_layout != "cols-first") {
    fail(ErrorCode::kInvalidArgument, "the fused layout must be rows-first or cols-first, got \"{}\"",
         options.fused_layout);
  }
  ModelIndex out;
  out.checkpoint = checkpoint;
  out.config = parse_model_config(checkpoint->config(), checkpoint->hf_quant_config());
  out.model_type = out.config.model_type;

  Layers layers;
  const std::vector<bool> taken = collect_experts(*checkpoint, layers);
  for (std::size_t i = 0; i < taken.size(); ++i) {
    if (taken[i]) {
      ++out.expert_tensors;
    } else {
      out.others.push_back(&checkpoint->tensors()[i]);
    }
  }
  for (const auto& [prefix, tensors] : layers) {
    out.layers.push_back(build_layer(*checkpoint, prefix, tensors, out.config, options, out.notes));
  }
  if (out.layers.empty() && out.config.num_experts > 0) {
    fail(ErrorCode::kInvalidFile, "config.json tells of {} experts but no tensor is named as an expert's",
         out.config.num_experts);
  }
  sort_and_number(out.config, out.layers);
  return out;
}

std::vector<const TensorRef*> router_tensors(const MoeLayerInfo& layer) {
  std::vector<const TensorRef*> out = {layer.router_weight, layer.router_bias, layer.selection_bias,
                                       layer.shared_gate};
  std::erase(out, nullptr);
  return out;
}

const MoeLayerInfo& find_layer(const ModelIndex& model, int layer) {
  std::string there;
  for (const MoeLayerInfo& info : model.layers) {
    if (info.layer == layer) return info;
    there += (there.empty() ? "" : ", ") + std::to_string(info.layer);
  }
  if (there.empty()) fail(ErrorCode::kNotFound, "{} has no expert layers", model.checkpoint->path().string());
  fail(ErrorCode::kNotFound, "layer {} has no experts; those that have are {}", layer, there);
}

std::string matrix_name(const MoeLayerInfo& layer, std::int64_t expert, Projection projection) {
  return join_names(layer.prefix, fmt::format("experts.{}.{}", expert, to_string(projection)));
}

}  // namespace megamoe
