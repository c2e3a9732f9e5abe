#include "cli/plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "cli/output.h"

namespace megamoe::cli {
namespace {

constexpr double kWidth = 760, kPanelHeight = 480;
constexpr double kLeft = 92, kRight = kWidth - 28, kTop = 114, kBottom = kPanelHeight - 62;
constexpr double kLegend = 88;      // its height
constexpr double kLabelSpace = 34;  // pixels between two labels of the lower axis

// Told apart by colour-blind readers too; a limit is grey and dashed.
constexpr const char* kColors[] = {"#1f6fb4", "#d9641e", "#2f8f5b", "#8a4fb0"};
constexpr const char* kLimitColor = "#6b7580";

constexpr const char* kPlotStyle =
    "text { font: 13px system-ui, sans-serif; fill: #3d454d; } .title { font-size: 17px; font-weight: 600; "
    "fill: #1c2126; } .soft { fill: #5b6570; font-size: 12px; } .grid { stroke: #e3e7eb; } .axis { stroke: "
    "#8b949d; } .line { fill: none; stroke-width: 2; }";

bool drawable(const std::pair<double, double>& point) {
  return std::isfinite(point.first) && std::isfinite(point.second) && point.first > 0 && point.second > 0;
}

// From a value to a place, logarithmically.
struct Scale {
  double low, high;        // values
  double at_low, at_high;  // pixels

  double operator()(double value) const {
    return at_low + std::log(value / low) / std::log(high / low) * (at_high - at_low);
  }
};

std::string tick_seconds(double seconds) {
  const double us = seconds * 1e6;
  if (us < 999) return fmt::format("{:.3g} us", us);
  return us < 999e3 ? fmt::format("{:.3g} ms", us / 1e3) : fmt::format("{:.6g} s", us / 1e6);
}

std::string text_at(double x, double y, std::string_view attributes, std::string_view text) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\"{}{}>{}</text>\n", x, y, attributes.empty() ? "" : " ",
                     attributes, escape_markup(text));
}

std::string segment(double x1, double y1, double x2, double y2, std::string_view attributes) {
  return fmt::format("<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" {}/>\n", x1, y1, x2, y2,
                     attributes);
}

std::string stroke(const char* color, bool limit) {
  return fmt::format("stroke=\"{}\"{}", color, limit ? " stroke-dasharray=\"7 5\"" : "");
}

std::string draw_line(const PlotLine& line, const char* color, const Scale& x, const Scale& y) {
  std::string path, marks;
  for (const auto& point : line.points) {
    if (!drawable(point)) continue;
    const double px = x(point.first), py = y(point.second);
    path += fmt::format("{}{:.1f},{:.1f}", path.empty() ? "" : " ", px, py);
    marks += fmt::format(
        "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{}\" fill=\"{}\"><title>{}, {:g}: {}</title></circle>\n", px,
        py, line.limit ? 2 : 3.5, color, escape_markup(line.label), point.first, human_seconds(point.second));
  }
  if (path.empty()) return "";
  return fmt::format("<polyline class=\"line\" {} points=\"{}\"/>\n", stroke(color, line.limit), path) +
         marks;
}

std::string draw_panel(const PlotPanel& panel, const std::string& x_label, const std::string& y_label) {
  std::string out = text_at(kLeft, 26, "class=\"title\"", panel.title);
  double next = 46;
  for (const std::string& subtitle : panel.subtitles) {
    out += text_at(kLeft, next, "class=\"soft\"", subtitle);
    next += 17;
  }
  std::set<double> counts, times;
  for (const PlotLine& line : panel.lines) {
    for (const auto& point : line.points) {
      if (drawable(point)) counts.insert(point.first), times.insert(point.second);
    }
  }
  if (counts.empty()) return out + text_at(kLeft, kTop, "", "nothing was measured");

  const std::vector<double> ticks = log_ticks(*times.begin(), *times.rbegin());
  const bool single = counts.size() == 1;
  const Scale x{*counts.begin() / (single ? 2 : 1), *counts.rbegin() * (single ? 2 : 1), kLeft + 16,
                kRight - 16};
  const Scale y{ticks.front(), ticks.back(), kBottom, kTop};
  for (const double tick : ticks) {
    out += segment(kLeft, y(tick), kRight, y(tick), "class=\"grid\"");
    out += text_at(kLeft - 8, y(tick) + 4, "text-anchor=\"end\"", tick_seconds(tick));
  }
  double last = -kLabelSpace;
  for (const double count : counts) {
    out += segment(x(count), kBottom, x(count), kBottom + 5, "class=\"axis\"");
    if (x(count) - last < kLabelSpace) continue;
    last = x(count);
    out += text_at(last, kBottom + 20, "text-anchor=\"middle\"", fmt::format("{:g}", count));
  }
  out += segment(kLeft, kBottom, kRight, kBottom, "class=\"axis\"");
  out += segment(kLeft, kTop, kLeft, kBottom, "class=\"axis\"");
  out += text_at((kLeft + kRight) / 2, kBottom + 44, "text-anchor=\"middle\"", x_label);
  out +=
      fmt::format("<text transform=\"translate(20 {:.1f}) rotate(-90)\" text-anchor=\"middle\">{}</text>\n",
                  (kTop + kBottom) / 2, escape_markup(y_label));

  std::size_t next_color = 0;
  double legend = kLeft;
  for (const PlotLine& line : panel.lines) {
    const char* color = line.limit ? kLimitColor : kColors[next_color++ % std::size(kColors)];
    out += segment(legend, kLegend, legend + 26, kLegend, "stroke-width=\"2\" " + stroke(color, line.limit));
    out += text_at(legend + 32, kLegend + 4, "", line.label);
    legend += 56 + 7.5 * static_cast<double>(line.label.size());
    out += draw_line(line, color, x, y);
  }
  return out;
}

}  // namespace

std::vector<double> log_ticks(double low, double high) {
  const int first = static_cast<int>(std::floor(std::log10(low))),
            last = static_cast<int>(std::ceil(std::log10(high)));
  const bool sparse = std::log10(high / low) > 3;
  std::vector<double> ticks;
  for (int exponent = first; exponent <= last; ++exponent) {
    for (const int digit : {1, 2, 5}) {
      if (sparse && digit > 1) continue;
      const double tick = digit * std::pow(10.0, exponent);
      if (!ticks.empty() && ticks.back() <= low && tick <= low) ticks.pop_back();  // a later one will do
      ticks.push_back(tick);
      if (tick >= high && ticks.size() > 1) return ticks;
    }
  }
  ticks.push_back(std::pow(10.0, last + 1));  // low and high are one power of ten
  return ticks;
}

std::string plot_svg(const std::vector<PlotPanel>& panels, const std::string& x_label,
                     const std::string& y_label) {
  const double height = kPanelHeight * static_cast<double>(panels.size());
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} "
      "{1:.0f}\" role=\"img\">\n<style>{2}</style>\n<rect width=\"100%\" height=\"100%\" "
      "fill=\"#ffffff\"/>\n",
      kWidth, height, kPlotStyle);
  for (std::size_t i = 0; i < panels.size(); ++i) {
    svg += fmt::format("<g transform=\"translate(0 {:.0f})\">\n{}</g>\n",
                       kPanelHeight * static_cast<double>(i), draw_panel(panels[i], x_label, y_label));
  }
  return svg + "</svg>\n";
}

}  // namespace megamoe::cli
