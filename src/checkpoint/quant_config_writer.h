// quant_config_writer.h: what config.json and hf_quant_config.json say about a checkpoint made NVFP4.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/model_index.h"

namespace megamoe {

// What a quantised checkpoint says about its activations.
enum class ActivationScales {
  kNone,     // weight-only: W4A16
  kStatic,   // W4A4, every quantised linear has its input scale
  kDynamic,  // W4A4, scales are found at run time
};
std::string_view to_string(ActivationScales activations);  // "none", "static", "dynamic"

struct QuantDescription {
  Family family = Family::kModelOpt;  // kModelOpt or kCompressedTensors
  ActivationScales activations = ActivationScales::kNone;
  // Modules that are not quantised: names, or what they begin with followed by "*".
  std::vector<std::string> ignored;
  bool fp8_kv_cache = false;
  // Some linears keep another quantisation, which `other` (the source's quantization_config) describes. Then
  // `quantized` names the modules that are NVFP4. Only ModelOpt can say this.
  nlohmann::json other;
  std::vector<std::string> quantized;
};

// The value of "quantization_config" in config.json.
nlohmann::json quantization_config(const QuantDescription& description);
// The content of hf_quant_config.json (ModelOpt).
nlohmann::json hf_quant_config(const QuantDescription& description);

}  // namespace megamoe
