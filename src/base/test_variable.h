// test_variable.h: an environment variable for the length of a test.
#pragma once

#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>

namespace megamoe {

// Sets the variable for a scope.
class ForcedVariable {
 public:
  ForcedVariable(const char* name, std::string_view value) : name_(name) {
    if (const char* old = std::getenv(name)) before_ = old;
    setenv(name, std::string(value).c_str(), 1);
  }
  ~ForcedVariable() {
    if (before_) {
      setenv(name_, before_->c_str(), 1);
    } else {
      unsetenv(name_);
    }
  }
  ForcedVariable(const ForcedVariable&) = delete;
  ForcedVariable& operator=(const ForcedVariable&) = delete;

 private:
  const char* name_;
  std::optional<std::string> before_;
};

}  // namespace megamoe
