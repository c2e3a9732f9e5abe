// calibrate.cc: `megamoe calibrate`: static activation scales from recorded activations.
#include "engine/calibrate.h"

#include <fmt/format.h>

#include <limits>
#include <memory>

#include "base/file.h"
#include "cli/output.h"
#include "cli/verb.h"
#include "engine/recorded.h"
#include "layer/load_layer.h"

namespace megamoe::cli {
namespace {

using nlohmann::json;

struct CalibrateArguments {
  std::string checkpoint, fused_layout;
  std::vector<std::string> activations;
  std::string output;
  std::optional<int> layer;
  std::string backend;
  bool progress = false;
  bool json = false;
};

struct Row {
  int layer = 0;
  std::int64_t tokens = 0;
  Calibration::Result result;
};

Row calibrate_layer(const ModelIndex& model, int number, const std::vector<RecordedActivations>& files,
                    const CalibrateArguments& options) {
  MoeLayer layer(load_layer(model, find_layer(model, number)),
                 {.backend = options.backend, .x_scale = {}, .h_scale = {}});
  Calibration calibration(layer);
  Row row{.layer = number, .tokens = 0, .result = {}};
  for (const RecordedActivations& file : files) {
    RecordedLayer recorded = file.read(number, layer.config(), std::numeric_limits<std::int64_t>::max());
    route_recorded(layer, recorded);
    calibration.add({recorded.x.data(), recorded.tokens, layer.config().hidden},
                    {recorded.ids.data(), recorded.tokens, layer.config().top_k},
                    {recorded.weights.data(), recorded.tokens, layer.config().top_k});
    row.tokens += recorded.tokens;
  }
  row.result = calibration.result();
  return row;
}

std::string range_text(const std::vector<ExpertInputScales>& experts, InputScale ExpertInputScales::*side) {
  float least = std::numeric_limits<float>::infinity(), most = 0;
  for (const ExpertInputScales& expert : experts) {
    least = std::min(least, (expert.*side).scale);
    most = std::max(most, (expert.*side).scale);
  }
  return fmt::format("{:.3g} to {:.3g}", least, most);
}

int run(const CalibrateArguments& options) {
  const ModelIndex model = index_model(Checkpoint::open(options.checkpoint), {options.fused_layout});
  std::vector<RecordedActivations> files;
  std::vector<std::filesystem::path> inputs = model.checkpoint->sources();
  for (const std::string& file : options.activations) {
    files.emplace_back(file);
    inputs.emplace_back(file);
  }
  check_is_no_input(options.output, inputs);
  check_writable(options.output);
  std::vector<int> numbers;
  if (options.layer) {
    numbers.push_back(*options.layer);
  } else {
    for (const MoeLayerInfo& layer : model.layers) {
      if (!layer.mtp) numbers.push_back(layer.layer);
    }
  }
  InputScales scales;
  json layers = json::array();
  Table table({">layer", ">tokens", ">experts", "scales of x", "scales of h",
               "experts without tokens (take the layer's largest)"});
  {
    ProgressBar bar("calibrate", options.progress);
    const ProgressFn report = bar.fn();
    std::int64_t total = 0, done = 0;
    for (const int number : numbers) total += find_layer(model, number).num_experts;
    for (const int number : numbers) {
      const Row row = calibrate_layer(model, number, files, options);
      const auto& experts = row.result.experts;
      scales.layers[number] = experts;
      table.add(
          {fmt::format("{}", number), fmt::format("{}", row.tokens), fmt::format("{}", experts.size()),
           range_text(experts, &ExpertInputScales::x), range_text(experts, &ExpertInputScales::h),
           row.result.borrowed.empty() ? "none" : fmt::format("{}", fmt::join(row.result.borrowed, " "))});
      layers.push_back({{"layer", number},
                        {"tokens", row.tokens},
                        {"experts", experts.size()},
                        {"experts_without_tokens", row.result.borrowed}});
      done += static_cast<std::int64_t>(experts.size());
      if (report) report({done, total, fmt::format("layer {}", number)});
    }
  }
  write_input_scales(options.output, scales);
  if (options.json) {
    print_json({{"checkpoint", options.checkpoint}, {"output", options.output}, {"layers", layers}});
  } else {
    print(fmt::format("{}\nwrote {}\n", table.text(), one_line(options.output)));
  }
  return 0;
}

}  // namespace

std::function<int()> add_calibrate(CLI::App& app) {
  const auto options = std::make_shared<CalibrateArguments>();
  app.add_option("CHECKPOINT", options->checkpoint, "a model's directory or one safetensors file")
      ->required();
  app.add_option("--activations", options->activations, "recorded activations, one or more safetensors files")
      ->required();
  app.add_option("-o,--output", options->output, "the file of scales to write")->required();
  add_fused_layout(app, options->fused_layout);
  app.add_option("--layer", options->layer, "only this layer");
  app.add_option("--backend", options->backend, "what to run on (see megamoe backends)");
  add_threads(app);
  app.add_flag("--progress", options->progress, "report progress even where stderr is no terminal");
  add_json(app, options->json);
  return [options] { return run(*options); };
}

}  // namespace megamoe::cli
