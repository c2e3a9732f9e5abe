// test_kernel.h: runs a test with a kernel of its choice.
#pragma once

#include "base/test_variable.h"

namespace megamoe::cpu {

struct ForcedKernel : ForcedVariable {
  explicit ForcedKernel(std::string_view name) : ForcedVariable("MEGAMOE_CPU_KERNEL", name) {}
};

}  // namespace megamoe::cpu
