// tensor_rate.cu: wgmma on the same operands over and over; two warpgroups of a CTA fill each other's gaps.
#include <algorithm>
#include <limits>

#include "cuda/graph_timer.h"
#include "cuda/launch.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/tensor_rate.h"

namespace megamoe::sm90 {
namespace {

constexpr int kTokens = 128, kDepth = 64;  // of the second operand, in shared memory
constexpr int kSteps = kDepth / 16;        // of wgmma over that depth
constexpr int kUnroll = 4;                 // times that depth between two waits
constexpr int kRounds = 500;
constexpr int kWarpgroups = 2, kThreads = 128 * kWarpgroups;
constexpr double kFlops = 2.0 * 64 * kTokens * kDepth * kUnroll * kRounds * kWarpgroups;  // of a CTA

// Two BF16 of any sign and mantissa between 1/2 and 2 in magnitude: what switches transistors as real data
// does.
__device__ std::uint32_t random_pair(std::uint32_t seed) {
  std::uint32_t bits = seed * 0x9E3779B9u + 0x7F4A7C15u;
  bits = (bits ^ bits >> 15) * 0x85EBCA6Bu;
  bits = (bits ^ bits >> 13) * 0xC2B2AE35u;
  return ((bits ^ bits >> 16) & 0x80FF80FFu) | 0x3F003F00u;
}

__global__ void __launch_bounds__(kThreads, 1) tensor_rate_kernel(float* out) {
  __shared__ alignas(1024) std::uint32_t tokens[kTokens * kDepth / 2];
  for (int i = static_cast<int>(threadIdx.x); i < kTokens * kDepth / 2; i += kThreads) {
    tokens[i] = random_pair(static_cast<std::uint32_t>(i));
  }
  std::uint32_t a[kSteps][4];
#pragma unroll
  for (int i = 0; i < kSteps * 4; ++i) {
    a[i / 4][i % 4] = random_pair(0x10000u + threadIdx.x * kSteps * 4 + static_cast<unsigned>(i));
  }
  ptx::fence_async_proxy();
  __syncthreads();
  const ptx::Descriptor descriptor = ptx::Descriptor::swizzled(tokens);
  float acc[kTokens / 2] = {};
  for (int round = 0; round < kRounds; ++round) {
    ptx::wgmma_pin(acc);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kUnroll * kSteps; ++i) {
      // 16 BF16 further along the depth are 32 bytes, two units of the descriptor.
      ptx::wgmma<kTokens>(acc, a[i % kSteps], descriptor + i % kSteps * 32);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(acc);
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) sum += acc[i];
  out[blockIdx.x * kThreads + threadIdx.x] = sum;  // else there would be nothing to compute
}

}  // namespace

double tensor_rate(const cuda::Stream& stream) {
  const int blocks = cuda::device_info(cuda::current_device()).multiprocessors;
  const cuda::DeviceArray<float> out(static_cast<std::int64_t>(blocks) * kThreads);
  constexpr int kLaunches = 20;  // some 10 ms
  double least = std::numeric_limits<double>::max();
  for (int i = 0; i < 10; ++i) {
    const double seconds = cuda::stream_seconds(stream, [&] {
      for (int k = 0; k < kLaunches; ++k) {
        cuda::cuda_check(cuda::launch(tensor_rate_kernel, blocks, kThreads, 0, stream.get(), out.data()),
                         "measuring the tensor cores");
      }
    });
    if (i > 0) least = std::min(least, seconds);
  }
  return kFlops * blocks * kLaunches / least;
}

}  // namespace megamoe::sm90
