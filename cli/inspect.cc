// inspect.cc: `megamoe inspect`: what a checkpoint's experts are, and what is suspicious about them.
#include "engine/inspect.h"

#include <fmt/format.h>

#include <memory>

#include "cli/output.h"
#include "cli/verb.h"

namespace megamoe::cli {
namespace {

using nlohmann::json;

struct InspectArguments {
  std::string checkpoint, fused_layout;
  std::optional<int> layer;
  bool values = false;
  bool json = false;
};

json optional_number(const std::optional<double>& value) { return value ? json(*value) : json(); }

std::string optional_text(const std::optional<double>& value) {
  return value ? fmt::format("{:.4g}", *value) : "-";
}

json to_json(const MatrixInspection& matrix) {
  return {{"encoding", to_string(matrix.encoding)},
          {"dtype", to_string(matrix.dtype)},
          {"rows", matrix.rows},
          {"cols", matrix.cols},
          {"bytes", matrix.bytes},
          {"tensor_scale", optional_number(matrix.tensor_scale)},
          {"input_scale", optional_number(matrix.input_scale)},
          {"block_scales", matrix.scales},
          {"saturated_scales", matrix.saturated_scales},
          {"nan_scales", matrix.nan_scales},
          {"negative_scales", matrix.negative_scales},
          {"zero_scales", matrix.zero_scales},
          {"nonfinite_values", matrix.nonfinite_values},
          {"all_zero", matrix.all_zero}};
}

json to_json(const LayerInspection& layer, bool with_experts) {
  json out = {{"layer", layer.layer},
              {"mtp", layer.mtp},
              {"prefix", layer.prefix},
              {"family", to_string(layer.family)},
              {"encodings", layer.encodings},
              {"experts", layer.num_experts},
              {"hidden", layer.hidden},
              {"intermediate", layer.intermediate},
              {"shared_expert", layer.has_shared},
              {"router", layer.has_router},
              {"bytes", layer.bytes},
              {"bits_per_weight", layer.bits_per_weight()},
              {"matrices", layer.matrices},
              {"input_scales", layer.input_scales},
              {"min_tensor_scale", layer.min_tensor_scale},
              {"max_tensor_scale", layer.max_tensor_scale},
              {"unequal_gate_up", layer.unequal_gate_up},
              {"max_gate_up_ratio", layer.max_gate_up_ratio}};
  if (!with_experts) return out;
  out["expert_list"] = json::array();
  for (const ExpertInspection& expert : layer.experts) {
    json row = {{"expert", expert.expert < 0 ? json("shared") : json(expert.expert)}};
    for (std::size_t p = 0; p < 3; ++p) {
      if (expert.projections[p])
        row[std::string(to_string(kProjections[p]))] = to_json(*expert.projections[p]);
    }
    out["expert_list"].push_back(row);
  }
  return out;
}

json to_json(const Inspection& inspection, const InspectArguments& options) {
  json out = {{"checkpoint", options.checkpoint}, {"model_type", inspection.model_type},
              {"files", inspection.files},        {"tensors", inspection.tensors},
              {"bytes", inspection.bytes},        {"expert_bytes", inspection.expert_bytes},
              {"layers", json::array()},          {"findings", json::array()}};
  for (const LayerInspection& layer : inspection.layers) {
    out["layers"].push_back(to_json(layer, options.layer.has_value()));
  }
  for (const Finding& finding : inspection.findings) {
    out["findings"].push_back({{"severity", to_string(finding.severity)},
                               {"layer", finding.layer < 0 ? json() : json(finding.layer)},
                               {"text", finding.text}});
  }
  return out;
}

std::string input_scales_text(const LayerInspection& layer) {
  if (layer.input_scales == 0) return "none";
  if (layer.input_scales == layer.matrices) return "all";
  return fmt::format("{} of {}", layer.input_scales, layer.matrices);
}

std::string layers_text(const Inspection& inspection) {
  Table table({"layer", "family", "encoding", ">experts", ">hidden", ">inter", ">size", ">bits/weight",
               "input scales", "tensor scales"});
  for (const LayerInspection& layer : inspection.layers) {
    table.add({fmt::format("{}{}", layer.layer, layer.mtp ? " (mtp)" : ""),
               std::string(to_string(layer.family)), fmt::format("{}", fmt::join(layer.encodings, "+")),
               fmt::format("{}{}", layer.num_experts, layer.has_shared ? "+1" : ""),
               fmt::format("{}", layer.hidden), fmt::format("{}", layer.intermediate),
               human_bytes(layer.bytes), fmt::format("{:.2f}", layer.bits_per_weight()),
               input_scales_text(layer),
               layer.max_tensor_scale == 0
                   ? "-"
                   : fmt::format("{:.3g} to {:.3g}", layer.min_tensor_scale, layer.max_tensor_scale)});
  }
  return table.text();
}

std::string experts_text(const LayerInspection& layer) {
  Table table({">expert", "matrix", "encoding", "shape", ">size", ">tensor scale", ">input scale",
               ">saturated", ">nan", ">negative", ">zero", "note"});
  for (const ExpertInspection& expert : layer.experts) {
    for (std::size_t p = 0; p < 3; ++p) {
      if (!expert.projections[p]) continue;
      const MatrixInspection& m = *expert.projections[p];
      const auto count = [&](std::int64_t n) { return m.scales == 0 ? "-" : fmt::format("{}", n); };
      std::string note = m.all_zero ? "all zero" : "";
      if (m.nonfinite_values > 0) note += fmt::format("{} values not finite", m.nonfinite_values);
      table.add({expert.expert < 0 ? "shared" : fmt::format("{}", expert.expert),
                 std::string(to_string(kProjections[p])),
                 std::string(m.encoding == Encoding::kDense ? to_string(m.dtype) : to_string(m.encoding)),
                 fmt::format("{} x {}", m.rows, m.cols), human_bytes(m.bytes), optional_text(m.tensor_scale),
                 optional_text(m.input_scale), count(m.saturated_scales), count(m.nan_scales),
                 count(m.negative_scales), count(m.zero_scales), note});
    }
  }
  return table.text();
}

std::string findings_text(const Inspection& inspection) {
  if (inspection.findings.empty()) return "nothing suspicious\n";
  Table table({"finding", "layer", ""});
  for (const Finding& finding : inspection.findings) {
    table.add({std::string(to_string(finding.severity)),
               finding.layer < 0 ? "all" : fmt::format("{}", finding.layer), finding.text});
  }
  return table.text();
}

int run(const InspectArguments& options) {
  const ModelIndex model = index_model(Checkpoint::open(options.checkpoint), {options.fused_layout});
  const Inspection inspection = inspect(model, {.values = options.values, .layer = options.layer});
  if (options.json) {
    print_json(to_json(inspection, options));
    return 0;
  }
  std::string text =
      fmt::format("{}: {}{} tensors in {}, {}, of which {} in {}\n\n", one_line(options.checkpoint),
                  inspection.model_type.empty() ? "" : one_line(inspection.model_type) + ", ",
                  human_count(inspection.tensors),
                  inspection.files == 1 ? "1 file" : fmt::format("{} files", inspection.files),
                  human_bytes(inspection.bytes), human_bytes(inspection.expert_bytes),
                  options.layer ? fmt::format("the experts of layer {}", *options.layer) : "experts");
  text += layers_text(inspection) + "\n";
  if (options.layer) text += experts_text(inspection.layers.at(0)) + "\n";
  print(text + findings_text(inspection));
  return 0;
}

}  // namespace

std::function<int()> add_inspect(CLI::App& app) {
  const auto options = std::make_shared<InspectArguments>();
  app.add_option("CHECKPOINT", options->checkpoint, "a model's directory or one safetensors file")
      ->required();
  app.add_option("--layer", options->layer, "only this layer, with a row for each matrix");
  add_fused_layout(app, options->fused_layout);
  app.add_flag("--values", options->values, "read every dense weight too and count NaN and infinity");
  add_threads(app);
  add_json(app, options->json);
  return [options] { return run(*options); };
}

}  // namespace megamoe::cli
