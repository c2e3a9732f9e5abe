// convert.cc: `megamoe convert`: brings an FP4 model into another family's NVFP4.
#include "engine/convert.h"

#include <memory>

#include "cli/rewrite_options.h"
#include "cli/verb.h"

namespace megamoe::cli {

std::function<int()> add_convert(CLI::App& app) {
  const auto options = std::make_shared<RewriteOptions>();
  add_rewrite_options(app, "--to", true, *options);
  return [options] {
    return run_rewrite("convert", *options, [&](const ProgressFn& progress) {
      const ConvertOptions convert{options->family, options->gate_up_scale, options->overwrite,
                                   options->fused_layout};
      return convert_checkpoint(options->source, options->destination, convert, progress);
    });
  };
}

}  // namespace megamoe::cli
