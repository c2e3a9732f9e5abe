#include "engine/error_stats.h"

#include <cmath>
#include <limits>

#include "base/check.h"

namespace megamoe {

ErrorStats compare(std::span<const float> values, std::span<const float> reference) {
  if (values.size() != reference.size()) {
    fail(ErrorCode::kInvalidArgument, "cannot compare {} values with {}", values.size(), reference.size());
  }
  ErrorStats stats;
  double value_sum = 0, reference_sum = 0, difference_sum = 0, product_sum = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double value = values[i], expected = reference[i], difference = value - expected;
    // The first value that is not finite is the worst of all.
    if (!std::isfinite(difference) && stats.nonfinite++ == 0) stats.worst_at = static_cast<std::int64_t>(i);
    value_sum += value * value;
    reference_sum += expected * expected;
    difference_sum += difference * difference;
    product_sum += value * expected;
    if (stats.nonfinite == 0 && std::abs(difference) > stats.worst) {
      stats.worst = std::abs(difference);
      stats.worst_at = static_cast<std::int64_t>(i);
    }
  }
  stats.norm = std::sqrt(value_sum);
  stats.reference_norm = std::sqrt(reference_sum);
  if (stats.nonfinite > 0) {
    stats.relative = stats.snr_db = stats.cosine = stats.worst = std::numeric_limits<double>::quiet_NaN();
    return stats;
  }
  const bool zeros = value_sum == 0 && reference_sum == 0;
  stats.relative = difference_sum == 0 ? 0 : std::sqrt(difference_sum) / stats.reference_norm;
  stats.snr_db = -20 * std::log10(stats.relative);
  // The product of the norms' squares could overflow or underflow; that of the norms does not.
  stats.cosine = zeros ? 1 : product_sum == 0 ? 0 : product_sum / (stats.norm * stats.reference_norm);
  return stats;
}

}  // namespace megamoe
