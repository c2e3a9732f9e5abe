#include "cli/heatmap.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <limits>

namespace megamoe::cli {
namespace {

// The class, and with it the colour, of the one cell of a page whose matrix has this SNR.
std::string colour(double snr_db) {
  MatrixVerification matrix;
  matrix.cols = 16;
  matrix.error.snr_db = snr_db;
  LayerVerification layer;
  layer.num_experts = 1;
  layer.matrices = {matrix};
  Verification verification;
  verification.layers = {layer};
  const std::string page = verification_page(verification, "a", "b");
  const std::string cell = "><title>layer 0";
  const std::size_t end = page.find(cell), begin = page.rfind("class=\"", end) + 7;
  return page.substr(begin, page.find('"', begin) - begin);
}

TEST(Heatmap, ColoursDoNotDependOnTheOtherMatrices) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(colour(20.4), "s8");
  EXPECT_EQ(colour(31.0), "s8");
  EXPECT_EQ(colour(20.0), "s8");
  EXPECT_EQ(colour(19.99), "s7");
  EXPECT_EQ(colour(16.5), "s4");
  EXPECT_EQ(colour(13.0), "s1");
  EXPECT_EQ(colour(12.99), "s0");
  EXPECT_EQ(colour(-kInfinity), "s0");
  EXPECT_EQ(colour(kInfinity), "exact");
  EXPECT_EQ(colour(std::numeric_limits<double>::quiet_NaN()), "nan");
}

TEST(Heatmap, TheLegendSaysWhatTheColoursMean) {
  const std::string page = verification_page({}, "<a>", "b");
  EXPECT_NE(page.find("below 13 dB"), std::string::npos);
  EXPECT_NE(page.find("20 dB or more"), std::string::npos);
  EXPECT_EQ(page.find("<a>"), std::string::npos);
}

}  // namespace
}  // namespace megamoe::cli
