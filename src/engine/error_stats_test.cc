#include "engine/error_stats.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "megamoe/error.h"

namespace megamoe {
namespace {

TEST(ErrorStats, OfValuesWorkedOutByHand) {
  const std::vector<float> reference = {3, 4, 0, 0}, values = {3, 4, 0.3f, -0.4f};
  const ErrorStats stats = compare(values, reference);
  EXPECT_NEAR(stats.relative, 0.1, 1e-7);  // 0.5 / 5
  EXPECT_NEAR(stats.snr_db, 20, 1e-5);
  EXPECT_NEAR(stats.cosine, 25 / (5 * std::sqrt(25.25)), 1e-7);
  EXPECT_NEAR(stats.worst, 0.4, 1e-7);
  EXPECT_EQ(stats.worst_at, 3);
  EXPECT_EQ(stats.nonfinite, 0);
  EXPECT_FALSE(stats.exact());
}

TEST(ErrorStats, OfEqualValuesIsExact) {
  const std::vector<float> values = {1, -2};
  const ErrorStats stats = compare(values, values);
  EXPECT_TRUE(stats.exact());
  EXPECT_EQ(stats.snr_db, std::numeric_limits<double>::infinity());
  EXPECT_NEAR(stats.cosine, 1, 1e-15);
}

TEST(ErrorStats, OfZerosIsExactAndOverZerosInfinite) {
  const std::vector<float> zeros = {0, 0}, values = {0, 1};
  EXPECT_TRUE(compare(zeros, zeros).exact());
  EXPECT_EQ(compare(zeros, zeros).cosine, 1);
  EXPECT_EQ(compare(values, zeros).relative, std::numeric_limits<double>::infinity());
  EXPECT_EQ(compare(values, zeros).cosine, 0);
  EXPECT_TRUE(compare({}, {}).exact());
}

TEST(ErrorStats, NamesTheFirstValueThatIsNotFinite) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> reference = {0, 0, 0}, values = {9, nan, nan};
  const ErrorStats stats = compare(values, reference);
  EXPECT_EQ(stats.nonfinite, 2);
  EXPECT_EQ(stats.worst_at, 1);
  EXPECT_TRUE(std::isnan(stats.relative));
  EXPECT_FALSE(stats.exact());
}

TEST(ErrorStats, RefusesDifferentSizes) {
  const std::vector<float> one = {1}, two = {1, 2};
  EXPECT_THROW(compare(one, two), Error);
}

}  // namespace
}  // namespace megamoe
