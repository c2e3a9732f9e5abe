// quant_config.cc: the quantisation configs of ModelOpt, compressed-tensors, gpt-oss and the FP8 families.
#include "checkpoint/quant_config.h"

#include <algorithm>
#include <cctype>

#include "base/check.h"
#include "checkpoint/json_fields.h"

namespace megamoe {
namespace {

std::string upper(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return out;
}

bool contains(std::string_view text, std::string_view part) { return text.find(part) != text.npos; }

// ModelOpt's quant_algo and compressed-tensors' format, in capitals.
QuantSchemes schemes_of(const std::string& name) {
  const std::string algorithm = upper(name);
  if (contains(algorithm, "NVFP4")) return kSchemeNvfp4;
  if (contains(algorithm, "MXFP4")) return kSchemeMxfp4;
  if (contains(algorithm, "MXFP8")) return kSchemeAny;
  if (algorithm.starts_with("FP8") || algorithm == "FLOAT-QUANTIZED") return kSchemeFp8;
  if (algorithm.empty() || algorithm == "NONE") return kSchemeDense;
  return kSchemeAny;
}

// A group of config_groups: its own format, or what its weights' numbers amount to.
QuantSchemes schemes_of_group(const JsonFields& group) {
  if (const auto format = group.text({"format", "quant_algo"})) {
    const QuantSchemes named = schemes_of(*format);
    if (named != kSchemeAny) return named;
  }
  const nlohmann::json* weights = group.object("weights");
  if (weights == nullptr) return kSchemeAny;
  const JsonFields fields(group.file(), {weights});
  const auto bits = fields.integer({"num_bits"}, 0);
  const auto type = fields.text({"type"});
  const auto size = fields.integer({"group_size"}, -1);
  if (type != "float") return kSchemeAny;
  if (bits == 4) return size == 32 ? kSchemeMxfp4 : size.value_or(16) == 16 ? kSchemeNvfp4 : kSchemeAny;
  if (bits == 8) return size == 32 ? kSchemeAny : kSchemeFp8;
  return kSchemeAny;
}

void read_excluded(const JsonFields& fields, QuantConfig& out) {
  for (const char* key : {"exclude_modules", "ignore", "modules_to_not_convert", "ignored_layers"}) {
    fields.for_each_text(key, [&](const std::string& pattern) { out.excluded.add(pattern); });
  }
}

// True if there were any.
bool read_groups(const JsonFields& fields, QuantConfig& out) {
  const nlohmann::json* groups = fields.object("config_groups");
  if (groups == nullptr) return false;
  bool activations = false;
  for (const auto& [name, value] : groups->items()) {
    if (!value.is_object()) fields.wrong("config_groups", "an object of objects", *groups);
    const JsonFields group(fields.file(), {&value});
    QuantGroup& entry = out.groups.emplace_back();
    entry.schemes = schemes_of_group(group);
    activations = activations || group.find("input_activations") != nullptr;
    bool any_target = false;
    group.for_each_text("targets", [&](const std::string& target) {
      any_target = true;
      if (target == "Linear") {
        entry.everything = true;
      } else if (!target.starts_with("re:") && !contains(target, ".") && !contains(target, "*") &&
                 !target.empty() && std::isupper(static_cast<unsigned char>(target.front()))) {
        entry.targets.set_opaque();  // a class of modules: names cannot tell
      } else {
        entry.targets.add(target);
      }
    });
    if (!any_target) entry.everything = true;
  }
  out.weight_only = !activations && !out.groups.empty();
  return !out.groups.empty();
}

// ModelOpt's list of modules with their algorithms, as one group for each algorithm.
bool read_quantized_layers(const JsonFields& fields, QuantConfig& out) {
  const nlohmann::json* layers = fields.object("quantized_layers");
  if (layers == nullptr) return false;
  std::vector<std::pair<QuantSchemes, std::size_t>> groups;
  for (const auto& [module, value] : layers->items()) {
    if (!value.is_object()) fields.wrong("quantized_layers", "an object of objects", *layers);
    const JsonFields layer(fields.file(), {&value});
    const QuantSchemes schemes = schemes_of(layer.text({"quant_algo"}).value_or("?"));
    auto it = std::find_if(groups.begin(), groups.end(), [&](auto& g) { return g.first == schemes; });
    if (it == groups.end()) {
      groups.emplace_back(schemes, out.groups.size());
      it = groups.end() - 1;
      out.groups.emplace_back().schemes = schemes;
    }
    out.groups[it->second].targets.add(module);
  }
  return true;
}

void add_group_of_everything(QuantConfig& out, QuantSchemes schemes) {
  QuantGroup& group = out.groups.emplace_back();
  group.schemes = schemes;
  group.everything = true;
}

void read_modelopt(const JsonFields& fields, QuantConfig& out) {
  const std::string algorithm = fields.text({"quant_algo"}).value_or("");
  out.label = algorithm;
  const std::string name = upper(algorithm);
  out.weight_only = name.starts_with("W4A16");
  out.fp8_input_scales = name == "W4A8_NVFP4_FP8";
  read_excluded(fields, out);
  if (name == "MIXED_PRECISION") {
    // Where modules are listed, the list is complete; but of one that names nothing beside NVFP4 the rest of
    // the mixture stands in another config. Groups say less.
    if (read_quantized_layers(fields, out)) {
      if (out.groups.size() == 1 && out.groups.front().schemes == kSchemeNvfp4)
        out.otherwise = kSchemeDense | kSchemeFp8 | kSchemeMxfp4;
    } else if (!read_groups(fields, out)) {
      add_group_of_everything(out, kSchemeAny);
    }
    out.weight_only = false;
  } else {
    add_group_of_everything(out, schemes_of(algorithm));
  }
}

void read_fp8(const JsonFields& fields, std::string_view model_type, const JsonFields& top,
              QuantConfig& out) {
  out.label = "fp8";
  if (const nlohmann::json* block = fields.find("weight_block_size")) {
    const auto whole = [](const nlohmann::json& v) { return v.is_number_integer(); };
    if (!block->is_array() || block->size() != 2 || !std::all_of(block->begin(), block->end(), whole)) {
      fields.wrong("weight_block_size", "a list of two whole numbers", *block);
    }
    out.block_known = true;
    out.block_rows = (*block)[0].get<std::int64_t>();
    out.block_cols = (*block)[1].get<std::int64_t>();
  }
  QuantSchemes experts = kSchemeFp8;
  if (model_type.starts_with("deepseek_v4")) {
    // Its experts are MXFP4 unless told otherwise; the shared ones are FP8.
    const std::string expert_dtype = top.text({"expert_dtype"}).value_or("fp4");
    out.label = "fp8 with " + expert_dtype + " experts";
    if (expert_dtype == "fp4") experts |= kSchemeMxfp4;
  }
  read_excluded(fields, out);
  if (fields.find("quantized_layers") != nullptr) {
    // Some modules made NVFP4 afterwards; the excluded ones stay as they were.
    out.label = "fp8 with " + fields.text({"quant_algo"}).value_or("listed modules");
    read_quantized_layers(fields, out);
    out.otherwise = experts | kSchemeDense;
  } else {
    add_group_of_everything(out, experts);
  }
}

}  // namespace

std::string to_string_schemes(QuantSchemes schemes) {
  std::string out;
  const auto add = [&](QuantSchemes bit, const char* name) {
    if ((schemes & bit) == 0) return;
    if (!out.empty()) out += " or ";
    out += name;
  };
  add(kSchemeNvfp4, "NVFP4");
  add(kSchemeMxfp4, "MXFP4");
  add(kSchemeFp8, "FP8");
  add(kSchemeDense, "unquantised");
  return out;
}

bool QuantConfig::excludes(std::string_view module) const {
  return excluded.match(module) == NamePatterns::Match::kYes;
}

QuantSchemes QuantConfig::allowed(std::string_view module) const {
  if (!present) return kSchemeAny;
  switch (excluded.match(module)) {
    case NamePatterns::Match::kYes: return otherwise;
    case NamePatterns::Match::kUnknown: return kSchemeAny;
    case NamePatterns::Match::kNo: break;
  }
  QuantSchemes schemes = 0;
  for (const QuantGroup& group : groups) {
    const auto match = group.everything ? NamePatterns::Match::kYes : group.targets.match(module);
    if (match == NamePatterns::Match::kUnknown) return kSchemeAny;
    if (match == NamePatterns::Match::kYes) schemes |= group.schemes;
  }
  return schemes != 0 ? schemes : otherwise;
}

QuantConfig parse_quant_config(const nlohmann::json& config, const nlohmann::json& hf_quant_config,
                               std::string_view model_type) {
  QuantConfig out;
  if (!hf_quant_config.is_null()) {
    if (!hf_quant_config.is_object()) {
      fail(ErrorCode::kInvalidFile, "hf_quant_config.json: expected an object");
    }
    const JsonFields file("hf_quant_config.json", {&hf_quant_config});
    if (const nlohmann::json* quantization = file.object("quantization")) {
      out.present = true;
      out.source = file.file();
      read_modelopt(JsonFields(file.file(), {quantization}), out);
      return out;
    }
  }
  const JsonFields top("config.json", {&config});
  const nlohmann::json* found = top.object("quantization_config");
  const nlohmann::json* text = top.object("text_config");
  const JsonFields both("config.json", {&config, text});
  if (found == nullptr) found = both.object("quantization_config");
  if (found == nullptr) return out;
  const JsonFields fields("config.json", {found});
  out.present = true;
  out.source = fields.file();
  const std::string method = fields.text({"quant_method"}).value_or("");
  if (method.starts_with("modelopt") || (method.empty() && fields.find("quant_algo") != nullptr)) {
    read_modelopt(fields, out);
  } else if (method == "compressed-tensors") {
    out.label = fields.text({"format"}).value_or(method);
    read_excluded(fields, out);
    if (!read_groups(fields, out)) add_group_of_everything(out, schemes_of(out.label));
    for (QuantGroup& group : out.groups) {
      if (group.schemes == kSchemeAny && out.label != method) group.schemes = schemes_of(out.label);
    }
  } else if (method == "mxfp4") {
    out.label = "mxfp4";
    read_excluded(fields, out);
    add_group_of_everything(out, kSchemeMxfp4);
  } else if (method == "fp8") {
    read_fp8(fields, model_type, both, out);
  } else {
    out.label = method;
    add_group_of_everything(out, kSchemeAny);
  }
  return out;
}

}  // namespace megamoe
