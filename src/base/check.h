// check.h: the two ways to fail: `fail` for what a caller or a file got wrong, MEGAMOE_CHECK for our own
// bugs.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <limits>
#include <utility>

#include "megamoe/error.h"

namespace megamoe {

template <class... Args>
[[noreturn]] void fail(ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(code, fmt::format(format, std::forward<Args>(args)...));
}

// 64-bit size arithmetic that fails (kOutOfMemory) instead of wrapping around. Operands are >= 0.
inline std::int64_t checked_mul(std::int64_t a, std::int64_t b) {
  std::int64_t result;
  if (__builtin_mul_overflow(a, b, &result)) {
    fail(ErrorCode::kOutOfMemory, "a size of {} x {} does not fit in 64 bits", a, b);
  }
  return result;
}
inline std::int64_t checked_add(std::int64_t a, std::int64_t b) {
  std::int64_t result;
  if (__builtin_add_overflow(a, b, &result)) {
    fail(ErrorCode::kOutOfMemory, "a size of {} + {} does not fit in 64 bits", a, b);
  }
  return result;
}

}  // namespace megamoe

#define MEGAMOE_CHECK(condition)                                                                       \
  do {                                                                                                 \
    if (!(condition)) {                                                                                \
      ::megamoe::fail(::megamoe::ErrorCode::kInternal, "internal check failed at {}:{}: {}", __FILE__, \
                      __LINE__, #condition);                                                           \
    }                                                                                                  \
  } while (false)
