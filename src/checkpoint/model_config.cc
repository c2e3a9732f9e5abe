// model_config.cc: sizes, router and activation from config.json; the quantisation part is in
// quant_config.cc.
#include "checkpoint/model_config.h"

#include <array>

#include "base/check.h"
#include "checkpoint/json_fields.h"
#include "checkpoint/quant_config.h"
#include "checkpoint/tensor_names.h"

namespace megamoe {
namespace {

constexpr const char* kConfigFile = "config.json";

// What a model type implies where its config is silent. The first row whose name the type begins with holds.
struct ModelRule {
  std::string_view type;
  std::string_view scoring;
  bool renormalize;
};
constexpr std::array<ModelRule, 17> kModelRules = {{
    {"deepseek_v4", "sqrtsoftplus", true},
    {"deepseek_v3", "sigmoid", true},
    {"deepseek_v2", "softmax", false},
    {"kimi", "sigmoid", true},
    {"glm4_moe", "sigmoid", true},
    {"glm_moe", "sigmoid", true},
    {"minimax_m", "sigmoid", true},
    {"nemotron_h", "sigmoid", true},
    {"llama4", "sigmoid", false},
    {"gpt_oss", "softmax-over-chosen", true},
    {"mixtral", "softmax-over-chosen", true},
    {"qwen2_moe", "softmax", false},
    {"qwen3_moe", "softmax", false},
    {"qwen3_vl_moe", "softmax", true},
    {"qwen3_next", "softmax", true},
    {"qwen3_5", "softmax", true},
    {"olmoe", "softmax", false},
}};

const ModelRule* find_rule(std::string_view model_type) {
  for (const ModelRule& rule : kModelRules) {
    if (model_type.starts_with(rule.type)) return &rule;
  }
  return nullptr;
}

void read_sizes(const JsonFields& fields, ModelConfig& out) {
  const auto size = [&](std::initializer_list<const char*> keys) {
    return fields.integer(keys, 0).value_or(0);
  };
  out.router_hidden = size({"hidden_size", "n_embd", "dim"});
  const std::int64_t latent = size({"moe_latent_size"});
  out.hidden = latent != 0 ? latent : out.router_hidden;
  out.intermediate = size({"moe_intermediate_size", "moe_ffn_hidden_size"});
  out.num_experts = size({"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"});
  // Models whose layers are all expert layers size their experts by the general key.
  if (out.intermediate == 0 && out.num_experts != 0) out.intermediate = size({"intermediate_size"});
  // As far as layer numbers go in names: sums of the two fit.
  out.num_layers = fields.integer({"num_hidden_layers", "n_layers"}, 0, kMaxLayers).value_or(0);
  out.num_shared_experts = size({"n_shared_experts", "num_shared_experts"});
  out.num_hash_layers = size({"num_hash_layers", "n_hash_layers"});
  out.top_k = static_cast<int>(size({"num_experts_per_tok", "num_experts_per_token", "experts_per_token",
                                     "n_activated_experts", "moe_topk", "moe_top_k"}));
}

void read_router(const JsonFields& fields, ModelConfig& out) {
  const ModelRule* rule = find_rule(out.model_type);
  const auto scoring =
      fields.text({"scoring_func", "score_func", "score_function", "moe_router_activation_func"});
  const auto renormalize = fields.boolean("norm_topk_prob");
  out.scoring = scoring ? *scoring : rule != nullptr ? std::string(rule->scoring) : "softmax";
  out.scoring_known = scoring || renormalize || rule != nullptr;
  out.renormalize = renormalize.value_or(rule == nullptr || rule->renormalize);
  out.weighs_input = out.model_type.starts_with("llama4");
  out.scaling_factor = fields.number("routed_scaling_factor").value_or(1.0f);
  out.num_groups = static_cast<int>(fields.integer({"n_group"}, 0).value_or(1));
  out.topk_groups = static_cast<int>(fields.integer({"topk_group"}, 0).value_or(1));
  if (out.num_groups == 0) out.num_groups = out.topk_groups = 1;
  out.topk_method = fields.text({"topk_method"}).value_or("");
}

void read_activation(const JsonFields& fields, ModelConfig& out) {
  out.gpt_oss = out.model_type.starts_with("gpt_oss");
  // Nemotron's hidden_act is not its experts'.
  out.activation = fields.text({"mlp_hidden_act", "hidden_act", "hidden_activation"}).value_or("");
  float limit = 0.0f;
  if (out.gpt_oss) limit = 7.0f;
  if (out.model_type.starts_with("deepseek_v4")) limit = 10.0f;
  out.swiglu_limit = fields.number("swiglu_limit").value_or(limit);
  if (out.swiglu_limit < 0.0f) {
    fail(ErrorCode::kInvalidFile, "{}: \"swiglu_limit\" must not be negative, got {}", fields.file(),
         out.swiglu_limit);
  }
  out.swiglu_alpha = fields.number("swiglu_alpha").value_or(1.702f);
  out.per_layer_limits = fields.find("swiglu_limits") != nullptr;
}

}  // namespace

ModelConfig parse_model_config(const nlohmann::json& config, const nlohmann::json& hf_quant_config) {
  ModelConfig out;
  if (!config.is_null() && !config.is_object()) {
    fail(ErrorCode::kInvalidFile, "{}: expected an object", kConfigFile);
  }
  if (config.is_object()) {
    out.present = true;
    const JsonFields top(kConfigFile, {&config});
    const nlohmann::json* inner = nullptr;  // the language model of one that also sees or hears
    for (const char* key : {"text_config", "llm_config", "language_config"}) {
      if (inner == nullptr) inner = top.object(key);
    }
    const JsonFields fields(kConfigFile, {inner, &config});
    out.model_type = top.text({"model_type"}).value_or("");
    if (find_rule(out.model_type) == nullptr && inner != nullptr) {
      const auto inner_type = JsonFields(kConfigFile, {inner}).text({"model_type"});
      if (inner_type && (out.model_type.empty() || find_rule(*inner_type) != nullptr)) {
        out.model_type = *inner_type;
      }
    }
    // gpt-oss as first published has no model type.
    if (out.model_type.empty() && fields.find("experts_per_token") != nullptr &&
        fields.find("swiglu_limit") != nullptr) {
      out.model_type = "gpt_oss";
    }
    read_sizes(fields, out);
    read_router(fields, out);
    read_activation(fields, out);
  } else {
    out.scoring = "softmax";
    out.scoring_known = false;
  }
  out.quantization = parse_quant_config(config, hf_quant_config, out.model_type);
  return out;
}

}  // namespace megamoe
