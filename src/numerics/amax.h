// amax.h: the largest finite magnitude of a matrix, from which its tensor scale is made.
#pragma once

#include "megamoe/types.h"

namespace megamoe {

// 0 for a matrix without a finite element other than zero.
float tensor_amax(MatrixView<const float> x);
float tensor_amax(MatrixView<const bf16> x);

}  // namespace megamoe
