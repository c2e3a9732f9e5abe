// bf16_pair.cuh: two BF16 numbers in a word, the first in its low half.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace megamoe::cuda {

__device__ inline std::uint32_t bf16_pair(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}
__device__ inline float first_of(std::uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float second_of(std::uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// Their magnitudes, and the bits of the larger of two such as FP32.
inline constexpr std::uint32_t kPairMagnitudes = 0x7FFF7FFFu;
__device__ inline std::uint32_t larger_of(std::uint32_t magnitudes) {
  return max(magnitudes << 16, magnitudes & 0xFFFF0000u);
}

}  // namespace megamoe::cuda
