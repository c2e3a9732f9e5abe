// rewrite_plan.cc: which matrices become NVFP4 under which names, and what the configs say then.
#include <algorithm>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "checkpoint/tensor_names.h"
#include "engine/rewrite.h"
#include "numerics/nvfp4.h"

namespace megamoe {
namespace {

using nlohmann::json;

bool ends_with_cut(std::string& name, std::string_view suffix) {
  if (!name.ends_with(suffix)) return false;
  name.resize(name.size() - suffix.size());
  return true;
}

// "model.layers.0.mlp.experts.3.gate_proj" of its weight tensor, or "" for a tensor named otherwise.
std::string module_of(const TensorRef& weight) {
  std::string name = weight.info->name;
  if (ends_with_cut(name, ".weight_packed") || ends_with_cut(name, ".weight")) return name;
  return "";
}

bool shares_tensor(const ExpertMatrix& m) { return m.fused_experts || m.stored_rows > m.rows; }

std::string_view linear_name(Projection projection) {
  switch (projection) {
    case Projection::kGate: return "gate_proj";
    case Projection::kUp: return "up_proj";
    case Projection::kDown: return "down_proj";
  }
  return "";
}

const std::optional<ExpertMatrix>& at(const std::array<std::optional<ExpertMatrix>, 3>& matrices,
                                      Projection p) {
  return matrices[static_cast<std::size_t>(p)];
}

const ExpertMatrix* scale_partner(const std::array<std::optional<ExpertMatrix>, 3>& matrices, Projection p,
                                  GateUpScale gate_up) {
  if (p == Projection::kDown || gate_up == GateUpScale::kSeparate) return nullptr;
  const auto& partner = at(matrices, p == Projection::kGate ? Projection::kUp : Projection::kGate);
  return partner ? &*partner : nullptr;
}

bool is_nvfp4_of(const ExpertMatrix& m, Family family) {
  return m.encoding == Encoding::kNvfp4 && m.reciprocal == (family == Family::kCompressedTensors);
}

// The names of what a config has to list.
struct Leftovers {
  std::set<std::string> plain;      // not quantised
  std::set<std::string> quantized;  // quantised in another way
  bool only_fp8 = true;             // which is FP8
};

// The experts' matrices that stay: a whole layer of them under one name.
void collect_expert_leftovers(const RewritePlan& plan, const MoeLayerInfo& layer, Leftovers& left) {
  const std::string all = join_names(layer.prefix, "experts*");
  bool any_new = false;
  std::set<std::string> plain;
  for (const auto& matrices : layer.experts) {
    for (const auto& m : matrices) {
      if (!m) continue;
      if (plan.consumes(*m->weight) || is_nvfp4_of(*m, plan.format().family)) {
        any_new = true;
      } else if (m->encoding == Encoding::kDense) {
        plain.insert(shares_tensor(*m) ? all : module_of(*m->weight));
      } else {
        left.quantized.insert(all);
        left.only_fp8 = left.only_fp8 && m->weight->info->dtype == DType::kE4M3;
      }
    }
  }
  if (!plain.empty() && !any_new) plain = {all};
  left.plain.merge(plain);
}

void collect_other_leftover(const RewritePlan& plan, const TensorRef& tensor, Leftovers& left) {
  const std::string module = module_of(tensor);
  if (module.empty() || plan.consumes(tensor) || tensor.info->shape.size() < 2) return;
  if (is_float(tensor.info->dtype)) {
    const std::string_view last = std::string_view(module).substr(module.rfind('.') + 1);
    if (last.find("embed") == std::string_view::npos) left.plain.insert(module);
    return;
  }
  const char* scale = plan.format().family == Family::kModelOpt ? ".weight_scale_2" : ".weight_global_scale";
  const bool same_family =
      tensor.info->dtype == DType::kU8 && plan.model().checkpoint->find(module + scale) != nullptr;
  if (same_family) return;
  left.quantized.insert(module);
  left.only_fp8 = left.only_fp8 && tensor.info->dtype == DType::kE4M3;
}

bool has_fp8_kv_cache(const Checkpoint& checkpoint) {
  const json& config = checkpoint.config();
  if (config.is_object() && config.contains("quantization_config")) {
    const json& quantization = config["quantization_config"];
    if (quantization.is_object() && quantization.contains("kv_cache_scheme")) {
      const json& scheme = quantization["kv_cache_scheme"];
      if (scheme.is_object() && scheme.value("num_bits", json()) == 8) return true;
    }
  }
  const json& hf = checkpoint.hf_quant_config();
  return hf.is_object() && hf.contains("quantization") && hf["quantization"].is_object() &&
         hf["quantization"].value("kv_cache_quant_algo", json()) == "FP8";
}

}  // namespace

std::string_view to_string(GateUpScale scale) {
  return scale == GateUpScale::kShared ? "shared" : "separate";
}

void RewritePlan::add(const MoeLayerInfo& layer, std::int64_t expert, Projection projection,
                      GateUpScale gate_up, std::optional<float> input_scale) {
  const auto& matrices = layer.experts[static_cast<std::size_t>(expert)];
  const ExpertMatrix& m = *at(matrices, projection);
  LinearOutput linear{&m, scale_partner(matrices, projection, gate_up), "", input_scale, false};
  if (!shares_tensor(m)) linear.module = module_of(*m.weight);
  if (linear.module.empty()) {
    linear.module = join_names(layer.prefix, fmt::format("experts.{}.{}", expert, linear_name(projection)));
    linear.writes_bias = m.bias != nullptr;
  }
  add_linear(std::move(linear));
}

void RewritePlan::add_shared(const MoeLayerInfo& layer, Projection projection, GateUpScale gate_up,
                             std::optional<float> input_scale) {
  const ExpertMatrix& m = *at(layer.shared, projection);
  const std::string module = module_of(*m.weight);
  if (module.empty() || shares_tensor(m)) {
    fail(ErrorCode::kUnsupported, "{}: a shared expert in a fused tensor cannot be rewritten",
         m.weight->info->name);
  }
  add_linear({&m, scale_partner(layer.shared, projection, gate_up), module, input_scale, false});
}

void RewritePlan::add_other(const ExpertMatrix& matrix, const std::string& module,
                            std::optional<float> input_scale) {
  add_linear({&other_matrices_.emplace_back(matrix), nullptr, module, input_scale, false});
}

void RewritePlan::add_linear(LinearOutput linear) {
  const ExpertMatrix& m = *linear.matrix;
  if (m.cols % kNvfp4Block != 0) {
    fail(ErrorCode::kUnsupported, "{}: NVFP4 needs a multiple of {} columns, got {}", m.weight->info->name,
         kNvfp4Block, m.cols);
  }
  for (const TensorRef* tensor :
       {m.weight, m.block_scale, m.tensor_scale, m.input_scale, m.unused_input_scale}) {
    if (tensor != nullptr) consumed_.insert(tensor->info->name);
  }
  if (linear.writes_bias) consumed_.insert(m.bias->info->name);
  linears_.push_back(std::move(linear));
}

QuantDescription RewritePlan::describe(ActivationScales activations) const {
  Leftovers left;
  for (const MoeLayerInfo& layer : model_->layers) {
    collect_expert_leftovers(*this, layer, left);
    for (const auto& m : layer.shared) {
      if (m) collect_other_leftover(*this, *m->weight, left);
    }
  }
  for (const TensorRef* tensor : model_->others) collect_other_leftover(*this, *tensor, left);

  QuantDescription d;
  d.family = format_.family;
  d.activations = activations;
  d.fp8_kv_cache = has_fp8_kv_cache(*model_->checkpoint);
  if (!left.quantized.empty()) {
    const json& config = model_->checkpoint->config();
    json other = config.is_object() ? config.value("quantization_config", json()) : json();
    if (other.is_null() && left.only_fp8) other = {{"quant_method", "fp8"}};
    if (format_.family != Family::kModelOpt || !other.is_object() ||
        other.value("quant_method", json()) != "fp8") {
      fail(
          ErrorCode::kUnsupported,
          "{} tensors, {} among them, keep another quantisation, which a {} config cannot say beside NVFP4{}",
          left.quantized.size(), *left.quantized.begin(), to_string(format_.family),
          format_.family == Family::kModelOpt ? "" : "; modelopt can for FP8 sources");
    }
    d.other = std::move(other);
    std::set<std::string> modules;
    for (const MoeLayerInfo& layer : model_->layers) {
      const auto& down = layer.experts.empty() ? std::nullopt : at(layer.experts.front(), Projection::kDown);
      if (down && consumes(*down->weight)) modules.insert(join_names(layer.prefix, "experts"));
    }
    for (const LinearOutput& linear : linears_) {
      if (parse_tensor_name(linear.module + ".weight").role != TensorRole::kExpert)
        modules.insert(linear.module);
    }
    d.quantized.assign(modules.begin(), modules.end());
  }
  left.plain.merge(left.quantized);
  d.ignored.assign(left.plain.begin(), left.plain.end());
  return d;
}

}  // namespace megamoe
