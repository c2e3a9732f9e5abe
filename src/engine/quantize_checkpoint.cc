#include "engine/quantize_checkpoint.h"

#include <algorithm>
#include <charconv>
#include <string_view>

#include "base/check.h"
#include "engine/input_scales.h"

namespace megamoe {
namespace {

void check_options(const QuantizeCheckpointOptions& o) {
  if (o.format != Family::kModelOpt && o.format != Family::kCompressedTensors) {
    fail(ErrorCode::kInvalidArgument, "NVFP4 is written as modelopt or compressed-tensors, not as {}",
         to_string(o.format));
  }
  const bool fixed = o.activations == ActivationScales::kStatic;
  if (fixed && o.scales.empty()) {
    fail(ErrorCode::kInvalidArgument, "static activations need a file of input scales");
  }
  if (!fixed && !o.scales.empty()) {
    fail(ErrorCode::kInvalidArgument,
         "a file of input scales is used with static activations only, not with {}",
         to_string(o.activations));
  }
  if (fixed && o.shared_experts) {
    fail(ErrorCode::kUnsupported,
         "shared experts have no input scales, so they cannot have static activations");
  }
}

std::vector<const MoeLayerInfo*> chosen_layers(const ModelIndex& model,
                                               const QuantizeCheckpointOptions& options) {
  std::vector<const MoeLayerInfo*> layers;
  if (options.layers) {
    for (const int layer : *options.layers) {
      if (std::count(options.layers->begin(), options.layers->end(), layer) > 1) {
        fail(ErrorCode::kInvalidArgument,
             "the layers to quantise must each be named once, got layer {} more often", layer);
      }
      layers.push_back(&find_layer(model, layer));
    }
  } else {
    for (const MoeLayerInfo& layer : model.layers) {
      if (!layer.mtp) layers.push_back(&layer);
    }
  }
  if (layers.empty()) {
    fail(ErrorCode::kInvalidArgument, "{}: no layer with experts to quantise",
         model.checkpoint->path().string());
  }
  return layers;
}

void check_not_nvfp4(const ExpertMatrix& m, const MoeLayerInfo& layer) {
  if (m.encoding == Encoding::kNvfp4) {
    fail(ErrorCode::kInvalidArgument,
         "layer {} is NVFP4 already ({}): convert it instead, or leave it out of the layers to quantise",
         layer.layer, m.weight->info->name);
  }
}

void add_layer(RewritePlan& plan, const MoeLayerInfo& layer, const QuantizeCheckpointOptions& options,
               const InputScales& scales) {
  if (options.activations == ActivationScales::kStatic) {
    const auto given = scales.layers.find(layer.layer);
    if (given != scales.layers.end() && static_cast<std::int64_t>(given->second.size()) > layer.num_experts) {
      fail(ErrorCode::kInvalidArgument, "{}: layer {} has scales for {} experts, the checkpoint has {}",
           options.scales.string(), layer.layer, given->second.size(), layer.num_experts);
    }
  }
  for (std::int64_t e = 0; e < layer.num_experts; ++e) {
    for (const Projection p : kProjections) {
      const auto& m = layer.experts[static_cast<std::size_t>(e)][static_cast<std::size_t>(p)];
      if (!m) continue;
      check_not_nvfp4(*m, layer);
      std::optional<float> input_scale;
      if (options.activations == ActivationScales::kStatic) {
        const ExpertInputScales& s = scales.at(layer.layer, e);
        input_scale = p == Projection::kDown ? s.h.scale : s.x.scale;
      }
      plan.add(layer, e, p, options.gate_up_scale, input_scale);
    }
  }
  if (!options.shared_experts) return;
  for (const Projection p : kProjections) {
    const auto& m = layer.shared[static_cast<std::size_t>(p)];
    if (!m) continue;
    check_not_nvfp4(*m, layer);
    plan.add_shared(layer, p, options.gate_up_scale, std::nullopt);
  }
}

nlohmann::json recipe_of(const QuantizeCheckpointOptions& o, const InputScales& scales) {
  nlohmann::json recipe = {{"verb", "quantize"},
                           {"format", to_string(o.format)},
                           {"activations", to_string(o.activations)},
                           {"scales", format_input_scales(scales)},
                           {"four_over_six", o.four_over_six},
                           {"shared_experts", o.shared_experts},
                           {"gate_up_scale", to_string(o.gate_up_scale)},
                           {"fused_layout", o.fused_layout}};
  if (o.layers) recipe["layers"] = *o.layers;
  return recipe;
}

}  // namespace

RewriteReport quantize_checkpoint(const std::filesystem::path& source,
                                  const std::filesystem::path& destination,
                                  const QuantizeCheckpointOptions& options, const ProgressFn& progress) {
  check_options(options);
  InputScales scales;
  if (options.activations == ActivationScales::kStatic) {
    scales = read_input_scales(options.scales);
    check_destination(destination, {options.scales});
  }
  const ModelIndex model = index_model(Checkpoint::open(source), {options.fused_layout});
  RewritePlan plan(model, {options.format, options.four_over_six});
  for (const MoeLayerInfo* layer : chosen_layers(model, options)) add_layer(plan, *layer, options, scales);
  return rewrite_checkpoint(plan, options.activations, destination, options.overwrite,
                            recipe_of(options, scales), progress);
}

std::vector<int> parse_layers(const std::string& text) {
  const auto bad = [&] {
    fail(ErrorCode::kInvalidArgument, "layers are given as numbers and ranges, for example 0,3-5, got '{}'",
         text);
  };
  const auto number = [&](std::string_view piece) {
    int value = -1;
    const auto [end, error] = std::from_chars(piece.data(), piece.data() + piece.size(), value);
    if (error != std::errc() || end != piece.data() + piece.size() || value < 0 || value > 1'000'000) bad();
    return value;
  };
  std::set<int> layers;
  for (std::string_view rest = text;;) {
    const std::size_t comma = rest.find(',');
    const std::string_view piece = rest.substr(0, comma);
    const std::size_t dash = piece.find('-');
    const int first = number(piece.substr(0, dash));
    const int last = dash == std::string_view::npos ? first : number(piece.substr(dash + 1));
    if (last < first) bad();
    for (int layer = first; layer <= last; ++layer) layers.insert(layer);
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
  }
  return {layers.begin(), layers.end()};
}

}  // namespace megamoe
