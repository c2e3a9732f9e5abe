// swizzle.h: the 128x4 order in which Blackwell's tensor cores read block scales.
//
// Layout    scales [rows, cols] (cols counts blocks) are cut into tiles of 128 rows by 4 columns, 512 bytes
//           each, tiles row-major. Within a tile, row r and column c lie at (r % 32) * 16 + (r / 32) * 4 + c.
//           Rows pad to 128 and columns to 4; padding is 0. Whole matrices: megamoe/layout.h.
#pragma once

#include <cstdint>

#include "numerics/hd.h"

namespace megamoe {

inline constexpr int kSwizzleRows = 128;
inline constexpr int kSwizzleCols = 4;

MEGAMOE_HD constexpr std::int64_t swizzled_offset(std::int64_t row, std::int64_t col, std::int64_t cols) {
  const std::int64_t tiles_across = (cols + kSwizzleCols - 1) / kSwizzleCols;
  const std::int64_t tile = row / kSwizzleRows * tiles_across + col / kSwizzleCols;
  const std::int64_t r = row % kSwizzleRows;
  return tile * kSwizzleRows * kSwizzleCols + r % 32 * 16 + r / 32 * 4 + col % kSwizzleCols;
}

}  // namespace megamoe
