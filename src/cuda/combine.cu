// combine.cu: a thread adds up four columns of a token.
#include "cuda/combine.cuh"

namespace megamoe::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kTileCols = kThreads * kCombineCols;

__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ CombineParams p, unsigned tiles, bool aligned) {
  await_previous_kernel();
  const std::int64_t token = blockIdx.x / tiles;
  const std::int64_t col =
      static_cast<std::int64_t>(blockIdx.x % tiles) * kTileCols + threadIdx.x * kCombineCols;
  if (col >= p.hidden) return;
  combine_four(p, token, col, aligned);
}

}  // namespace

cudaError_t combine(const CombineParams& p, cudaStream_t stream) {
  const std::int64_t tiles = (p.hidden + kTileCols - 1) / kTileCols;
  return launch_early(combine_kernel, p.tokens * tiles, kThreads, 0, stream, p, static_cast<unsigned>(tiles),
                      combines_aligned(p));
}

}  // namespace megamoe::cuda
