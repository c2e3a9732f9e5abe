// median.h: the middle one of measured values.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "base/check.h"

namespace megamoe {

// Of an even number of values the mean of the middle two. Throws kInvalidArgument where there are none.
inline double median(std::vector<double> values) {
  if (values.empty()) fail(ErrorCode::kInvalidArgument, "a median needs at least one value, got none");
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*std::max_element(values.begin(), middle) + *middle) / 2;
}

}  // namespace megamoe
