#include "numerics/swizzle.h"

#include <cstring>

#include "base/aligned_buffer.h"
#include "base/check.h"

namespace megamoe {

std::int64_t swizzled_bytes(std::int64_t rows, std::int64_t cols) {
  const std::int64_t padded_rows = checked_add(rows, kSwizzleRows - 1) / kSwizzleRows * kSwizzleRows;
  const std::int64_t padded_cols = checked_add(cols, kSwizzleCols - 1) / kSwizzleCols * kSwizzleCols;
  return checked_mul(padded_rows, padded_cols);
}

void swizzle_scales(const std::uint8_t* in, std::int64_t rows, std::int64_t cols, std::uint8_t* out) {
  if (rows == 0 || cols == 0) return;
  std::memset(out, 0, static_cast<std::size_t>(swizzled_bytes(rows, cols)));
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) out[swizzled_offset(r, c, cols)] = in[r * cols + c];
  }
}

void unswizzle_scales(const std::uint8_t* in, std::int64_t rows, std::int64_t cols, std::uint8_t* out) {
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) out[r * cols + c] = in[swizzled_offset(r, c, cols)];
  }
}

}  // namespace megamoe
