// tensor_rate.cu: wgmma on the same operands over and over; two warpgroups of a CTA fill each other's gaps.
#include <algorithm>
#include <limits>
#include <type_traits>

#include "cuda/graph_timer.h"
#include "cuda/launch.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/tensor_rate.h"

namespace megamoe::sm90 {
namespace {

constexpr int kTokens = 128, kDepthBytes = 128;  // of the second operand, in shared memory
constexpr int kSteps = kDepthBytes / 32;         // of wgmma over that depth
constexpr int kUnroll = 4;                       // times that depth between two waits
constexpr int kRounds = 500;
constexpr int kWarpgroups = 2, kThreads = 128 * kWarpgroups;
// Of a CTA, with operands of so many bytes.
constexpr double flops(int size) {
  return 2.0 * 64 * kTokens * (kDepthBytes / size) * kUnroll * kRounds * kWarpgroups;
}

// Two BF16, or four E4M3, of any sign and mantissa between 1/2 and 2 in magnitude: what switches transistors
// as real data does.
template <class Element>
__device__ std::uint32_t random_word(std::uint32_t seed) {
  std::uint32_t bits = seed * 0x9E3779B9u + 0x7F4A7C15u;
  bits = (bits ^ bits >> 15) * 0x85EBCA6Bu;
  bits = (bits ^ bits >> 13) * 0xC2B2AE35u;
  bits ^= bits >> 16;
  return std::is_same_v<Element, ptx::Fp8> ? (bits & 0x8F8F8F8Fu) | 0x30303030u
                                           : (bits & 0x80FF80FFu) | 0x3F003F00u;
}

template <class Element>
__global__ void __launch_bounds__(kThreads, 1) tensor_rate_kernel(float* out) {
  __shared__ alignas(1024) std::uint32_t tokens[kTokens * kDepthBytes / 4];
  for (int i = static_cast<int>(threadIdx.x); i < kTokens * kDepthBytes / 4; i += kThreads) {
    tokens[i] = random_word<Element>(static_cast<std::uint32_t>(i));
  }
  std::uint32_t a[kSteps][4];
#pragma unroll
  for (int i = 0; i < kSteps * 4; ++i) {
    a[i / 4][i % 4] = random_word<Element>(0x10000u + threadIdx.x * kSteps * 4 + static_cast<unsigned>(i));
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
      ptx::wgmma<Element, kTokens>(acc, a[i % kSteps], descriptor + i % kSteps * 32);
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

double tensor_rate(OperandType type, const cuda::Stream& stream) {
  const bool fp8 = type == OperandType::kFp8;
  const auto kernel = fp8 ? tensor_rate_kernel<ptx::Fp8> : tensor_rate_kernel<ptx::Bf16>;
  const int blocks = cuda::device_info(cuda::current_device()).multiprocessors;
  const cuda::DeviceArray<float> out(static_cast<std::int64_t>(blocks) * kThreads);
  constexpr int kLaunches = 20;  // some 10 ms
  double least = std::numeric_limits<double>::max();
  for (int i = 0; i < 10; ++i) {
    const double seconds = cuda::stream_seconds(stream, [&] {
      for (int k = 0; k < kLaunches; ++k) {
        cuda::cuda_check(cuda::launch(kernel, blocks, kThreads, 0, stream.get(), out.data()),
                         "measuring the tensor cores");
      }
    });
    if (i > 0) least = std::min(least, seconds);
  }
  return flops(fp8 ? 1 : 2) * blocks * kLaunches / least;
}

}  // namespace megamoe::sm90
