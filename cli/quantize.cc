// quantize.cc: `megamoe quantize`: makes a model's experts NVFP4.
#include <memory>

#include "cli/rewrite_options.h"
#include "cli/verb.h"
#include "engine/quantize_checkpoint.h"

namespace megamoe::cli {
namespace {

struct QuantizeArguments {
  RewriteOptions common;
  QuantizeCheckpointOptions quantize;
  std::string layers;
};

int run(QuantizeArguments options) {
  options.quantize.format = options.common.family;
  options.quantize.gate_up_scale = options.common.gate_up_scale;
  options.quantize.fused_layout = options.common.fused_layout;
  options.quantize.overwrite = options.common.overwrite;
  if (!options.layers.empty()) options.quantize.layers = parse_layers(options.layers);
  return run_rewrite("quantize", options.common, [&](const ProgressFn& progress) {
    return quantize_checkpoint(options.common.source, options.common.destination, options.quantize, progress);
  });
}

}  // namespace

std::function<int()> add_quantize(CLI::App& app) {
  const auto options = std::make_shared<QuantizeArguments>();
  add_rewrite_options(app, "--format", false, options->common);
  add_choice(
      app, "--activations", options->quantize.activations,
      {ActivationScales::kNone, ActivationScales::kStatic, ActivationScales::kDynamic},
      "none (default): weight-only; static: with input scales from --scales; dynamic: NVFP4 activations "
      "under scales found at run time");
  app.add_option("--scales", options->quantize.scales, "input scales as calibrate writes them");
  app.add_flag("--four-over-six", options->quantize.four_over_six,
               "let a block's largest value be 4 instead of 6 where that has the smaller error");
  app.add_option("--layers", options->layers, "only these, for example 0,3-5 (default: all but MTP layers)")
      ->check([](const std::string& text) { return text.empty() ? "expected layers, got none" : ""; }, "",
              "");
  app.add_flag("--shared-experts", options->quantize.shared_experts, "also the shared experts");
  return [options] { return run(*options); };
}

}  // namespace megamoe::cli
