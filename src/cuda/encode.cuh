// encode.cuh: blocks of 16 values to NVFP4 with the arithmetic that numerics/nvfp4.h defines, in fewer
// instructions.
//
// Division  x / d for 16 values under one d: from y = 1 / d (rounded) come q0 = x y and q1 = q0 + (x - q0 d)
// y with
//           fused multiply-adds. q1 can differ from the rounded quotient in its last bit, but never falls on
//           the other side of a midpoint of E2M1: tried for every significand of d and every x near the seven
//           midpoints. The same with one more step makes a block's scale. All this needs numbers away from
//           the ends of FP32's range; other blocks take the definition's own steps.
// E2M1      with u = |q| / 2 the code is the sum of 4 min(u, 1), 2 min(max(u - 1, 0), 1) and min(max(u - 2,
// 0), 1), each
//           rounded to an integer, ties to even: in every range one of them moves and the others are even
//           numbers. Cutting to [0, 1] is free, and rounding is what adding to 3 * 2^22 does. So all of it
//           runs on the multiply-add units, twice as many as those for integers, and the sum's last bits are
//           the code.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "numerics/fp8_tile.h"
#include "numerics/nvfp4.h"

namespace megamoe::cuda {

// Where the short division is used: with these tensor scales and largest magnitudes, and quotients up to
// kFastQuotient, no quotient, remainder or reciprocal leaves FP32's normal numbers as far as a code or a
// scale depends on it.
inline constexpr float kFastMin = 0x1p-80f, kFastMax = 0x1p100f, kFastQuotient = 0x1p20f;

// 1 / d, rounded; the steps that a compiler takes for normal numbers, without its tests.
__device__ inline float reciprocal(float d) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(d));
  return __fmaf_rn(__fmaf_rn(-d, y, 1.0f), y, y);
}
// One step towards a / b from `quotient`, y being 1 / b.
__device__ inline float refine(float quotient, float a, float b, float y) {
  return __fmaf_rn(__fmaf_rn(-b, quotient, a), y, quotient);
}

// The code of `u` = |q| / 2 >= 0 in the last bits of kRoundBits + code.
inline constexpr float kRound = 0x1.8p+23f;
inline constexpr std::uint32_t kRoundBits = 0x4B400000u;
__device__ inline std::uint32_t e2m1_biased(float u) {
  const float low = __saturatef(u), middle = __saturatef(__fadd_rn(u, -1.0f)),
              high = __saturatef(__fadd_rn(u, -2.0f));
  return __float_as_uint(__fadd_rn(high, __fmaf_rn(middle, 2.0f, __fmaf_rn(low, 4.0f, kRound))));
}

// E4M3 of a positive number within [2^-9, 448], and back.
__device__ inline std::uint8_t scale_to_e4m3(float x) {
  return static_cast<std::uint8_t>(__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3));
}
__device__ inline float scale_of_e4m3(std::uint8_t code) {
  // Exponent and mantissa in an FP16's place are the value times 2^-8, subnormals too.
  const __half_raw half{static_cast<unsigned short>(code << 7)};
  return __half2float(__half(half)) * 256.0f;
}

// What a code stands for under its block's scale: exact, and exact in BF16.
__device__ inline float decode_e2m1(std::uint32_t code, float scale) {
  // The magnitude's bits on the border of exponent and mantissa are the value times 2^-126.
  return __fmul_rn(__uint_as_float((code & 7u) << 22 | (code & 8u) << 28) * 0x1p126f, scale);
}
// Two of them, of adjacent codes.
__device__ inline std::uint32_t decode_pair(std::uint32_t codes, float scale) {
  const __nv_bfloat162 pair =
      __floats2bfloat162_rn(decode_e2m1(codes, scale), decode_e2m1(codes >> 4, scale));
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}
// The scale that decodes a block: NaN where it was not finite.
__device__ inline float decoding_scale(std::uint8_t code) {
  return code == kE4M3NaN ? __uint_as_float(0x7FC00000u) : scale_of_e4m3(code);
}

// Four values to E4M3 under the scale d of their group, as numerics/fp8_tile.h defines; the first in the low
// byte. The quotients are a compiler's own division, its reciprocal made once and its tests left out: in this
// range of d nothing underflows but what becomes 0 anyway.
__device__ inline std::uint32_t encode_fp8x4(const float (&x)[4], float d, bool all_finite) {
  float q[4];  // magnitudes
  if (d >= kFastMin && d <= kFastMax) {
    const float y = reciprocal(d);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float a = fabsf(x[i]);
      q[i] = refine(refine(__fmul_rn(a, y), a, d, y), a, d, y);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) q[i] = __fdiv_rn(fabsf(x[i]), d);
  }
  const auto pair = [](float low, float high) -> std::uint32_t {
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
  };
  std::uint32_t word = pair(q[0], q[1]) | pair(q[2], q[3]) << 16;
#pragma unroll
  for (int i = 0; i < 4; ++i) word |= __float_as_uint(x[i]) >> (24 - 8 * i) & (0x80u << (8 * i));
  if (all_finite) return word;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t byte = 0xFFu << (8 * i), nan = static_cast<std::uint32_t>(kE4M3NaN) << (8 * i);
    if (!is_finite(x[i])) word = (word & ~byte) | nan;
  }
  return word;
}

struct EncodedBlock {
  uint2 codes;
  Nvfp4Scale scale;
};

// By the definition's own steps. Hardly a block takes this way.
template <class Block>
__device__ EncodedBlock encode_slowly(const Block& values, float g) {
  float unpacked[kNvfp4Block];
#pragma unroll
  for (int i = 0; i < kNvfp4Block; ++i) unpacked[i] = values(i);
  std::uint8_t bytes[kNvfp4Block / 2];
  const Nvfp4Scale scale = nvfp4_quantize_block(unpacked, g, bytes);
  std::uint32_t words[2] = {0, 0};
  for (int i = 0; i < kNvfp4Block / 2; ++i)
    words[i / 4] |= static_cast<std::uint32_t>(bytes[i]) << (i % 4 * 8);
  return {make_uint2(words[0], words[1]), scale};
}

// The codes of a block's finite values under d, within the range above. values(i) is element i,
// values.signs(w) the signs of elements 8 w .. 8 w + 7, each in the highest bit of its nibble.
template <class Block>
__device__ inline uint2 encode_codes(const Block& values, float d) {
  std::uint32_t words[2];
  const float half = reciprocal(d) * 0.5f, twice = 2.0f * d;
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    // Eight codes, and the bias of each taken off in advance.
    std::uint32_t sum = 0u - kRoundBits * 0x11111111u;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float a = fabsf(values(w * 8 + i));
      sum += e2m1_biased(refine(__fmul_rn(a, half), a, twice, half)) << (4 * i);
    }
    words[w] = sum | values.signs(w);
  }
  return make_uint2(words[0], words[1]);
}

// The scale of a block of finite values whose largest magnitude has the bits `amax`. False, and nothing made,
// where the block needs the definition's own steps.
__device__ inline bool fast_scale(std::uint32_t amax, float g, Nvfp4Scale& scale) {
  const float a = __uint_as_float(amax), divisor = kE2M1Max * g;
  const float y = reciprocal(divisor);
  const float wanted = refine(refine(__fmul_rn(a, y), a, divisor, y), a, divisor, y);
  if (!(g >= kFastMin && g <= kFastMax && a <= kFastMax && (a >= kFastMin || amax == 0) &&
        wanted <= kFastQuotient)) {
    return false;
  }
  const float cut = fminf(fmaxf(wanted, kE4M3Min), kE4M3Max);
  scale = {amax == 0 ? std::uint8_t{0x38} : scale_to_e4m3(cut), wanted > kE4M3Max * (1.0f + 0x1p-20f)};
  return true;
}

// A block whose largest magnitude has the bits `amax`, above or at kFloatInf if not all values are finite.
// False, and nothing made, where the block needs encode_slowly.
template <class Block>
__device__ inline bool encode_fast(const Block& values, std::uint32_t amax, float g, EncodedBlock& out) {
  if (amax >= kFloatInf) {
    out = {make_uint2(0, 0), {kE4M3NaN, false}};
    return true;
  }
  if (!fast_scale(amax, g, out.scale)) return false;
  out.codes = encode_codes(values, scale_of_e4m3(out.scale.code) * g);
  return true;
}

// Four codes under d, as encode_codes makes them.
__device__ inline std::uint32_t encode_four(const float (&x)[4], float d) {
  const float half = reciprocal(d) * 0.5f, twice = 2.0f * d;
  std::uint32_t codes = 0u - kRoundBits * 0x1111u, signs = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float a = fabsf(x[i]);
    codes += e2m1_biased(refine(__fmul_rn(a, half), a, twice, half)) << (4 * i);
    signs |= __float_as_uint(x[i]) >> (28 - 4 * i) & (8u << (4 * i));
  }
  return codes | signs;
}

}  // namespace megamoe::cuda
