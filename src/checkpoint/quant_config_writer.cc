#include "checkpoint/quant_config_writer.h"

#include "base/check.h"
#include "numerics/nvfp4.h"

namespace megamoe {
namespace {

using nlohmann::json;

// Readers of hf_quant_config.json look for this name before they believe the rest.
json producer() { return {{"name", "modelopt"}, {"version", "megamoe"}}; }

const char* modelopt_algorithm(const QuantDescription& d) {
  return d.activations == ActivationScales::kNone ? "W4A16_NVFP4" : "NVFP4";
}

json modelopt_group(const QuantDescription& d) {
  const json weights = {{"dynamic", false}, {"num_bits", 4}, {"type", "float"}, {"group_size", kNvfp4Block}};
  json group = {{"weights", weights}, {"targets", {"Linear"}}};
  if (d.activations != ActivationScales::kNone) {
    group["input_activations"] = weights;
    group["input_activations"]["dynamic"] = d.activations == ActivationScales::kDynamic;
  }
  return group;
}

json quantized_layers(const QuantDescription& d) {
  json layers = json::object();
  for (const std::string& module : d.quantized) {
    layers[module] = {{"quant_algo", modelopt_algorithm(d)}, {"group_size", kNvfp4Block}};
  }
  return layers;
}

json modelopt_config(const QuantDescription& d) {
  json config = {{"quant_method", "modelopt"}, {"quant_algo", modelopt_algorithm(d)}};
  if (!d.other.is_null()) {
    // The other linears stay under the method that describes them.
    config = d.other;
    config["quant_algo"] = "MIXED_PRECISION";
    config["moe_quant_algo"] = modelopt_algorithm(d);
    config["group_size"] = kNvfp4Block;
    config["quantized_layers"] = quantized_layers(d);
  }
  config["config_groups"] = {{"group_0", modelopt_group(d)}};
  config["ignore"] = d.ignored;
  config["producer"] = producer();
  if (d.fp8_kv_cache) config["kv_cache_scheme"] = {{"dynamic", false}, {"num_bits", 8}, {"type", "float"}};
  return config;
}

json compressed_tensors_arguments() {
  return {{"num_bits", 4},
          {"type", "float"},
          {"symmetric", true},
          {"strategy", "tensor_group"},
          {"group_size", kNvfp4Block},
          {"dynamic", false},
          {"scale_dtype", "torch.float8_e4m3fn"}};
}

// A plain name stays; "prefix*" becomes a regular expression.
std::string compressed_tensors_pattern(const std::string& module) {
  if (!module.ends_with('*')) return module;
  std::string pattern = "re:";
  for (const char c : std::string_view(module).substr(0, module.size() - 1)) {
    if (std::string_view(".+?()[]{}^$|\\").find(c) != std::string_view::npos) pattern += '\\';
    pattern += c;
  }
  return pattern + ".*";
}

json compressed_tensors_config(const QuantDescription& d) {
  json inputs;
  if (d.activations != ActivationScales::kNone) {
    inputs = compressed_tensors_arguments();
    // "local": block scales at run time under a tensor scale from the checkpoint.
    inputs["dynamic"] = d.activations == ActivationScales::kStatic ? json("local") : json(true);
  }
  constexpr const char* kFormat = "nvfp4-pack-quantized";
  json ignore = json::array();
  for (const std::string& module : d.ignored) ignore.push_back(compressed_tensors_pattern(module));
  json config = {{"quant_method", "compressed-tensors"},
                 {"format", kFormat},
                 {"quantization_status", "compressed"},
                 {"ignore", std::move(ignore)},
                 {"kv_cache_scheme", nullptr},
                 {"config_groups",
                  {{"group_0",
                    {{"targets", {"Linear"}},
                     {"weights", compressed_tensors_arguments()},
                     {"input_activations", std::move(inputs)},
                     {"output_activations", nullptr},
                     {"format", kFormat}}}}}};
  if (d.fp8_kv_cache) {
    config["kv_cache_scheme"] = {
        {"num_bits", 8}, {"type", "float"}, {"strategy", "tensor"}, {"dynamic", false}, {"symmetric", true}};
  }
  return config;
}

}  // namespace

std::string_view to_string(ActivationScales activations) {
  switch (activations) {
    case ActivationScales::kNone: return "none";
    case ActivationScales::kStatic: return "static";
    case ActivationScales::kDynamic: return "dynamic";
  }
  return "unknown";
}

json quantization_config(const QuantDescription& description) {
  MEGAMOE_CHECK(description.family == Family::kModelOpt || description.family == Family::kCompressedTensors);
  if (description.family == Family::kModelOpt) return modelopt_config(description);
  MEGAMOE_CHECK(description.other.is_null());
  return compressed_tensors_config(description);
}

json hf_quant_config(const QuantDescription& d) {
  json quantization = {{"kv_cache_quant_algo", d.fp8_kv_cache ? json("FP8") : json()}};
  if (d.other.is_null()) {
    quantization["quant_algo"] = modelopt_algorithm(d);
    quantization["group_size"] = kNvfp4Block;
    quantization["exclude_modules"] = d.ignored;
  } else {
    quantization["quant_algo"] = "MIXED_PRECISION";
    quantization["quantized_layers"] = quantized_layers(d);
  }
  return {{"producer", producer()}, {"quantization", std::move(quantization)}};
}

}  // namespace megamoe
