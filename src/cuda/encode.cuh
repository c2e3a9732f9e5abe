// encode.cuh: blocks of 16 values to NVFP4 with the arithmetic that numerics/nvfp4.h defines, in fewer
// instructions.
//
// Division  x / d for 16 values under one d: from y = 1 / d (rounded) come q0 = x y and q1 = q0 + (x - q0 d)
// y with
//           fused multiply-adds. q1 can differ from the rounded quotient in its last bit, but never falls on
//           the other side of a midpoint of E2M1: tried for every significand of d and every x near the seven
//           midpoints. This needs d away from the ends of FP32's range; other blocks divide one by one.
// E2M1      for q < 8 a constant of 2^22 times q's power of two (at least 1) makes FP32's own rounding of q +
// constant
//           the rounding to E2M1's steps of 1/2, 1 and 2, ties to even. What the sum holds in its last bits
//           plus twice the exponent is the code.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "numerics/nvfp4.h"

namespace megamoe::cuda {

// Between these d, neither the quotient of a code's range nor its remainders underflow, nor does 1 / d.
inline constexpr float kFastDivisorMin = 0x1p-90f, kFastDivisorMax = 0x1p120f;

// `q` [0, infinity) or NaN, which counts as infinity: code in bits 2..0 plus 298, bits above 22 undefined.
__device__ inline std::uint32_t e2m1_biased(float q) {
  const float cut = fminf(q, 6.0f);
  const std::uint32_t exponent = __float_as_uint(cut) & 0x7F800000u;
  const std::uint32_t constant = max(exponent + (22u << 23), 149u << 23);
  const std::uint32_t sum = __float_as_uint(__fadd_rn(cut, __uint_as_float(constant)));
  return sum + (sum >> 22);
}
inline constexpr std::uint32_t kE2M1Bias = 298;

// E4M3 of a positive number within [2^-9, 448], and back.
__device__ inline std::uint8_t scale_to_e4m3(float x) {
  return static_cast<std::uint8_t>(__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3));
}
__device__ inline float scale_of_e4m3(std::uint8_t code) {
  // Exponent and mantissa in an FP16's place are the value times 2^-8, subnormals too.
  const __half_raw half{static_cast<unsigned short>(code << 7)};
  return __half2float(__half(half)) * 256.0f;
}

// The scale of a block of largest magnitude `a`, finite.
__device__ inline Nvfp4Scale block_scale(float a, float g) {
  const float wanted = __fdiv_rn(a, kE2M1Max * g);
  const float cut = fminf(fmaxf(wanted, kE4M3Min), kE4M3Max);
  const std::uint8_t code = a == 0.0f ? std::uint8_t{0x38} : scale_to_e4m3(cut);
  return {code, a != 0.0f && wanted > kE4M3Max * (1.0f + 0x1p-20f)};
}

// The codes of 16 finite values under d. value(i) is element i.
template <class Value>
__device__ inline uint2 encode_codes(const Value& value, float d) {
  std::uint32_t words[2];
  if (d >= kFastDivisorMin && d <= kFastDivisorMax) {
    const float y = __frcp_rn(d);
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      std::uint32_t pairs[4];
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        std::uint32_t biased[2], signs[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float x = value(w * 8 + p * 2 + i), a = fabsf(x);
          const float q0 = __fmul_rn(a, y);
          const float q1 = __fmaf_rn(__fmaf_rn(-q0, d, a), y, q0);
          biased[i] = e2m1_biased(q1);
          signs[i] = __float_as_uint(x);
        }
        // Two codes, one in each half.
        const std::uint32_t both = __byte_perm(biased[0], biased[1], 0x5410) - kE2M1Bias * 0x00010001u;
        const std::uint32_t sign = __byte_perm(signs[0], signs[1], 0x7632);
        pairs[p] = (both & 0x00070007u) | ((sign >> 12) & 0x00080008u);
      }
      const std::uint32_t a = pairs[0] | pairs[1] << 8, b = pairs[2] | pairs[3] << 8;
      words[w] = __byte_perm(a, b, 0x5410) | __byte_perm(a, b, 0x7632) << 4;
    }
  } else {
    words[0] = words[1] = 0;
#pragma unroll
    for (int i = 0; i < kNvfp4Block; ++i) {
      words[i / 8] |= static_cast<std::uint32_t>(nvfp4_code(value(i), d)) << (i % 8 * 4);
    }
  }
  return make_uint2(words[0], words[1]);
}

struct EncodedBlock {
  uint2 codes;
  Nvfp4Scale scale;
};

// A block whose largest magnitude has the bits `amax`, above or at kFloatInf if not all values are finite.
template <class Value>
__device__ inline EncodedBlock encode_block(const Value& value, std::uint32_t amax, float g) {
  if (amax >= kFloatInf) return {make_uint2(0, 0), {kE4M3NaN, false}};
  const Nvfp4Scale scale = block_scale(__uint_as_float(amax), g);
  return {encode_codes(value, scale_of_e4m3(scale.code) * g), scale};
}

}  // namespace megamoe::cuda
