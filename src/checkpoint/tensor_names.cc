// tensor_names.cc: the tables of names.
#include "checkpoint/tensor_names.h"

#include <algorithm>
#include <charconv>

namespace megamoe {
namespace {

struct PartRow {
  std::string_view name;
  TensorPart part;
};
constexpr std::array<PartRow, 14> kParts = {{
    {"", TensorPart::kWeight},
    {"weight", TensorPart::kWeight},
    {"weight_packed", TensorPart::kPacked},
    {"blocks", TensorPart::kBlocks},
    {"weight_scale", TensorPart::kWeightScale},
    {"scale", TensorPart::kScale},
    {"scales", TensorPart::kScales},
    {"weight_scale_inv", TensorPart::kScaleInv},
    {"scale_inv", TensorPart::kScaleInv},
    {"weight_scale_2", TensorPart::kTensorScale},
    {"weight_global_scale", TensorPart::kGlobalScale},
    {"input_scale", TensorPart::kInputScale},
    {"input_global_scale", TensorPart::kInputGlobalScale},
    {"bias", TensorPart::kBias},
}};

// Parts of schemes that would change the result if they were left out.
constexpr std::array<std::string_view, 9> kUnsupportedParts = {
    "pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b", "weight_zero_point", "input_zero_point",
    "weight_g_idx",    "qweight",         "qzeros",          "weight_shape"};

struct ProjectionRow {
  std::string_view name;
  NamedProjection projection;
};
constexpr std::array<ProjectionRow, 7> kProjectionNames = {{
    {"gate_up_proj", NamedProjection::kGateUp},
    {"gate_proj", NamedProjection::kGate},
    {"up_proj", NamedProjection::kUp},
    {"down_proj", NamedProjection::kDown},
    {"w1", NamedProjection::kGate},
    {"w3", NamedProjection::kUp},
    {"w2", NamedProjection::kDown},
}};

// Sets projection, part and module from `rest`, the end of `name`: a projection and its part. Parts follow a
// dot, or an underscore where one tensor holds all experts.
void parse_projection(std::string_view name, std::string_view rest, TensorName& out) {
  const bool all = out.role == TensorRole::kAllExperts;
  const TensorRole role = out.role;
  out.role = TensorRole::kUnknown;
  for (const ProjectionRow& row : kProjectionNames) {
    if (!rest.starts_with(row.name)) continue;
    std::string_view part = rest.substr(row.name.size());
    const bool dot = part.starts_with('.');
    if (!part.empty() && !dot && !(all && part.starts_with('_'))) continue;
    if (part.empty() && !all) continue;
    if (row.projection == NamedProjection::kGateUp && !all) continue;
    out.module = name.substr(0, name.size() - part.size());
    out.projection = row.projection;
    if (!part.empty()) part.remove_prefix(1);
    for (const PartRow& candidate : kParts) {
      if (candidate.name != part) continue;
      out.part = candidate.part;
      out.role = role;
      return;
    }
    for (std::string_view unsupported : kUnsupportedParts) {
      if (unsupported == part) out.role = TensorRole::kUnsupported;
    }
    return;
  }
}

// Where `component` stands between dots (or at an end) of `name`; npos if nowhere.
std::size_t find_component(std::string_view name, std::string_view component) {
  for (std::size_t at = name.find(component); at != name.npos; at = name.find(component, at + 1)) {
    const std::size_t end = at + component.size();
    if ((at == 0 || name[at - 1] == '.') && (end == name.size() || name[end] == '.')) return at;
  }
  return name.npos;
}

std::string_view before(std::string_view name, std::size_t at) {
  return name.substr(0, at == 0 ? 0 : at - 1);
}

// gpt-oss before Hugging Face: mlp1 is gate and up, mlp2 is down.
bool parse_original_gpt_oss(std::string_view name, TensorName& out) {
  struct Row {
    std::string_view name;
    NamedProjection projection;
    TensorPart part;
  };
  constexpr std::array<Row, 8> kRows = {{
      {"mlp1_weight.blocks", NamedProjection::kGateUp, TensorPart::kBlocks},
      {"mlp1_weight.scales", NamedProjection::kGateUp, TensorPart::kScales},
      {"mlp1_weight", NamedProjection::kGateUp, TensorPart::kWeight},
      {"mlp1_bias", NamedProjection::kGateUp, TensorPart::kBias},
      {"mlp2_weight.blocks", NamedProjection::kDown, TensorPart::kBlocks},
      {"mlp2_weight.scales", NamedProjection::kDown, TensorPart::kScales},
      {"mlp2_weight", NamedProjection::kDown, TensorPart::kWeight},
      {"mlp2_bias", NamedProjection::kDown, TensorPart::kBias},
  }};
  for (const Row& row : kRows) {
    if (!name.ends_with(row.name)) continue;
    const std::size_t at = name.size() - row.name.size();
    if (at != 0 && name[at - 1] != '.') continue;
    out.role = TensorRole::kAllExperts;
    out.prefix = before(name, at);
    out.module = name.substr(0, at + std::string_view("mlp1").size());
    out.projection = row.projection;
    out.part = row.part;
    return true;
  }
  return false;
}

}  // namespace

TensorName parse_tensor_name(std::string_view name) {
  TensorName out;
  if (parse_original_gpt_oss(name, out)) return out;
  constexpr std::string_view kExperts = "experts";
  if (const std::size_t at = find_component(name, kExperts); at != name.npos) {
    out.prefix = before(name, at);
    std::string_view rest = name.substr(at + kExperts.size());
    if (!rest.empty()) rest.remove_prefix(1);
    out.role = TensorRole::kAllExperts;
    if (!rest.empty() && rest.front() >= '0' && rest.front() <= '9') {
      const std::size_t dot = rest.find('.');
      const auto expert = parse_number(rest.substr(0, dot), kMaxExperts);
      out.role = expert && dot != rest.npos ? TensorRole::kExpert : TensorRole::kUnknown;
      if (out.role == TensorRole::kUnknown) return out;
      out.expert = *expert;
      rest.remove_prefix(dot + 1);
    }
    parse_projection(name, rest, out);
    return out;
  }
  for (std::string_view shared : {"shared_expert", "shared_experts"}) {
    const std::size_t at = find_component(name, shared);
    if (at == name.npos) continue;
    out.prefix = before(name, at);
    out.role = TensorRole::kSharedExpert;
    parse_projection(name, name.substr(std::min(name.size(), at + shared.size() + 1)), out);
    return out;
  }
  return out;
}

std::optional<std::int64_t> parse_number(std::string_view text, std::int64_t limit) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = error == std::errc() && end == text.data() + text.size();
  const bool canonical = text == "0" || (!text.empty() && text.front() >= '1' && text.front() <= '9');
  return whole && canonical && value < limit ? std::optional(value) : std::nullopt;
}

std::string join_names(std::string_view prefix, std::string_view name) {
  return std::string(prefix) + (prefix.empty() ? "" : ".") + std::string(name);
}

LayerNumber parse_layer_number(std::string_view prefix) {
  LayerNumber out;
  std::string_view previous;
  bool from_layers = false;
  for (std::size_t at = 0; at <= prefix.size();) {
    const std::size_t dot = std::min(prefix.find('.', at), prefix.size());
    const std::string_view component = prefix.substr(at, dot - at);
    at = dot + 1;
    out.mtp = out.mtp || component == "mtp";
    const bool layers = previous == "layers" || previous == "block";
    if (layers || (previous == "mtp" && !from_layers)) {
      if (const auto number = parse_number(component, kMaxLayers)) {
        out.number = static_cast<int>(*number);
        from_layers = layers;
      }
    }
    previous = component;
  }
  return out;
}

}  // namespace megamoe
