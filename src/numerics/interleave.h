// interleave.h: where gate and up stand when the first GEMM computes them side by side.
//
// Layout    gate and up alternate in groups of 8, so that one tile of the product holds both halves of what
//           the activation joins:   g0..g7 u0..u7 g8..g15 u8..u15 ...
//           The same holds for the rows of the weights, their biases and the columns of the product.
//           Whole matrices: megamoe/layout.h.
#pragma once

#include <cstdint>

#include "numerics/hd.h"

namespace megamoe {

inline constexpr int kInterleaveGroup = 8;

// The place of gate i; up i follows kInterleaveGroup later.
MEGAMOE_HD constexpr std::int64_t interleaved_gate(std::int64_t i) {
  return i / kInterleaveGroup * kInterleaveGroup * 2 + i % kInterleaveGroup;
}
MEGAMOE_HD constexpr std::int64_t interleaved_up(std::int64_t i) {
  return interleaved_gate(i) + kInterleaveGroup;
}

}  // namespace megamoe
