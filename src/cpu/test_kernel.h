// test_kernel.h: runs a test with a kernel of its choice.
#pragma once

#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>

namespace megamoe::cpu {

// Sets MEGAMOE_CPU_KERNEL for a scope.
class ForcedKernel {
 public:
  explicit ForcedKernel(std::string_view name) {
    if (const char* old = std::getenv(kVariable)) before_ = old;
    setenv(kVariable, std::string(name).c_str(), 1);
  }
  ~ForcedKernel() {
    if (before_) {
      setenv(kVariable, before_->c_str(), 1);
    } else {
      unsetenv(kVariable);
    }
  }
  ForcedKernel(const ForcedKernel&) = delete;
  ForcedKernel& operator=(const ForcedKernel&) = delete;

 private:
  static constexpr const char* kVariable = "MEGAMOE_CPU_KERNEL";
  std::optional<std::string> before_;
};

}  // namespace megamoe::cpu
