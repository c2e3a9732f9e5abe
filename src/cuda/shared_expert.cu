// shared_expert.cu: a block multiplies a token by the gate.
#include "cuda/launch.h"
#include "cuda/shared_expert.h"
#include "numerics/bf16.h"
#include "numerics/exp.h"

namespace megamoe::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    prepare_shared_expert_kernel(const __grid_constant__ SharedExpertParams p) {
  await_previous_kernel();
  const std::int64_t token = blockIdx.x;
  if (p.offsets != nullptr && token == 0 && threadIdx.x < 2) p.offsets[threadIdx.x] = threadIdx.x * p.tokens;
  if (p.gate == nullptr) return;
  double sum = 0.0;
  for (std::int64_t k = threadIdx.x; k < p.hidden; k += kThreads)
    sum += static_cast<double>(to_float(p.x[token * p.row_stride + k])) * static_cast<double>(p.gate[k]);
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
  __shared__ double of_warp[kThreads / 32];
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < kThreads / 32; ++warp) sum += of_warp[warp];
  p.factors[token] = sigmoid_f32(static_cast<float>(sum));
}

}  // namespace

cudaError_t prepare_shared_expert(const SharedExpertParams& p, cudaStream_t stream) {
  const std::int64_t blocks = p.gate == nullptr && p.tokens > 0 ? 1 : p.tokens;
  return launch_early(prepare_shared_expert_kernel, blocks, kThreads, 0, stream, p);
}

}  // namespace megamoe::cuda
