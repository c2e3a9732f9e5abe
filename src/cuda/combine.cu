// combine.cu: a thread adds up four columns of a token.
#include <cuda_bf16.h>

#include "cuda/combine.h"
#include "cuda/launch.h"

namespace megamoe::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kCols = 4;  // of a thread
constexpr int kTileCols = kThreads * kCols;
constexpr int kBatch = 4;  // slots whose loads are under way together

__device__ float add_product(float acc, float w, float y) { return __fadd_rn(acc, __fmul_rn(w, y)); }

__device__ std::uint32_t to_bf16x2(float low, float high) {
  return static_cast<std::uint32_t>(__bfloat16_as_ushort(__float2bfloat16_rn(low))) |
         static_cast<std::uint32_t>(__bfloat16_as_ushort(__float2bfloat16_rn(high))) << 16;
}

__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ CombineParams p, unsigned tiles, bool aligned) {
  await_previous_kernel();
  const std::int64_t token = blockIdx.x / tiles;
  const std::int64_t col = static_cast<std::int64_t>(blockIdx.x % tiles) * kTileCols + threadIdx.x * kCols;
  if (col >= p.hidden) return;
  const std::int32_t* rows = p.slot_to_row + token * p.top_k;
  const float* weights = p.weights + token * p.top_k;
  float4 acc = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int first = 0; first < p.top_k; first += kBatch) {
    // All loads of a batch before the first addition: they are what takes time.
    float4 y[kBatch];
    float w[kBatch];
    bool used[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int slot = first + i;
      const std::int64_t row = slot < p.top_k ? rows[slot] : -1;
      used[i] = row >= 0;
      if (!used[i]) continue;
      w[i] = weights[slot];
      y[i] = __ldcs(reinterpret_cast<const float4*>(p.expert_out + row * p.hidden + col));
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (!used[i]) continue;
      acc = make_float4(add_product(acc.x, w[i], y[i].x), add_product(acc.y, w[i], y[i].y),
                        add_product(acc.z, w[i], y[i].z), add_product(acc.w, w[i], y[i].w));
    }
  }
  if (p.shared != nullptr) {
    const float4 s = __ldcs(reinterpret_cast<const float4*>(p.shared + token * p.hidden + col));
    const float factor = p.shared_factors != nullptr ? p.shared_factors[token] : 1.0f;
    acc = make_float4(add_product(acc.x, factor, s.x), add_product(acc.y, factor, s.y),
                      add_product(acc.z, factor, s.z), add_product(acc.w, factor, s.w));
  }
  const uint2 y = make_uint2(to_bf16x2(acc.x, acc.y), to_bf16x2(acc.z, acc.w));
  bf16* out = p.y + token * p.y_stride + col;
  if (aligned) {
    *reinterpret_cast<uint2*>(out) = y;
  } else {
    out[0].bits = static_cast<std::uint16_t>(y.x);
    out[1].bits = static_cast<std::uint16_t>(y.x >> 16);
    out[2].bits = static_cast<std::uint16_t>(y.y);
    out[3].bits = static_cast<std::uint16_t>(y.y >> 16);
  }
}

}  // namespace

cudaError_t combine(const CombineParams& p, cudaStream_t stream) {
  const std::int64_t tiles = (p.hidden + kTileCols - 1) / kTileCols;
  const bool aligned = aligned_to(p.y, 8) && p.y_stride % kCols == 0;
  return launch_early(combine_kernel, p.tokens * tiles, kThreads, 0, stream, p, static_cast<unsigned>(tiles),
                      aligned);
}

}  // namespace megamoe::cuda
