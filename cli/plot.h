// plot.h: lines over two logarithmic axes, as an SVG image that needs nothing beside itself.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace megamoe::cli {

struct PlotLine {
  std::string label;
  bool limit = false;                             // drawn grey and dashed: a bound, not a measurement
  std::vector<std::pair<double, double>> points;  // those with a number that is not above 0 are left out
};

// Panels stand below each other. x is a count, y seconds.
struct PlotPanel {
  std::string title;
  std::vector<std::string> subtitles;
  std::vector<PlotLine> lines;
};

std::string plot_svg(const std::vector<PlotPanel>& panels, const std::string& x_label,
                     const std::string& y_label);

// The marks of an axis that holds `low` to `high`, both above 0: 1, 2 and 5 times powers of ten, or powers of
// ten alone where the axis spans more than three. The first is at or below `low`, the last at or above
// `high`.
std::vector<double> log_ticks(double low, double high);

}  // namespace megamoe::cli
