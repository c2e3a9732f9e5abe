#include "engine/input_scales.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/file.h"
#include "checkpoint/json.h"
#include "checkpoint/tensor_names.h"

namespace megamoe {
namespace {

using nlohmann::json;

constexpr const char* kFormat = "megamoe-input-scales";
constexpr int kVersion = 1;

json to_json(const InputScale& scale) {
  // A float widened to double prints with enough digits to come back as the same float.
  return {{"amax", scale.amax}, {"scale", scale.scale}};
}

float number_at(const json& object, const char* key, const std::string& where) {
  if (!object.is_object() || !object.contains(key) || !object[key].is_number()) {
    fail(ErrorCode::kInvalidFile, "{}: expected a number \"{}\"", where, key);
  }
  return object[key].get<float>();
}

InputScale parse_scale(const json& expert, const char* key, const std::string& where) {
  const std::string here = fmt::format("{}, \"{}\"", where, key);
  if (!expert.contains(key)) fail(ErrorCode::kInvalidFile, "{} is missing", here);
  const InputScale scale{number_at(expert[key], "amax", here), number_at(expert[key], "scale", here)};
  if (!std::isfinite(scale.scale) || scale.scale <= 0.0f) {
    fail(ErrorCode::kInvalidFile, "{}: the scale must be finite and greater than 0, got {}", here,
         scale.scale);
  }
  if (!std::isfinite(scale.amax) || scale.amax < 0.0f) {
    fail(ErrorCode::kInvalidFile, "{}: amax must be finite and not negative, got {}", here, scale.amax);
  }
  return scale;
}

ExpertInputScales parse_expert(const json& expert, const std::string& where) {
  if (!expert.is_object() || !expert.contains("rows") || !expert["rows"].is_number_unsigned()) {
    fail(ErrorCode::kInvalidFile, "{}: expected a count \"rows\"", where);
  }
  return {expert["rows"].get<std::int64_t>(), parse_scale(expert, "x", where),
          parse_scale(expert, "h", where)};
}

int parse_layer(const std::string& key, const std::string& name) {
  const auto layer = parse_number(key);
  if (!layer) fail(ErrorCode::kInvalidFile, "{}: expected a layer's number, got \"{}\"", name, key);
  return static_cast<int>(*layer);
}

}  // namespace

const ExpertInputScales& InputScales::at(int layer, std::int64_t expert) const {
  const auto found = layers.find(layer);
  if (found == layers.end()) {
    fail(ErrorCode::kInvalidArgument, "the input scales have nothing for layer {}", layer);
  }
  if (expert < 0 || expert >= static_cast<std::int64_t>(found->second.size())) {
    fail(ErrorCode::kInvalidArgument, "the input scales of layer {} are for {} experts, expert {} has none",
         layer, found->second.size(), expert);
  }
  return found->second[static_cast<std::size_t>(expert)];
}

std::string format_input_scales(const InputScales& scales) {
  json layers = json::object();
  for (const auto& [layer, experts] : scales.layers) {
    json list = json::array();
    for (const ExpertInputScales& e : experts) {
      list.push_back({{"rows", e.rows}, {"x", to_json(e.x)}, {"h", to_json(e.h)}});
    }
    layers[std::to_string(layer)] = std::move(list);
  }
  return json{{"format", kFormat}, {"version", kVersion}, {"layers", std::move(layers)}}.dump(1) + "\n";
}

InputScales parse_input_scales(const std::string& text, const std::string& name) {
  const json root = parse_json(text, name);
  if (!root.is_object() || root.value("format", json()) != kFormat ||
      root.value("version", json()) != kVersion) {
    fail(ErrorCode::kInvalidFile,
         "{} is not a file of input scales: expected \"format\": \"{}\", \"version\": {}", name, kFormat,
         kVersion);
  }
  if (!root.contains("layers") || !root["layers"].is_object()) {
    fail(ErrorCode::kInvalidFile, "{}: expected an object \"layers\"", name);
  }
  InputScales scales;
  for (const auto& [key, experts] : root["layers"].items()) {
    if (!experts.is_array())
      fail(ErrorCode::kInvalidFile, "{}: layer {} must be a list of experts", name, key);
    auto& list = scales.layers[parse_layer(key, name)];
    for (std::size_t e = 0; e < experts.size(); ++e) {
      list.push_back(parse_expert(experts[e], fmt::format("{}: layer {}, expert {}", name, key, e)));
    }
  }
  return scales;
}

InputScales read_input_scales(const std::filesystem::path& path) {
  return parse_input_scales(read_text_file(path), path.string());
}

void write_input_scales(const std::filesystem::path& path, const InputScales& scales) {
  write_file_atomically(path, format_input_scales(scales));
}

}  // namespace megamoe
