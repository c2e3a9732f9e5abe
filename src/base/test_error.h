// test_error.h: what a call that should fail throws.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "megamoe/error.h"

namespace megamoe {

inline ErrorCode code_of(const std::function<void()>& call, std::string* message = nullptr) {
  try {
    call();
  } catch (const Error& error) {
    if (message != nullptr) *message = error.what();
    return error.code();
  }
  ADD_FAILURE() << "no error";
  return ErrorCode::kInternal;
}

}  // namespace megamoe
