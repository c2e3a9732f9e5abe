// gather.h: rows of a matrix in another order, on the GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/quantize.h"
#include "megamoe/types.h"

namespace megamoe::cuda {

// Row r of `out` [rows, cols], contiguous, is row row_map[r] of x, whose rows are `row_stride` elements
// apart; columns a multiple of 8. Both at multiples of 16 bytes, else cudaErrorInvalidValue.
cudaError_t gather_rows(const bf16* x, std::int64_t row_stride, const std::int32_t* row_map,
                        const RowCount& rows, std::int64_t cols, bf16* out, cudaStream_t stream);

}  // namespace megamoe::cuda
