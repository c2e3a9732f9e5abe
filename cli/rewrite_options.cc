#include "cli/rewrite_options.h"

#include <fmt/format.h>

#include <algorithm>

#include "cli/output.h"
#include "cli/verb.h"

namespace megamoe::cli {
namespace {

nlohmann::json to_json(const RewriteReport& r, const RewriteOptions& options) {
  return {{"source", options.source},
          {"destination", options.destination},
          {"format", to_string(options.family)},
          {"matrices", r.quantized_linears},
          {"consumed_tensors", r.consumed_tensors},
          {"carried_tensors", r.carried_tensors},
          {"written_tensors", r.written_tensors},
          {"resumed_tensors", r.resumed_tensors},
          {"source_bytes", r.source_bytes},
          {"output_bytes", r.output_bytes},
          {"inexact_blocks", r.inexact_blocks},
          {"saturated_blocks", r.saturated_blocks},
          {"seconds", r.seconds},
          {"notes", r.notes}};
}

std::string to_text(const RewriteReport& r, const RewriteOptions& options) {
  Table table({"", ""});
  table.add({"written", one_line(options.destination)});
  table.add({"format", fmt::format("NVFP4, {}", to_string(options.family))});
  table.add({"matrices made NVFP4", fmt::format("{}, from {} tensors", human_count(r.quantized_linears),
                                                human_count(r.consumed_tensors))});
  table.add({"tensors carried over", human_count(r.carried_tensors)});
  table.add({"size", fmt::format("{} -> {}, {:.1f} % of the source", human_bytes(r.source_bytes),
                                 human_bytes(r.output_bytes),
                                 100.0 * static_cast<double>(r.output_bytes) /
                                     static_cast<double>(std::max<std::int64_t>(r.source_bytes, 1)))});
  table.add({"inexact MXFP4 blocks", human_count(r.inexact_blocks)});
  table.add({"saturated blocks", human_count(r.saturated_blocks)});
  table.add({"time", human_seconds(r.seconds)});
  std::string text = table.text();
  text.erase(0, text.find('\n') + 1);  // no headings
  for (const std::string& note : r.notes) text += fmt::format("note: {}\n", one_line(note));
  return text;
}

}  // namespace

void add_rewrite_options(CLI::App& app, const char* family_option, bool family_required,
                         RewriteOptions& options) {
  app.add_option("SRC", options.source, "a model's directory or one safetensors file")->required();
  app.add_option("DST", options.destination,
                 "the directory to make (or a name ending in .safetensors where SRC is one file)")
      ->required();
  add_choice(app, family_option, options.family, {Family::kModelOpt, Family::kCompressedTensors},
             "modelopt or compressed-tensors: names and configs to write")
      ->required(family_required);
  add_choice(app, "--gate-up-scale", options.gate_up_scale, {GateUpScale::kShared, GateUpScale::kSeparate},
             "shared (default): one tensor scale for an expert's gate and up; separate: each its own");
  add_fused_layout(app, options.fused_layout);
  app.add_flag("--overwrite", options.overwrite, "replace DST, once the new one is complete");
  add_threads(app);
  app.add_flag("--progress", options.progress, "report progress even where stderr is no terminal");
  add_json(app, options.json);
}

int run_rewrite(const char* what, const RewriteOptions& options,
                const std::function<RewriteReport(const ProgressFn&)>& work) {
  RewriteReport report;
  {
    ProgressBar bar(what, options.progress);
    report = work(bar.fn());
  }
  if (options.json) {
    print_json(to_json(report, options));
  } else {
    print(to_text(report, options));
  }
  return 0;
}

}  // namespace megamoe::cli
