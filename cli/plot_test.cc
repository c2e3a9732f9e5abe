#include "cli/plot.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <sstream>

#include "cli/test_xml.h"

namespace megamoe::cli {
namespace {

using testing::parse_xml;

TEST(ParseXml, FindsWhatIsWrong) {
  EXPECT_EQ(parse_xml("<a x=\"1\"><b/>&lt;<b y=\"\"></b></a>\n").count("b"), 2);
  for (const char* bad : {"", "<a>", "<a></b>", "<a/><b/>", "<a x=1/>", "<a x=\"1\" x=\"2\"/>",
                          "<a>&nbsp;</a>", "<a b=\"<\"/>", "<a>\x01</a>", "a", "<a", "</a>"}) {
    EXPECT_THROW(parse_xml(bad), std::runtime_error) << bad;
  }
}

TEST(LogTicks, CoverTheRangeInRoundNumbers) {
  const auto near = [](const std::vector<double>& ticks, const std::vector<double>& expected) {
    ASSERT_EQ(ticks.size(), expected.size());
    for (std::size_t i = 0; i < ticks.size(); ++i) EXPECT_NEAR(ticks[i] / expected[i], 1, 1e-12);
  };
  near(log_ticks(3, 30), {2, 5, 10, 20, 50});
  near(log_ticks(2, 5), {2, 5});
  near(log_ticks(1, 1), {1, 2});
  near(log_ticks(7, 7), {5, 10});
  near(log_ticks(0.3, 0.3), {0.2, 0.5});
  near(log_ticks(3e-6, 5e-2), {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1});
  near(log_ticks(1e-5, 1e-1), {1e-5, 1e-4, 1e-3, 1e-2, 1e-1});
}

std::vector<PlotPanel> panels() {
  return {{.title = "a <layer> & \"more\"",
           .subtitles = {"on a\nmachine", "routed"},
           .lines = {{.label = "bf16", .points = {{1, 1e-4}, {10, 1e-3}, {100, 1e-2}}},
                     {.label = "nvfp4", .points = {{1, 1e-4}, {100, 1e-3}}},
                     {.label = "floor", .limit = true, .points = {{1, 1e-5}, {100, 1e-3}}}}}};
}

// The points of every line, in the order of the lines.
std::vector<std::vector<std::pair<double, double>>> drawn_lines(const std::string& svg) {
  std::vector<std::vector<std::pair<double, double>>> lines;
  for (const testing::Xml::Element& element : parse_xml(svg).elements) {
    if (element.name != "polyline") continue;
    lines.emplace_back();
    std::istringstream points(element.attributes.at("points"));
    char comma = 0;
    for (double x, y; points >> x >> comma >> y;) lines.back().emplace_back(x, y);
  }
  return lines;
}

TEST(PlotSvg, IsAnImageOfItsOwn) {
  const std::string svg = plot_svg(panels(), "tokens", "time");
  const testing::Xml xml = parse_xml(svg);
  EXPECT_EQ(xml.count("svg"), 1);
  EXPECT_EQ(xml.count("polyline"), 3);
  for (const char* text : {"a <layer> & \"more\"", "on a machine", "routed", "bf16", "nvfp4", "floor",
                           "tokens", "time", "10 us", "100 us", "1 ms", "10 ms"}) {
    EXPECT_NE(xml.text.find(text), std::string::npos) << text;
  }
  EXPECT_EQ(svg.find("http", svg.find("http") + 1), std::string::npos) << "beyond the namespace's";
  for (const char* outside : {"href", "@import", "url(", "<script"}) {
    EXPECT_EQ(svg.find(outside), std::string::npos) << outside;
  }
}

// Decades are equally far apart, more time is higher up, the bound is dashed.
TEST(PlotSvg, DrawsLogarithmically) {
  const std::string svg = plot_svg(panels(), "tokens", "time");
  const auto lines = drawn_lines(svg);
  ASSERT_EQ(lines.size(), 3u);
  ASSERT_EQ(lines[0].size(), 3u);
  constexpr double kRounding = 0.11;  // places have one decimal
  const double right = lines[0][1].first - lines[0][0].first, up = lines[0][0].second - lines[0][1].second;
  EXPECT_GT(right, 100);
  EXPECT_GT(up, 50);
  EXPECT_NEAR(lines[0][2].first - lines[0][1].first, right, kRounding);
  EXPECT_NEAR(lines[0][1].second - lines[0][2].second, up, kRounding);
  ASSERT_EQ(lines[1].size(), 2u);
  EXPECT_EQ(lines[1][0], lines[0][0]);
  EXPECT_NEAR(lines[1][1].second, lines[0][1].second, kRounding);
  EXPECT_NEAR(lines[2][0].second - lines[0][0].second, up, kRounding);
  EXPECT_NE(svg.find("stroke-dasharray"), std::string::npos);
  std::vector<PlotPanel> unbounded = panels();
  unbounded[0].lines.pop_back();
  EXPECT_EQ(plot_svg(unbounded, "", "").find("stroke-dasharray"), std::string::npos);
}

TEST(PlotSvg, LeavesOutWhatHasNoPlace) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  std::vector<PlotPanel> odd = panels();
  odd[0].lines[0].points = {{1, kNaN}, {0, 1}, {10, -1}, {10, 0}, {5, 1e-3}, {7, 1 / 0.0}};
  const auto lines = drawn_lines(plot_svg(odd, "tokens", "time"));
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_EQ(lines[0].size(), 1u);

  const std::string one = plot_svg(
      {{.title = "one", .subtitles = {}, .lines = {{.label = "x", .points = {{8, 1}}}}}}, "tokens", "time");
  EXPECT_NO_THROW(parse_xml(one));
  EXPECT_EQ(one.find("nan"), std::string::npos);
  const std::string none = plot_svg({{.title = "none", .subtitles = {}, .lines = {}}}, "tokens", "time");
  EXPECT_NE(parse_xml(none).text.find("nothing was measured"), std::string::npos);
}

TEST(PlotSvg, PanelsStandBelowEachOther) {
  std::vector<PlotPanel> two = panels();
  two.push_back(two[0]);
  const std::string svg = plot_svg(two, "tokens", "time");
  EXPECT_EQ(parse_xml(svg).count("polyline"), 6);
  EXPECT_NE(svg.find("translate(0 480)"), std::string::npos);
  EXPECT_NE(svg.find("height=\"960\""), std::string::npos);
}

}  // namespace
}  // namespace megamoe::cli
