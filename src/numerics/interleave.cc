// interleave.cc: gate and up rows into groups of 8 and back.
#include "numerics/interleave.h"

#include <cstddef>
#include <cstring>

#include "base/check.h"
#include "megamoe/layout.h"

namespace megamoe {
namespace {

// Bytes of one group; 0 where there is nothing to move.
std::int64_t group_bytes(std::int64_t rows, std::int64_t row_bytes) {
  if (rows < 0 || rows % kInterleaveGroup != 0 || row_bytes < 0) {
    fail(ErrorCode::kInvalidArgument,
         "gate and up are interleaved in groups of {} rows: expected a multiple of that of at least 0 bytes "
         "each, got {} rows of {} bytes",
         kInterleaveGroup, rows, row_bytes);
  }
  checked_mul(checked_mul(rows, row_bytes), 2);
  return rows == 0 ? 0 : kInterleaveGroup * row_bytes;
}

}  // namespace

void interleave(const void* gate, const void* up, std::int64_t rows, std::int64_t row_bytes, void* out) {
  const std::int64_t bytes = group_bytes(rows, row_bytes);
  if (bytes == 0) return;
  for (std::int64_t i = 0; i < rows; i += kInterleaveGroup) {
    auto* to = static_cast<std::byte*>(out);
    std::memcpy(to + interleaved_gate(i) * row_bytes, static_cast<const std::byte*>(gate) + i * row_bytes,
                static_cast<std::size_t>(bytes));
    std::memcpy(to + interleaved_up(i) * row_bytes, static_cast<const std::byte*>(up) + i * row_bytes,
                static_cast<std::size_t>(bytes));
  }
}

void deinterleave(const void* in, std::int64_t rows, std::int64_t row_bytes, void* gate, void* up) {
  const std::int64_t bytes = group_bytes(rows, row_bytes);
  if (bytes == 0) return;
  for (std::int64_t i = 0; i < rows; i += kInterleaveGroup) {
    const auto* from = static_cast<const std::byte*>(in);
    std::memcpy(static_cast<std::byte*>(gate) + i * row_bytes, from + interleaved_gate(i) * row_bytes,
                static_cast<std::size_t>(bytes));
    std::memcpy(static_cast<std::byte*>(up) + i * row_bytes, from + interleaved_up(i) * row_bytes,
                static_cast<std::size_t>(bytes));
  }
}

}  // namespace megamoe
