// fuzz_target.h: what every fuzz target demands of the code under test.
#pragma once

#include <cstdlib>
#include <string_view>

#include "megamoe/error.h"

namespace megamoe::fuzz {

// Stops the fuzzer, which then keeps the input.
inline void require(bool condition) {
  if (!condition) std::abort();
}

// Runs `action`: for any input it must end well or with one line about the file, nothing else.
template <class Action>
void expect_success_or_invalid_file(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    const std::string_view message = error.what();
    require(error.code() == ErrorCode::kInvalidFile);
    require(message.size() < 1000 && message.find('\n') == std::string_view::npos);
  }
}

}  // namespace megamoe::fuzz
