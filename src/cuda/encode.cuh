// encode.cuh: blocks of 16 values to NVFP4 with the arithmetic that numerics/nvfp4.h defines, in fewer
// instructions.
//
// Division: x / d for 16 values under one d. From y = 1 / d, rounded, come q0 = x y and q1 = q0 + (x - q0 d)
// y with fused multiply-adds. q1 can differ from the rounded quotient in its last bit, but never falls on the
// other side of a midpoint of E2M1: tried for every significand of d and every x near the seven midpoints.
// The same with one more step makes a block's scale. All this needs numbers away from the ends of FP32's
// range; other blocks take the definition's own steps.
//
// Codes of a block: cut to FP16, where 2^-14 stands for 1, a quotient has its code on the border of exponent
// and mantissa, FP16's subnormals being E2M1's; half a code added to the bits rounds two at a time, ties away
// from zero. Quotients a last bit smaller tell ties, which go to even codes.
//
// BF16 and FP16: so few bits hardly put a number near a midpoint, and the significand of a block's scale has
// but eight values. A row's Midpoints say beforehand which way such numbers go; products by 1 / d, shifted a
// little that way, take the place of quotients.
//
// Codes of four values: with u = |q| / 2 a code is the sum of 4 min(u, 1), 2 min(max(u - 1, 0), 1) and
// min(max(u - 2, 0), 1), each rounded to an integer, ties to even: in every range one of them moves and the
// others are even numbers. Cutting to [0, 1] is free, and rounding is what adding to 3 * 2^22 does.
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

// How numbers of kSpareBits bits fewer than FP32's compare, divided by d, with E2M1's midpoints, which are 1,
// 3, 5 and 7 times powers of two. Next to m d there is one such number, but for a power of two.
struct MidpointSide {
  bool near;  // within 16 units in the last place of FP32 of m d: products by 1 / d, off by less than 4, may
              // be wrong
  bool up;    // whether its quotient, rounded, goes to the code above
};
template <int kSpareBits>
__device__ inline MidpointSide midpoint_side(float d, int m) {
  const auto factor = static_cast<float>(m);
  const std::uint32_t bits = __float_as_uint(__fmul_rn(factor, d));
  const std::uint32_t number = (bits + (1u << (kSpareBits - 1))) & ~((1u << kSpareBits) - 1u);
  const float x = __uint_as_float(number), y = reciprocal(d), quotient = refine(__fmul_rn(x, y), x, d, y);
  // The codes above the midpoints of 3 and 7 are even.
  return {bits - number + 16u <= 32u, quotient > factor || (quotient == factor && m % 4 == 3)};
}

// What is so of each m (1, 3, 5, 7: bits 0 to 3).
struct MidpointSides {
  std::uint32_t up, down;
};

// midpoint_side() under a tensor scale g and every scale with an exponent: four bits for each significand.
template <int kSpareBits>
class Midpoints {
 public:
  // The lanes of a warp call it together.
  explicit __device__ Midpoints(float g) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const MidpointSide side =
        midpoint_side<kSpareBits>(static_cast<float>(8 + lane / 4) * g, lane % 4 * 2 + 1);
    up_ = __ballot_sync(~0u, side.near && side.up);
    down_ = __ballot_sync(~0u, side.near && !side.up);
  }
  __device__ MidpointSides sides(std::uint8_t scale) const {
    const int shift = scale % 8 * 4;
    return {up_ >> shift & 15u, down_ >> shift & 15u};
  }

 private:
  std::uint32_t up_, down_;
};
template <>
class Midpoints<0> {
 public:
  explicit __device__ Midpoints(float) {}
};

// Two floats cut to FP16, the first in the low half.
__device__ inline std::uint32_t cut_to_fp16(float low, float high) {
  std::uint32_t pair;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

inline constexpr std::uint32_t kHalfCodes = 0x01000100u, kCodes = 0x0E000E00u, kOddCodes = 0x02000200u;

// Eight codes from pairs of elements i and i + 4, in bits 9 to 11 of each half.
__device__ inline std::uint32_t join_codes(const std::uint32_t (&pairs)[4]) {
  const std::uint32_t early = pairs[0] + pairs[1] * 16, late = pairs[2] + pairs[3] * 16;
  return early >> 9 | late >> 1;
}

// The codes of a block under d, by quotients. kCut: they may be 7 or more.
template <bool kCut, class Block>
__device__ inline uint2 encode_quotients(const Block& values, float d) {
  std::uint32_t words[2];
  const float y = reciprocal(d) * 0x1p-14f, divisor = d * 0x1p+14f;
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    std::uint32_t codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float q[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float a = fabsf(values(w * 8 + i + 4 * j));
        if constexpr (kCut) a = fminf(a, 6.0f * d);
        q[j] = refine(__fmul_rn(a, y), a, divisor, y);
      }
      constexpr float kSmaller = 0x1.fffffep-1f;
      const std::uint32_t up = (cut_to_fp16(q[0], q[1]) + kHalfCodes) & kCodes;
      const std::uint32_t down =
          cut_to_fp16(__fmul_rn(q[0], kSmaller), __fmul_rn(q[1], kSmaller)) + kHalfCodes;
      codes[i] = up - (up & ~down & kOddCodes);
    }
    words[w] = join_codes(codes) | values.signs(w);
  }
  return make_uint2(words[0], words[1]);
}
// A call, for it is rare.
template <class Block>
static __device__ __noinline__ uint2 encode_rare_block(const Block values, float d) {
  return encode_quotients<true>(values, d);
}

// Elements i and i + 4 of a word's eight: codes in bits 9 to 11 of each half, of products, ties away from
// zero.
template <class Block>
__device__ inline std::uint32_t pair_of_products(const Block& values, int first, float y) {
  return (cut_to_fp16(__fmul_rn(fabsf(values(first)), y), __fmul_rn(fabsf(values(first + 4)), y)) +
          kHalfCodes) &
         kCodes;
}

// The codes of a block under d, its quotients below 7, by products. Sides of 1 and 5, and those of 3 and 7,
// agree.
template <class Block>
__device__ inline uint2 encode_by_products(const Block& values, float d, const MidpointSides& sides) {
  constexpr float kShift = 0x1p-21f;
  const float exact = reciprocal(d) * 0x1p-14f;
  const float y = __fmaf_rn(exact, sides.up != 0 ? kShift : sides.down != 0 ? -kShift : 0.0f, exact);
  std::uint32_t codes[2][4];
#pragma unroll
  for (int i = 0; i < 8; ++i) codes[i / 4][i % 4] = pair_of_products(values, i / 4 * 8 + i % 4, y);
  if (sides.up != 0 && sides.down != 0) {
    // Some go up and some down: midpoints of 1 and 5 lie above even codes, those of 3 and 7 above odd ones.
    const float smaller = __fmaf_rn(exact, -kShift, exact);
    const std::uint32_t even_up = (sides.up & 5u) != 0 ? kOddCodes : 0u;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      std::uint32_t& code = codes[i / 4][i % 4];
      const std::uint32_t down = pair_of_products(values, i / 4 * 8 + i % 4, smaller);
      code = down + ((code - down) & (down ^ even_up));
    }
  }
  return make_uint2(join_codes(codes[0]) | values.signs(0), join_codes(codes[1]) | values.signs(1));
}

// The codes of a block's finite values, the largest of which has the bits `amax`, under d = scale times a
// tensor scale, within the range above. values(i) is element i, values.signs(w) the signs of elements 8 w ..
// 8 w + 7, each in the highest bit of its nibble; Block::kSpareBits says how many bits fewer than FP32's they
// have, and `sides` how they lie beside midpoints.
template <class Block>
__device__ inline uint2 encode_codes(const Block& values, std::uint32_t amax, float d,
                                     const MidpointSides& sides) {
  const bool small = __uint_as_float(amax) < 6.5f * d;
  if constexpr (Block::kSpareBits > 0) {
    // The two midpoints that share a parity: one up, one down?
    const bool mixed = ((sides.up & 5u) != 0 && (sides.down & 5u) != 0) ||
                       ((sides.up & 10u) != 0 && (sides.down & 10u) != 0);
    return small && !mixed ? encode_by_products(values, d, sides) : encode_rare_block(values, d);
  } else {
    return small ? encode_quotients<false>(values, d) : encode_rare_block(values, d);
  }
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
__device__ inline bool encode_fast(const Block& values, std::uint32_t amax, float g,
                                   const Midpoints<Block::kSpareBits>& midpoints, EncodedBlock& out) {
  if (amax >= kFloatInf) {
    out = {make_uint2(0, 0), {kE4M3NaN, false}};
    return true;
  }
  if (!fast_scale(amax, g, out.scale)) return false;
  const float d = scale_of_e4m3(out.scale.code) * g;
  if constexpr (Block::kSpareBits > 0) {
    // Scales without an exponent are too rare for a table.
    out.codes = out.scale.code >= 8 ? encode_codes(values, amax, d, midpoints.sides(out.scale.code))
                                    : encode_rare_block(values, d);
  } else {
    out.codes = encode_codes(values, amax, d, {});
  }
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
