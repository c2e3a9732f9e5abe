#include "cli/heatmap.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cli/output.h"

namespace megamoe::cli {
namespace {

// A shade for each dB, the same on every page: what is as good as NVFP4 gets is blue whatever lies beside it.
// Those at the ends take all that lies beyond.
constexpr int kShades = 9;
constexpr int kWorstDb = 13;  // below it an error is more than twice NVFP4's own
constexpr int kBestDb = kWorstDb + kShades - 2;

// Light on dark and dark on light would each need a scale of its own; this one, from blue (good) over grey to
// red (bad), reads on both. Exact matrices and ones that are not numbers have colours apart.
constexpr const char* kHeatmapStyle = R"(
:root { color-scheme: light dark; --page: #ffffff; --text: #1c2126; --soft: #5b6570; --line: #d7dce1; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --text: #e4e8ec; --soft: #98a2ad; --line: #343a41; } }
body { background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; margin: 2.5rem auto; max-width: 72rem; padding: 0 1.5rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; }
p.paths { color: var(--soft); margin-top: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
svg rect:hover { stroke: var(--text); stroke-width: 1.5; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .9rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 500; } th.l, td.l { text-align: left; }
li.bad { color: #d1495b; }
.s0 { fill: #b2283c; } .s1 { fill: #d2545a; } .s2 { fill: #e58b7c; } .s3 { fill: #e9b9a8; } .s4 { fill: #bfc3c9; }
.s5 { fill: #a3bfdc; } .s6 { fill: #6f9fd0; } .s7 { fill: #437fbe; } .s8 { fill: #255f9f; }
.exact { fill: #4c9f70; } .nan { fill: #d400a8; }
)";

std::string shade(double snr_db) {
  if (std::isnan(snr_db)) return "nan";
  if (snr_db == std::numeric_limits<double>::infinity()) return "exact";
  return fmt::format("s{}", static_cast<int>(std::clamp(snr_db - kWorstDb + 1, 0.0, kShades - 1.0)));
}

std::string db_text(double snr_db) {
  if (std::isnan(snr_db)) return "not a number";
  if (std::isinf(snr_db)) return snr_db > 0 ? "exact" : "nothing in common";
  return fmt::format("{:.2f} dB", snr_db);
}

std::string legend() {
  std::string out = "<svg width=\"420\" height=\"34\" role=\"img\" aria-label=\"colours\">";
  for (int i = 0; i < kShades; ++i) {
    out += fmt::format("<rect class=\"s{}\" x=\"{}\" y=\"0\" width=\"24\" height=\"14\"/>", i, i * 24);
  }
  out += fmt::format(
      "<text x=\"0\" y=\"29\">below {} dB</text><text x=\"216\" y=\"29\" text-anchor=\"end\">{} dB or "
      "more</text>",
      kWorstDb, kBestDb);
  return out +
         "<rect class=\"exact\" x=\"240\" y=\"0\" width=\"14\" height=\"14\"/><text x=\"260\" "
         "y=\"12\">exact</text>"
         "<rect class=\"nan\" x=\"310\" y=\"0\" width=\"14\" height=\"14\"/><text x=\"330\" y=\"12\">not a "
         "number</text></svg>";
}

// One map: a row for each layer, a column for each expert, the shared expert set apart on the right.
std::string map_of(const Verification& verification, Projection projection) {
  std::int64_t experts = 0;
  for (const LayerVerification& layer : verification.layers) experts = std::max(experts, layer.num_experts);
  const int cell = experts > 128 ? 8 : experts > 64 ? 11 : experts > 32 ? 16 : 24, left = 48, top = 18;
  std::string cells;
  bool shared = false;
  for (std::size_t l = 0; l < verification.layers.size(); ++l) {
    const LayerVerification& layer = verification.layers[l];
    const std::int64_t y = top + static_cast<std::int64_t>(l) * cell;
    // Labels need 11 pixels of their own.
    if (cell >= 11 || l % 2 == 0) {
      cells += fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>\n", left - 6,
                           y + cell / 2 + 4, layer_label(layer));
    }
    for (const MatrixVerification& matrix : layer.matrices) {
      if (matrix.projection != projection) continue;
      shared = shared || matrix.expert < 0;
      const std::int64_t column = matrix.expert < 0 ? experts + 1 : matrix.expert;
      cells += fmt::format(
          "<rect class=\"{}\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"><title>layer {}, {}, {}: {}, "
          "relative error {:.4g}, "
          "worst {:.3g} at [{}, {}]</title></rect>\n",
          shade(matrix.error.snr_db), left + column * cell, y, cell - 1, cell - 1, layer_label(layer),
          matrix.expert < 0 ? "shared expert" : fmt::format("expert {}", matrix.expert),
          to_string(projection), db_text(matrix.error.snr_db), matrix.error.relative, matrix.error.worst,
          matrix.error.worst_at / matrix.cols, matrix.error.worst_at % matrix.cols);
    }
  }
  const std::int64_t step = std::max<std::int64_t>(1, (40 + cell - 1) / cell);
  for (std::int64_t e = 0; e < experts; e += step) {
    cells += fmt::format("<text x=\"{}\" y=\"12\">{}</text>\n", left + e * cell, e);
  }
  if (shared) cells += fmt::format("<text x=\"{}\" y=\"12\">shared</text>\n", left + (experts + 1) * cell);
  return fmt::format(
      "<h2>{}</h2>\n<div class=\"scroll\"><svg width=\"{}\" height=\"{}\" role=\"img\" aria-label=\"SNR of "
      "{} by layer and "
      "expert\">\n{}</svg></div>\n",
      to_string(projection), left + (experts + 2) * cell + 40,
      top + static_cast<std::int64_t>(verification.layers.size()) * cell + 4, to_string(projection), cells);
}

std::string summary(const Verification& verification) {
  std::string rows;
  for (const LayerSummary& layer : summarize(verification)) {
    rows += fmt::format(
        "<tr><td class=\"l\">{}</td><td>{}</td><td>{}</td><td>{}</td><td "
        "class=\"l\">{}</td><td>{:.4f}</td><td>{}</td></tr>\n",
        layer.label, layer.matrices, db_text(layer.median_snr_db), db_text(layer.least_snr_db),
        escape_markup(layer.worst_name), layer.most_relative,
        layer.fold_error ? fmt::format("{:.4f}", *layer.fold_error) : "–");
  }
  return "<div class=\"scroll\"><table><tr><th class=\"l\">layer</th><th>matrices</th><th>median "
         "SNR</th><th>lowest SNR</th>"
         "<th class=\"l\">of</th><th>largest relative error</th><th>added by FP8 folding</th></tr>\n" +
         rows + "</table></div>\n";
}

}  // namespace

std::string verification_page(const Verification& verification, const std::string& quantized,
                              const std::string& source) {
  std::string page = fmt::format(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
      "content=\"width=device-width, initial-scale=1\">\n<title>Verification of "
      "{}</title>\n<style>{}</style></head><body>\n"
      "<h1>How much of the weights quantisation kept</h1>\n<p class=\"paths\">{} against {}</p>\n",
      escape_markup(quantized), kHeatmapStyle, escape_markup(quantized), escape_markup(source));
  if (verification.mismatches.empty()) {
    page += "<p>Every matrix of the source is there in its shape.</p>\n";
  } else {
    page += "<ul>\n";
    for (const std::string& mismatch : verification.mismatches) {
      page += fmt::format("<li class=\"bad\">{}</li>\n", escape_markup(mismatch));
    }
    page += "</ul>\n";
  }
  page += summary(verification);
  page +=
      "<h2>Signal to noise by expert and layer</h2>\n<p>Hover over a cell for its figures. "
      "NVFP4 made from BF16 lies near 20.4 dB.</p>\n" +
      legend();
  const bool gated = std::any_of(verification.layers.begin(), verification.layers.end(),
                                 [](const LayerVerification& layer) { return layer.gated; });
  for (const Projection projection : kProjections) {
    if (projection != Projection::kGate || gated) page += map_of(verification, projection);
  }
  return page + "</body></html>\n";
}

}  // namespace megamoe::cli
