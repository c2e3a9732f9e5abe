// gather.cu: a thread copies 16 bytes.
#include "cuda/gather.h"
#include "cuda/launch.h"

namespace megamoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kElements = 8;  // of a thread

__global__ void __launch_bounds__(kThreads)
    gather_kernel(const uint4* x, std::int64_t row_vectors, const std::int32_t* row_map,
                  const __grid_constant__ RowCount rows, std::int64_t vectors, uint4* out) {
  await_previous_kernel();
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t row = at / vectors;
  if (row >= rows.count()) return;
  out[at] = x[row_map[row] * row_vectors + at % vectors];
}

}  // namespace

cudaError_t gather_rows(const bf16* x, std::int64_t row_stride, const std::int32_t* row_map,
                        const RowCount& rows, std::int64_t cols, bf16* out, cudaStream_t stream) {
  if (cols % kElements != 0 || row_stride % kElements != 0 || !aligned_to(x, 16) || !aligned_to(out, 16))
    return cudaErrorInvalidValue;
  const std::int64_t vectors = cols / kElements;
  return launch_early(gather_kernel, (rows.most * vectors + kThreads - 1) / kThreads, kThreads, 0, stream,
                      reinterpret_cast<const uint4*>(x), row_stride / kElements, row_map, rows, vectors,
                      reinterpret_cast<uint4*>(out));
}

}  // namespace megamoe::cuda
