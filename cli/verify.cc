// verify.cc: `megamoe verify`: a quantised checkpoint against its source.
#include "engine/verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "base/check.h"
#include "base/file.h"
#include "cli/heatmap.h"
#include "cli/output.h"
#include "cli/verb.h"

namespace megamoe::cli {
namespace {

using nlohmann::json;

struct VerifyArguments {
  std::string quantized, source, fused_layout, html;
  std::optional<double> min_snr;
  int worst = 5;
  bool progress = false;
  bool json = false;
};

struct Entry {
  const LayerVerification* layer;
  const MatrixVerification* matrix;
};

// All matrices, lowest SNR first; what is not a number comes before every number.
std::vector<Entry> by_snr(const Verification& verification) {
  std::vector<Entry> out;
  for (const LayerVerification& layer : verification.layers) {
    for (const MatrixVerification& matrix : layer.matrices) out.push_back({&layer, &matrix});
  }
  std::stable_sort(out.begin(), out.end(), [](const Entry& a, const Entry& b) {
    const double x = a.matrix->error.snr_db, y = b.matrix->error.snr_db;
    return std::isnan(x) ? !std::isnan(y) : x < y;
  });
  return out;
}

bool misses(const MatrixVerification& matrix, const VerifyArguments& options) {
  return options.min_snr && !(matrix.error.snr_db >= *options.min_snr);
}

std::string snr_text(double snr_db) {
  return std::isinf(snr_db) && snr_db > 0 ? "exact" : fmt::format("{:.2f} dB", snr_db);
}

std::string place_text(const MatrixVerification& matrix) {
  return fmt::format("{:.3g} at [{}, {}]", matrix.error.worst, matrix.error.worst_at / matrix.cols,
                     matrix.error.worst_at % matrix.cols);
}

json to_json(const Verification& verification, const VerifyArguments& options, bool passed) {
  json out = {{"quantized", options.quantized},
              {"source", options.source},
              {"passed", passed},
              {"min_snr_db", options.min_snr ? json(*options.min_snr) : json()},
              {"mismatches", verification.mismatches},
              {"other_tensors_equal", verification.others_equal},
              {"layers", json::array()}};
  const std::vector<LayerSummary> summaries = summarize(verification);
  for (std::size_t l = 0; l < summaries.size(); ++l) {
    const LayerSummary& summary = summaries[l];
    json layer = {{"layer", verification.layers[l].layer},
                  {"mtp", verification.layers[l].mtp},
                  {"median_snr_db", summary.median_snr_db},
                  {"least_snr_db", summary.least_snr_db},
                  {"most_relative_error", summary.most_relative},
                  {"fold_error", summary.fold_error ? json(*summary.fold_error) : json()},
                  {"matrices", json::array()}};
    for (const MatrixVerification& matrix : verification.layers[l].matrices) {
      layer["matrices"].push_back({{"expert", matrix.expert < 0 ? json("shared") : json(matrix.expert)},
                                   {"projection", to_string(matrix.projection)},
                                   {"exact", matrix.error.exact()},
                                   {"snr_db", matrix.error.snr_db},
                                   {"relative_error", matrix.error.relative},
                                   {"cosine", matrix.error.cosine},
                                   {"worst", matrix.error.worst},
                                   {"worst_row", matrix.error.worst_at / matrix.cols},
                                   {"worst_column", matrix.error.worst_at % matrix.cols},
                                   {"nonfinite", matrix.error.nonfinite},
                                   {"fold_error", matrix.fold_error ? json(*matrix.fold_error) : json()}});
    }
    out["layers"].push_back(layer);
  }
  return out;
}

std::string to_text(const Verification& verification, const VerifyArguments& options, std::int64_t missed) {
  Table layers({"layer", ">matrices", ">highest SNR", ">median SNR", ">lowest SNR", "of",
                ">largest relative error", ">lowest cosine", ">added by FP8 folding"});
  for (const LayerSummary& layer : summarize(verification)) {
    layers.add({layer.label, fmt::format("{}", layer.matrices), snr_text(layer.most_snr_db),
                snr_text(layer.median_snr_db), snr_text(layer.least_snr_db), layer.worst_name,
                fmt::format("{:.4f}", layer.most_relative), fmt::format("{:.6f}", layer.least_cosine),
                layer.fold_error ? fmt::format("{:.4f}", *layer.fold_error) : "-"});
  }
  std::string text = layers.text();
  const std::vector<Entry> entries = by_snr(verification);
  const auto shown = std::min(entries.size(), static_cast<std::size_t>(options.worst));
  if (shown > 0) {
    Table worst({"worst matrices", "", "", ">SNR", ">relative error", ">cosine", ">worst element"});
    for (std::size_t i = 0; i < shown; ++i) {
      const MatrixVerification& m = *entries[i].matrix;
      worst.add({layer_label(*entries[i].layer),
                 m.expert < 0 ? "shared expert" : fmt::format("expert {}", m.expert),
                 std::string(to_string(m.projection)), snr_text(m.error.snr_db),
                 fmt::format("{:.4f}", m.error.relative), fmt::format("{:.6f}", m.error.cosine),
                 place_text(m)});
    }
    text += "\n" + worst.text();
  }
  text += fmt::format("\n{} other tensors are equal byte for byte\n", human_count(verification.others_equal));
  for (const std::string& mismatch : verification.mismatches)
    text += fmt::format("mismatch: {}\n", one_line(mismatch));
  if (missed > 0) text += fmt::format("{} matrices miss the SNR of {} dB\n", missed, *options.min_snr);
  if (!options.html.empty()) text += fmt::format("wrote {}\n", one_line(options.html));
  return text;
}

int run(const VerifyArguments& options) {
  if (options.worst < 0)
    fail(ErrorCode::kInvalidArgument, "--worst must be 0 or more, got {}", options.worst);
  const ModelIndex quantized = index_model(Checkpoint::open(options.quantized), {options.fused_layout});
  const ModelIndex source = index_model(Checkpoint::open(options.source), {options.fused_layout});
  if (!options.html.empty()) {
    std::vector<std::filesystem::path> inputs = quantized.checkpoint->sources();
    for (const std::filesystem::path& path : source.checkpoint->sources()) inputs.push_back(path);
    check_is_no_input(options.html, inputs);
    check_writable(options.html);
  }
  Verification verification;
  {
    ProgressBar bar("verify", options.progress);
    verification = verify(quantized, source, bar.fn());
  }
  std::int64_t missed = 0;
  for (const Entry& entry : by_snr(verification)) missed += misses(*entry.matrix, options);
  const bool passed = verification.mismatches.empty() && missed == 0;
  if (!options.html.empty()) {
    write_file_atomically(options.html, verification_page(verification, options.quantized, options.source));
  }
  if (options.json) {
    print_json(to_json(verification, options, passed));
  } else {
    print(to_text(verification, options, missed));
  }
  return passed ? 0 : 1;
}

}  // namespace

std::function<int()> add_verify(CLI::App& app) {
  const auto options = std::make_shared<VerifyArguments>();
  app.add_option("QUANTIZED", options->quantized, "the quantised checkpoint")->required();
  app.add_option("SOURCE", options->source, "the checkpoint it was made from")->required();
  add_fused_layout(app, options->fused_layout);
  app.add_option("--min-snr", options->min_snr, "exit with 1 if a matrix has a lower SNR, in dB");
  app.add_option("--worst", options->worst, "how many of the worst matrices to list (default 5)");
  app.add_option("--html", options->html, "also write a page with a heat map to this file");
  add_threads(app);
  app.add_flag("--progress", options->progress, "report progress even where stderr is no terminal");
  add_json(app, options->json);
  return [options] { return run(*options); };
}

}  // namespace megamoe::cli
