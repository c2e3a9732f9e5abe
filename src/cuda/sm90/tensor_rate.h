// tensor_rate.h: how fast Hopper's tensor cores multiply when nothing holds them up.
#pragma once

#include "cuda/device.h"
#include "cuda/sm90/weight_layout.h"

namespace megamoe::sm90 {

// Multiplications and additions in a second of wgmma on random operands that stay in registers and shared
// memory, on all multiprocessors: the best of a few times 10 ms. No GEMM of this instruction is faster.
double tensor_rate(OperandType type, const cuda::Stream& stream);

}  // namespace megamoe::sm90
