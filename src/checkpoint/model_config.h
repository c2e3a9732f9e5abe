// model_config.h: what config.json and hf_quant_config.json say of a model's expert layers.
//
// Pure: JSON in, a struct out, and for any JSON at all either that or one Error. Nothing here looks at
// tensors; the index holds the two against each other.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/name_patterns.h"

namespace megamoe {

// Encodings that a config may promise for a module, as a set.
using QuantSchemes = unsigned;
inline constexpr QuantSchemes kSchemeDense = 1;
inline constexpr QuantSchemes kSchemeNvfp4 = 2;
inline constexpr QuantSchemes kSchemeMxfp4 = 4;
inline constexpr QuantSchemes kSchemeFp8 = 8;
inline constexpr QuantSchemes kSchemeAny = 15;        // also what an algorithm unknown to us counts as
std::string to_string_schemes(QuantSchemes schemes);  // "NVFP4 or FP8"

struct QuantGroup {
  QuantSchemes schemes = 0;
  bool everything = false;  // all linear layers, else `targets`
  NamePatterns targets;
};

struct QuantConfig {
  bool present = false;
  std::string source;  // the file that says it
  std::string label;   // its word for the whole: "NVFP4", "fp8", "nvfp4-pack-quantized"
  std::vector<QuantGroup> groups;
  NamePatterns excluded;
  QuantSchemes otherwise = kSchemeDense;  // what excluded modules and those of no group are
  bool weight_only = false;               // NVFP4 with activations left alone
  bool fp8_input_scales = false;          // W4A8_NVFP4_FP8: input scales are for FP8 activations
  bool block_known = false;               // weight_block_size, FP8 only
  std::int64_t block_rows = 0;
  std::int64_t block_cols = 0;

  // What the module may be. Groups that overlap add up: the tensors decide among them.
  QuantSchemes allowed(std::string_view module) const;
  bool excludes(std::string_view module) const;
};

struct ModelConfig {
  bool present = false;  // there is a config.json
  std::string model_type;
  // Sizes are 0 where the config is silent.
  std::int64_t hidden = 0;         // the experts' input
  std::int64_t router_hidden = 0;  // the router's input: another where experts work in a latent space
  std::int64_t intermediate = 0;
  std::int64_t num_experts = 0;
  std::int64_t num_layers = 0;
  std::int64_t num_shared_experts = 0;
  std::int64_t num_hash_layers = 0;  // DeepSeek-V4: the first layers, routed by token id
  int top_k = 0;

  std::string scoring;        // "softmax", "softmax-over-chosen", "sigmoid", "sqrtsoftplus" or another word
  bool scoring_known = true;  // false: neither a key nor the model type tells; softmax is assumed
  bool renormalize = true;
  bool weighs_input = false;  // Llama 4 multiplies the experts' input by the weight
  float scaling_factor = 1.0f;
  int num_groups = 1;
  int topk_groups = 1;
  std::string topk_method;

  std::string activation;       // hidden_act: "silu", "relu2", ...; "" where silent
  float swiglu_limit = 0.0f;    // 0: none
  float swiglu_alpha = 1.702f;  // gpt-oss
  bool gpt_oss = false;         // by model type
  bool per_layer_limits = false;

  QuantConfig quantization;
};

// `config` and `hf_quant_config` may be null (no such file). Throws kInvalidFile for a value of the wrong
// kind or beyond its range.
ModelConfig parse_model_config(const nlohmann::json& config, const nlohmann::json& hf_quant_config);

}  // namespace megamoe
