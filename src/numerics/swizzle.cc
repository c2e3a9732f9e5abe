// swizzle.cc: whole matrices of block scales into the 128x4 order and back.
#include "numerics/swizzle.h"

#include <cstring>

#include "base/check.h"
#include "megamoe/layout.h"

namespace megamoe {

std::int64_t swizzled_bytes(std::int64_t rows, std::int64_t cols) {
  if (rows < 0 || cols < 0) {
    fail(ErrorCode::kInvalidArgument, "scales to swizzle must have sizes of 0 or more, got [{}, {}]", rows,
         cols);
  }
  const std::int64_t padded_rows = checked_add(rows, kSwizzleRows - 1) / kSwizzleRows * kSwizzleRows;
  const std::int64_t padded_cols = checked_add(cols, kSwizzleCols - 1) / kSwizzleCols * kSwizzleCols;
  return checked_mul(padded_rows, padded_cols);
}

void swizzle_scales(const std::uint8_t* in, std::int64_t rows, std::int64_t cols, std::uint8_t* out) {
  const std::int64_t bytes = swizzled_bytes(rows, cols);
  if (bytes == 0) return;
  std::memset(out, 0, static_cast<std::size_t>(bytes));
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) out[swizzled_offset(r, c, cols)] = in[r * cols + c];
  }
}

void unswizzle_scales(const std::uint8_t* in, std::int64_t rows, std::int64_t cols, std::uint8_t* out) {
  if (swizzled_bytes(rows, cols) == 0) return;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) out[r * cols + c] = in[swizzled_offset(r, c, cols)];
  }
}

}  // namespace megamoe
