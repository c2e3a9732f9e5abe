#include "engine/convert.h"

#include <string_view>

#include "base/check.h"

namespace megamoe {
namespace {

using nlohmann::json;

bool is_fp4(const ExpertMatrix& m, Family to) {
  if (m.encoding == Encoding::kMxfp4) return true;
  return m.encoding == Encoding::kNvfp4 && m.reciprocal != (to == Family::kCompressedTensors);
}

struct InputScaleCount {
  std::int64_t with = 0, without = 0;
  std::string without_name;

  std::optional<float> read(const ExpertMatrix& m) {
    const float scale = read_input_scale(m);
    if (scale > 0.0f) {
      ++with;
      return scale;
    }
    ++without;
    without_name = m.weight->info->name;
    return std::nullopt;
  }
};

// A linear outside the experts that is NVFP4 (of either family) or compressed-tensors' MXFP4.
std::optional<ExpertMatrix> fp4_linear(const Checkpoint& checkpoint, const TensorRef& weight,
                                       std::string& module) {
  const std::string& name = weight.info->name;
  const bool packed = name.ends_with(".weight_packed");
  if (!packed && !name.ends_with(".weight")) return std::nullopt;
  if (weight.info->dtype != DType::kU8 || weight.info->shape.size() != 2) return std::nullopt;
  module = name.substr(0, name.rfind('.'));
  ExpertMatrix m;
  m.weight = &weight;
  m.block_scale = checkpoint.find(module + ".weight_scale");
  m.tensor_scale = checkpoint.find(module + (packed ? ".weight_global_scale" : ".weight_scale_2"));
  m.input_scale = checkpoint.find(module + (packed ? ".input_global_scale" : ".input_scale"));
  m.rows = m.stored_rows = weight.info->shape[0];
  m.cols = 2 * weight.info->shape[1];
  m.reciprocal = packed;
  if (m.block_scale == nullptr || m.block_scale->info->shape.size() != 2) return std::nullopt;
  const TensorInfo& scale = *m.block_scale->info;
  const auto fits = [&](std::int64_t block) {
    return scale.shape == std::vector<std::int64_t>{m.rows, m.cols / block} && m.cols % block == 0;
  };
  if (m.tensor_scale != nullptr && scale.dtype == DType::kE4M3 && fits(16)) {
    m.encoding = Encoding::kNvfp4;
    return m;
  }
  if (packed && m.tensor_scale == nullptr && scale.dtype == DType::kU8 && fits(32)) {
    m.encoding = Encoding::kMxfp4;
    return m;
  }
  return std::nullopt;
}

// What the source's configs say where no input scale does.
bool says_dynamic(const Checkpoint& checkpoint) {
  const json& config = checkpoint.config();
  if (!config.is_object()) return false;
  const json groups = config.value(json::json_pointer("/quantization_config/config_groups"), json());
  if (!groups.is_object()) return false;
  for (const json& group : groups) {
    if (group.is_object() && group.contains("input_activations") && group["input_activations"].is_object() &&
        group["input_activations"].value("dynamic", json()) == true &&
        group["input_activations"].value("num_bits", json()) == 4) {
      return true;
    }
  }
  return false;
}

// Tensors of all experts are split into linears of one each, beside which no reader takes one of all experts.
void check_none_stays_fused(const MoeLayerInfo& layer, Family to) {
  const ExpertMatrix *fp4 = nullptr, *other = nullptr;
  for (const auto& m : layer.experts.front()) {
    if (m && m->fused_experts) (is_fp4(*m, to) ? fp4 : other) = &*m;
  }
  if (fp4 == nullptr || other == nullptr) return;
  fail(ErrorCode::kUnsupported,
       "{} is {}, while {} is FP4: tensors of all experts of a layer are converted together or not at all",
       other->weight->info->name, to_string(other->encoding), fp4->weight->info->name);
}

void add_layer(RewritePlan& plan, const MoeLayerInfo& layer, const ConvertOptions& options,
               InputScaleCount& inputs) {
  check_none_stays_fused(layer, options.to);
  std::int64_t unequal = 0;
  for (std::int64_t e = 0; e < layer.num_experts; ++e) {
    const auto& matrices = layer.experts[static_cast<std::size_t>(e)];
    for (const Projection p : kProjections) {
      const auto& m = matrices[static_cast<std::size_t>(p)];
      if (m && is_fp4(*m, options.to)) plan.add(layer, e, p, options.gate_up_scale, inputs.read(*m));
    }
    const auto& [gate, up, down] = matrices;
    if (gate && up && gate->tensor_scale != nullptr && up->tensor_scale != nullptr &&
        gate->tensor_scale != up->tensor_scale) {
      unequal += read_f32(*gate->tensor_scale) != read_f32(*up->tensor_scale);
    }
  }
  for (const Projection p : kProjections) {
    const auto& m = layer.shared[static_cast<std::size_t>(p)];
    if (m && is_fp4(*m, options.to)) plan.add_shared(layer, p, options.gate_up_scale, inputs.read(*m));
  }
  if (unequal > 0) {
    plan.note(
        fmt::format("layer {}: {} of {} experts have unequal tensor scales for gate and up, which are "
                    "kept; some readers use one for both",
                    layer.layer, unequal, layer.num_experts));
  }
}

ActivationScales activations_of(const Checkpoint& checkpoint, const InputScaleCount& inputs) {
  if (inputs.with > 0 && inputs.without > 0) {
    fail(ErrorCode::kInvalidFile, "{} has no input scale, but {} others have", inputs.without_name,
         inputs.with);
  }
  if (inputs.with > 0) return ActivationScales::kStatic;
  return says_dynamic(checkpoint) ? ActivationScales::kDynamic : ActivationScales::kNone;
}

}  // namespace

RewriteReport convert_checkpoint(const std::filesystem::path& source,
                                 const std::filesystem::path& destination, const ConvertOptions& options,
                                 const ProgressFn& progress) {
  if (options.to != Family::kModelOpt && options.to != Family::kCompressedTensors) {
    fail(ErrorCode::kInvalidArgument, "NVFP4 is written as modelopt or compressed-tensors, not as {}",
         to_string(options.to));
  }
  const ModelIndex model = index_model(Checkpoint::open(source), {options.fused_layout});
  RewritePlan plan(model, {options.to, false});
  InputScaleCount inputs;
  for (const MoeLayerInfo& layer : model.layers) {
    // DeepSeek-V4's own NVFP4 releases keep the prediction layers in MXFP4.
    if (!(layer.mtp && layer.family == Family::kDeepSeekV4)) add_layer(plan, layer, options, inputs);
  }
  for (const TensorRef* tensor : model.others) {
    if (tensor->info->name.ends_with(".pre_quant_scale")) {
      fail(ErrorCode::kUnsupported,
           "{}: activations that are scaled before they are quantised cannot be converted",
           tensor->info->name);
    }
    if (plan.consumes(*tensor)) continue;  // a shared expert's
    std::string module;
    const auto linear = fp4_linear(*model.checkpoint, *tensor, module);
    if (linear && is_fp4(*linear, options.to)) plan.add_other(*linear, module, inputs.read(*linear));
  }
  if (plan.linears().empty()) {
    fail(
        ErrorCode::kInvalidArgument,
        "{} holds no NVFP4 of another family than {} and no MXFP4; unquantised experts are quantised instead",
        source.string(), to_string(options.to));
  }
  const nlohmann::json recipe = {{"verb", "convert"},
                                 {"to", to_string(options.to)},
                                 {"gate_up_scale", to_string(options.gate_up_scale)},
                                 {"fused_layout", options.fused_layout}};
  return rewrite_checkpoint(plan, activations_of(*model.checkpoint, inputs), destination, options.overwrite,
                            recipe, progress);
}

}  // namespace megamoe
