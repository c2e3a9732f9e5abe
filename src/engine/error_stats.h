// error_stats.h: how far values are from what they should be.
#pragma once

#include <cstdint>
#include <span>

namespace megamoe {

struct ErrorStats {
  double norm = 0;             // L2 of the values
  double reference_norm = 0;   // L2 of the reference
  double relative = 0;         // L2 of the difference / reference_norm; 0 for two zeros, infinite over zero
  double snr_db = 0;           // -20 log10(relative); infinite where nothing differs
  double cosine = 1;           // 1 for two zeros
  double worst = 0;            // largest magnitude of a difference
  std::int64_t worst_at = 0;   // where, as an index into the values
  std::int64_t nonfinite = 0;  // values that are not finite; any makes the figures above NaN

  bool exact() const { return relative == 0; }
};

// Sums in FP64, in ascending order. Throws kInvalidArgument where the sizes differ.
ErrorStats compare(std::span<const float> values, std::span<const float> reference);

}  // namespace megamoe
