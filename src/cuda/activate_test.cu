// activate_test.cu: runs the device's activations alone, for the tests.
#include <cuda_bf16.h>

#include "cuda/activate.cuh"
#include "cuda/activate_test.h"
#include "cuda/launch.h"

namespace megamoe::cuda {
namespace {

constexpr int kThreads = 256, kGrid = 4096;

__device__ std::uint32_t ulps_between(float a, float b) {
  return static_cast<std::uint32_t>(
      abs(static_cast<std::int32_t>(bits_of_float(a)) - static_cast<std::int32_t>(bits_of_float(b))));
}

__global__ void sigmoid_kernel(SigmoidErrors* worst) {
  std::uint32_t sigmoid = 0, silu = 0;
  for (std::uint64_t bits = blockIdx.x * kThreads + threadIdx.x; bits < 1ull << 32;
       bits += kGrid * kThreads) {
    const float z = float_of_bits(static_cast<std::uint32_t>(bits));
    if (!(z >= kLeastGate)) continue;
    const float s = near_sigmoid(z), product = __fmul_rn(z, s);
    sigmoid = max(sigmoid, ulps_between(s, sigmoid_f32(z)));
    if (fabsf(product) > 0x1p-100f) silu = max(silu, ulps_between(product, silu_f32(z)));
  }
  atomicMax(&worst->sigmoid, sigmoid);
  atomicMax(&worst->silu, silu);
  worst->sigmoid_allowed = kSigmoidUlps, worst->silu_allowed = kSiluUlps;
}

// Some bits that depend on all of `seed`'s.
__device__ std::uint32_t mixed(std::uint64_t seed) {
  seed = (seed ^ seed >> 31) * 0x9E3779B97F4A7C15ull;
  seed = (seed ^ seed >> 29) * 0xD6E8FEB86659FD93ull;
  return static_cast<std::uint32_t>(seed >> 32);
}
__device__ std::uint32_t bf16_of(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }

template <bool kByAny>
__global__ void near_kernel(ActivationConfig config, Gates gates, std::int64_t count, NearCounts* counts) {
  std::uint32_t wrong = 0, told = 0;
  for (std::int64_t i = blockIdx.x * kThreads + threadIdx.x; i < count; i += kGrid * kThreads) {
    float gate[2][4], up[2][4], h[2][4];
    for (int j = 0; j < 8; ++j) {
      float &g = gate[j / 4][j % 4], &u = up[j / 4][j % 4];
      const std::uint32_t first = mixed(16 * i + j), second = mixed(16 * i + j + 8);
      // Any bits; or numbers as layers have them.
      const auto number = [&](std::uint32_t bits, float unit) {
        return gates == Gates::kAnyBits ? float_of_bits(bits)
                                        : static_cast<float>(static_cast<int>(bits)) * unit;
      };
      g = number(first, 0x1p-29f), u = number(second, 0x1p-30f);
      if (gates == Gates::kBesideMidpoints) {
        // An `up` whose h is a few last bits from a midpoint of two BF16 numbers, itself among them.
        const ActivatedPair pair = activate(config, g, u);
        const float midpoint = float_of_bits((bits_of_float(pair.h) & 0xFFFF0000u) | 0x8000u);
        const float wanted = __fdiv_rn(midpoint, pair.gate);
        u = float_of_bits(bits_of_float(config.kind == Activation::kGptOss ? wanted - 1.0f : wanted) +
                          second % 129u - 64u);
      }
      h[j / 4][j % 4] = activate(config, g, u).h;
    }
    const bool sure =
        kByAny ? activate_nearly_by(StepsOfAny(config), gate, up) : activate_nearly(config, gate, up);
    if (!sure) continue;
    ++told;
    for (int j = 0; j < 8; ++j) wrong += bf16_of(up[j / 4][j % 4]) != bf16_of(h[j / 4][j % 4]);
  }
  atomicAdd(&counts->wrong, static_cast<unsigned long long>(wrong));
  atomicAdd(&counts->told, static_cast<unsigned long long>(told));
}

}  // namespace

cudaError_t sigmoid_errors_for_test(SigmoidErrors* worst) {
  return launch(sigmoid_kernel, kGrid, kThreads, 0, nullptr, worst);
}
cudaError_t activate_nearly_for_test(const ActivationConfig& config, bool by_any, Gates gates,
                                     std::int64_t count, NearCounts* counts) {
  return launch(by_any ? near_kernel<true> : near_kernel<false>, kGrid, kThreads, 0, nullptr, config, gates,
                count, counts);
}

}  // namespace megamoe::cuda
