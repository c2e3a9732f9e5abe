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
// and mantissa, FP16's subnormals being E2M1's; half a code added to the bits rounds, ties away from zero.
// Quotients a last bit smaller tell ties, which go to even codes.
//
// BF16 and FP16: so few bits hardly put a number near a midpoint, and the significand of a block's scale has
// but eight values. A row's RowEncoder works out for each which way such numbers go; products by 1 / d,
// shifted a little that way, take the place of quotients.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "cuda/bf16_pair.cuh"
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

// E4M3 of a positive number, cut to 448 (what becomes of those below 2^-9 and of NaN is not used), and back.
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
  return bf16_pair(decode_e2m1(codes, scale), decode_e2m1(codes >> 4, scale));
}
// The scale that decodes a block: NaN where it was not finite.
__device__ inline float decoding_scale(std::uint8_t code) {
  return code == kE4M3NaN ? __uint_as_float(0x7FC00000u) : scale_of_e4m3(code);
}

// numerics/fp8_tile.h: the scale of a group of 128 and codes of its values, which are BF16, where its largest
// magnitude is within these bounds and the values are finite. Nothing underflows but what becomes 0 anyway.
inline constexpr float kFastTileMin = 0x1p-70f, kFastTileMax = kFastMax;
__device__ inline float fast_tile_scale(float amax) {
  constexpr float kReciprocal = 1.0f / kE4M3Max;  // one step is enough with it, for every significand
  return refine(__fmul_rn(amax, kReciprocal), amax, kE4M3Max, kReciprocal);
}
// 1 / d in two parts: a number not above it, and what is missing, so that for zeros, too, both products have
// the same sign. With a BF16's few bits they add up to the rounded quotient: Fp8RowsTest tries every
// significand of both.
struct TileFactor {
  float near, rest;

  __device__ float times(float x) const { return __fmaf_rn(x, near, __fmul_rn(x, rest)); }
};
__device__ inline TileFactor tile_factor(float d) {
  float y = reciprocal(d);
  if (__fmaf_rn(-d, y, 1.0f) < 0.0f) y = __uint_as_float(__float_as_uint(y) - 1);
  return {y, __fmul_rn(__fmaf_rn(-d, y, 1.0f), y)};
}
// E4M3 of two quotients, the first in the low byte.
__device__ inline std::uint32_t e4m3_pair(float first, float second) {
  return __nv_cvt_float2_to_fp8x2(make_float2(first, second), __NV_SATFINITE, __NV_E4M3);
}
// Codes of four values, the first in the low byte.
__device__ inline std::uint32_t fast_tile_codes(const float (&x)[4], const TileFactor& factor) {
  return e4m3_pair(factor.times(x[0]), factor.times(x[1])) | e4m3_pair(factor.times(x[2]), factor.times(x[3]))
                                                                 << 16;
}
// The same for all others, by the definition. Calls, for they are rare.
static __device__ __noinline__ float rare_tile_scale(float amax) { return fp8_tile_scale(amax); }
static __device__ __noinline__ std::uint32_t rare_tile_codes(float4 x, float d) {
  return fp8_code(x.x, d) | fp8_code(x.y, d) << 8 | fp8_code(x.z, d) << 16 |
         static_cast<std::uint32_t>(fp8_code(x.w, d)) << 24;
}
// Scales and codes of fours of kGroups groups: of values x, which are finite where `finite`, and groups'
// largest finite magnitudes, which all lanes of a group pass.
template <int kGroups>
__device__ inline void encode_tiles(const float (&x)[kGroups][4], const std::uint32_t (&amax)[kGroups],
                                    bool finite, float (&d)[kGroups], std::uint32_t (&codes)[kGroups]) {
  bool fast = finite;
#pragma unroll
  for (int k = 0; k < kGroups; ++k) {
    const float a = __uint_as_float(amax[k]);
    fast = fast && a >= kFastTileMin && a <= kFastTileMax;
  }
  if (fast) {
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
      d[k] = fast_tile_scale(__uint_as_float(amax[k]));
      codes[k] = fast_tile_codes(x[k], tile_factor(d[k]));
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < kGroups; ++k) {
    d[k] = rare_tile_scale(__uint_as_float(amax[k]));
    codes[k] = rare_tile_codes(make_float4(x[k][0], x[k][1], x[k][2], x[k][3]), d[k]);
  }
}

struct EncodedBlock {
  uint2 codes;
  Nvfp4Scale scale;
};

// By the definition's own steps. A call, for hardly a block takes this way.
template <class Block>
static __device__ __noinline__ EncodedBlock encode_slowly(const Block values, float g) {
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

// Two floats cut to FP16, the first in the low half.
__device__ inline std::uint32_t cut_to_fp16(float low, float high) {
  std::uint32_t pair;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Two of them cut to 6, the largest code's, their signs kept.
__device__ inline std::uint32_t cut_to_six(std::uint32_t pair) {
  constexpr std::uint32_t kSixes = 0x0E000E00u;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  std::uint32_t cut;
  asm("min.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(cut) : "r"(pair), "r"(kSixes));
  return cut;
#else
  return __vminu2(pair & kPairMagnitudes, kSixes) | (pair & 0x80008000u);
#endif
}

// Codes of four quotients as bytes: sign, three zeros, code, and the bit that says how to round.
__device__ inline std::uint32_t upper_bytes(std::uint32_t first, std::uint32_t second) {
  return __byte_perm(first, second, 0x7531);
}
inline constexpr std::uint32_t kHalfCodes = 0x01010101u;  // rounds them

// The even ones where codes differ, `up` being the next to `down`.
__device__ inline std::uint32_t even_of(std::uint32_t up, std::uint32_t down) {
  return up - (up & ~down & 2 * kHalfCodes);
}

// Eight codes from the bytes of elements 0, 2, 4, 6 and of elements 1, 3, 5, 7.
__device__ inline std::uint32_t join_codes(std::uint32_t even, std::uint32_t odd) {
  const auto choose = [](std::uint32_t mask, std::uint32_t a, std::uint32_t b) {
    return ((a ^ b) & mask) ^ b;
  };
  return choose(0x0F0F0F0Fu, choose(0x08080808u, even >> 4, even >> 1), choose(0x80808080u, odd, odd << 3));
}

// The codes of a block under d, by quotients. `large`: they may be 7 or more.
template <class Block>
__device__ inline uint2 encode_quotients(const Block& values, float d, bool large) {
  std::uint32_t bytes[4];  // of each half's even and odd elements
  const float y = reciprocal(d) * 0x1p-14f, divisor = d * 0x1p+14f;
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    float q[4], smaller[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = values(b / 2 * 8 + b % 2 + 2 * i), a = fabsf(x);
      q[i] = copysignf(refine(__fmul_rn(a, y), a, divisor, y), x);
      smaller[i] = __fmul_rn(q[i], 0x1.fffffep-1f);
    }
    const auto rounded = [&](const float(&of)[4]) {
      std::uint32_t first = cut_to_fp16(of[0], of[1]), second = cut_to_fp16(of[2], of[3]);
      if (large) first = cut_to_six(first), second = cut_to_six(second);
      return upper_bytes(first, second) + kHalfCodes;
    };
    bytes[b] = even_of(rounded(q), rounded(smaller));
  }
  return make_uint2(join_codes(bytes[0], bytes[1]), join_codes(bytes[2], bytes[3]));
}

// How numbers of kSpareBits bits fewer than FP32's compare, divided by d, with E2M1's midpoints, which are m
// = 1, 3, 5 and 7 times powers of two. Next to m d there is one such number, but for a power of two.
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

// Midpoints next to which there is a number, by its side: m in bit 4 (m - 1).
struct MidpointSides {
  std::uint32_t up, down;
};

// By what encode_by_products() multiplies: 2^-14 / d, shifted so that numbers next to midpoints go to their
// sides; negative if that is the side of the even code, as of ties; 0 if it is none of these.
__device__ inline float product_factor(float d, const MidpointSides& sides) {
  constexpr float kShift = 0x1p-21f;
  constexpr std::uint32_t kBelowOdd = 0x00010001u, kBelowEven = 0x01000100u;
  const float y = reciprocal(d) * 0x1p-14f, up = __fmaf_rn(y, kShift, y);
  if (sides.down == 0) return up;
  if (sides.up == 0) return __fmaf_rn(y, -kShift, y);
  return (sides.up & kBelowOdd) == 0 && (sides.down & kBelowEven) == 0 ? -up : 0.0f;
}

// The codes of a block. `some_negative`: a lane's factor is. `large`: quotients may be 7 or more.
template <class Block>
__device__ inline uint2 encode_by_products(const Block& values, float factor, bool some_negative,
                                           bool large) {
  std::uint32_t bytes[4];  // of each half's even and odd elements
  const auto rounded = [&](int b, float y) {
    std::uint32_t pairs[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int first = b / 2 * 8 + b % 2 + 4 * i;
      pairs[i] = cut_to_fp16(__fmul_rn(values(first), y), __fmul_rn(values(first + 2), y));
      if (large) pairs[i] = cut_to_six(pairs[i]);
    }
    return upper_bytes(pairs[0], pairs[1]) + kHalfCodes;
  };
#pragma unroll
  for (int b = 0; b < 4; ++b) bytes[b] = rounded(b, fabsf(factor));
  if (some_negative) {
    const float down = factor < 0.0f ? __fmul_rn(-factor, 1.0f - 0x1p-20f) : factor;
#pragma unroll
    for (int b = 0; b < 4; ++b) bytes[b] = even_of(bytes[b], rounded(b, down));
  }
  return make_uint2(join_codes(bytes[0], bytes[1]), join_codes(bytes[2], bytes[3]));
}

// a / 6 g, rounded.
class ScaleQuotient {
 public:
  explicit __device__ ScaleQuotient(float g) : divisor_(kE2M1Max * g), y_(reciprocal(divisor_)) {}
  __device__ float operator()(float a) const {
    return refine(refine(__fmul_rn(a, y_), a, divisor_, y_), a, divisor_, y_);
  }

 private:
  float divisor_, y_;
};

inline constexpr float kScaleCut = kE4M3Max * (1.0f + 0x1p-20f);  // beyond it a scale counts as cut

// The scale of a block of finite values whose largest magnitude has the bits `amax`. False, and nothing made,
// where the block needs the definition's own steps.
__device__ inline bool fast_scale(std::uint32_t amax, float g, Nvfp4Scale& scale) {
  const float a = __uint_as_float(amax), wanted = ScaleQuotient(g)(a);
  if (!(g >= kFastMin && g <= kFastMax && a <= kFastMax && (a >= kFastMin || amax == 0) &&
        wanted <= kFastQuotient)) {
    return false;
  }
  const float cut = fminf(fmaxf(wanted, kE4M3Min), kE4M3Max);
  scale = {amax == 0 ? std::uint8_t{0x38} : scale_to_e4m3(cut), wanted > kScaleCut};
  return true;
}

// Any block.
template <class Block>
__device__ EncodedBlock encode_any(const Block& values, float g) {
  const std::uint32_t amax = values.amax();
  EncodedBlock block = {make_uint2(0, 0), {kE4M3NaN, false}};
  if (amax >= kFloatInf) return block;
  if (!fast_scale(amax, g, block.scale)) return encode_slowly(values, g);
  block.codes = encode_quotients(values, scale_of_e4m3(block.scale.code) * g, true);
  return block;
}

// Encodes blocks under a tensor scale g, which is kOwn if none of their scales is beyond 448. The lanes of a
// warp call these together. False, and something made, for a block whose scale has no exponent and for other
// rare ones.
template <class Block, bool kOwn, bool kByProducts = (Block::kSpareBits > 0)>
class RowEncoder {
 public:
  explicit __device__ RowEncoder(float g) : wanted_(g), g_(g), fast_(g >= kFastMin && g <= kFastMax) {
    if constexpr (kByProducts) {
      // A lane has a significand, four of them the same, and one midpoint.
      const unsigned lane = threadIdx.x % 32;
      const float d = static_cast<float>(8 + lane % 8) * g;
      const MidpointSide side = midpoint_side<Block::kSpareBits>(d, static_cast<int>(lane / 8 * 2 + 1));
      const auto sides = [&](bool so) { return __ballot_sync(~0u, so) >> lane % 8 & 0x01010101u; };
      const float factor = product_factor(d, {sides(side.near && side.up), sides(side.near && !side.up)});
      fast_ = fast_ && __all_sync(~0u, factor != 0.0f);
      some_negative_ = __any_sync(~0u, factor < 0.0f);
      factor_ = __float_as_uint(factor) + (10u << 23);
    }
  }

  __device__ bool encode(const Block& values, std::uint32_t amax, EncodedBlock& out) const {
    const float wanted = wanted_(__uint_as_float(amax));
    const bool large = !kOwn && wanted > kScaleCut;
    out.scale = {amax == 0 ? std::uint8_t{0x38} : scale_to_e4m3(wanted), large};
    if constexpr (kByProducts) {
      const std::uint32_t code = out.scale.code, exponent = (code & 0x78u) << 20,
                          factor = __shfl_sync(~0u, factor_, static_cast<int>(code)) - exponent;
      out.codes = encode_by_products(values, __uint_as_float(factor), some_negative_, large);
    } else {
      out.codes = encode_quotients(values, scale_of_e4m3(out.scale.code) * g_, large);
    }
    return fast_ &&
           (amax == 0 || (wanted >= 7.5f * kE4M3Min && wanted <= (kOwn ? kScaleCut : kFastQuotient)));
  }

 private:
  ScaleQuotient wanted_;
  float g_;
  bool fast_, some_negative_;
  // product_factor() under scale 8 + lane % 8, and ten exponents: those of E4M3's bias and of a significand
  // of three bits. Under another scale of this significand it is this less its exponent.
  std::uint32_t factor_;
};

// Four BF16 numbers of a block, two in a word, and what they become under a divisor: magnitudes of codes in
// bits 9 to 11 of each half.
struct FourCodes {
  std::uint32_t pairs[2];

  // The codes themselves, four bits each.
  __device__ std::uint32_t joined(const std::uint32_t (&x)[2]) const {
    std::uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::uint32_t both = pairs[i] >> 9 | (x[i] >> 12 & 0x00080008u);
      codes |= ((both | both >> 12) & 0xFFu) << (8 * i);
    }
    return codes;
  }
  // What they stand for under their block's scale, exactly: 2^-126 times that, as BF16, when moved to the
  // border of exponent and mantissa.
  __device__ uint2 decoded(const std::uint32_t (&x)[2], float scale) const {
    const auto as_pair = [](std::uint32_t bits) { return *reinterpret_cast<const __nv_bfloat162*>(&bits); };
    const __nv_bfloat162 scales = as_pair(__byte_perm(__float_as_uint(scale), 0, 0x3232));
    std::uint32_t words[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const __nv_bfloat162 value =
          __hmul2(__hmul2(as_pair(pairs[i] >> 3 | (x[i] & 0x80008000u)), as_pair(0x7E807E80u)), scales);
      words[i] = *reinterpret_cast<const std::uint32_t*>(&value);
    }
    return make_uint2(words[0], words[1]);
  }
};

__device__ inline FourCodes encode_four(const std::uint32_t (&x)[2], float d) {
  constexpr std::uint32_t kHalf = 0x01000100u, kLargest = 0x0E000E00u;
  const float y = reciprocal(d) * 0x1p-14f, divisor = d * 0x1p+14f;
  const auto rounded = [&](float a, float b) {
    return __vminu2((cut_to_fp16(a, b) + kHalf) & 0xFE00FE00u, kLargest);
  };
  FourCodes codes;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float a = fabsf(first_of(x[i])), b = fabsf(second_of(x[i]));
    const float qa = refine(__fmul_rn(a, y), a, divisor, y), qb = refine(__fmul_rn(b, y), b, divisor, y);
    const std::uint32_t up = rounded(qa, qb),
                        down = rounded(__fmul_rn(qa, 0x1.fffffep-1f), __fmul_rn(qb, 0x1.fffffep-1f));
    codes.pairs[i] = up - (up & ~down & 2 * kHalf);
  }
  return codes;
}

// By the definition's own steps: four of a block of finite values, its scale. A call, for it is rare.
struct FourCodesAndScale {
  FourCodes codes;
  Nvfp4Scale scale;
};
static __device__ __noinline__ FourCodesAndScale encode_four_slowly(uint2 x, float amax, float g) {
  const Nvfp4Scale scale = nvfp4_block_scale(amax, g);
  const float d = decode_e4m3(scale.code) * g;
  const auto pair = [&](std::uint32_t two) {
    return (nvfp4_code(first_of(two), d) & 7u) << 9 | (nvfp4_code(second_of(two), d) & 7u) << 25;
  };
  return {{{pair(x.x), pair(x.y)}}, scale};
}

// Some fours of a block whose largest magnitude has the bits `amax`, under tensor scale g: their codes (zeros
// where the block is not finite) and the block's scale.
template <int kFours>
__device__ inline Nvfp4Scale encode_fours(const std::uint32_t (&x)[kFours][2], std::uint32_t amax, float g,
                                          FourCodes (&codes)[kFours]) {
  Nvfp4Scale scale{kE4M3NaN, false};
#pragma unroll
  for (FourCodes& four : codes) four = {};
  if (amax >= kFloatInf) return scale;
  if (fast_scale(amax, g, scale)) {
    const float d = scale_of_e4m3(scale.code) * g;
#pragma unroll
    for (int k = 0; k < kFours; ++k) codes[k] = encode_four(x[k], d);
    return scale;
  }
#pragma unroll
  for (int k = 0; k < kFours; ++k) {
    const auto slow = encode_four_slowly(make_uint2(x[k][0], x[k][1]), float_of_bits(amax), g);
    codes[k] = slow.codes, scale = slow.scale;
  }
  return scale;
}

}  // namespace megamoe::cuda
