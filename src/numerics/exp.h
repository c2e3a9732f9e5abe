// exp.h: the exponential and the logistic function that activations are defined by.
//
// Why our own: a result that is rounded to BF16 and then to FP4 must be the same on every backend, and
// no two maths libraries agree on the last bit of exp. This one is plain FP32 products and sums in a
// fixed order, never fused, so scalar code, any vector unit and a GPU get the same bits.
//
// exp       n = round(x log2 e); r = (x - n * kLn2Hi) - n * kLn2Lo, where kLn2Hi has so few bits that
//           n * kLn2Hi is exact; p = a polynomial of degree 7 in r, by Horner; the result is p * 2^n.
//           Below -103.98 the result is 0, above 88.73 infinity; NaN stays NaN.
// sigmoid   e = exp(-|x|) never overflows: x >= 0: 1 / (1 + e), x < 0: e / (1 + e).
// silu      x >= 0: x / (1 + e), x < 0: x * e / (1 + e) (the product first). Finite for every finite x.
// Error     exp 1.25 ulp, sigmoid 2.5 ulp, silu 3.5 ulp; a subnormal exp or sigmoid is within 0.8 * 2^-149,
//           and silu below x = -87, where exp(x) is subnormal, within 2^-142.
#pragma once

#include <cstdint>

#include "numerics/float_bits.h"

namespace megamoe {

// The steps below must stay separate roundings: the build passes -ffp-contract=off, device code uses
// these.
MEGAMOE_HD constexpr float mul_rn(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
MEGAMOE_HD constexpr float add_rn(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

MEGAMOE_HD_RARE constexpr float plain_divide(float a, float b) { return a / b; }

#ifdef __CUDACC__
// a / b for b in [1, 2] and 2^-60 <= |a| <= 2^60, where nothing underflows: the steps of a compiler's own
// division, without its tests and its call.
__device__ inline float divide_ordinary(float a, float b) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(b));
  y = __fmaf_rn(__fmaf_rn(-b, y, 1.0f), y, y);
  float q = __fmul_rn(a, y);
  q = __fmaf_rn(__fmaf_rn(-b, q, a), y, q);
  return __fmaf_rn(__fmaf_rn(-b, q, a), y, q);
}
#endif

// a / b for b in [1, 2], rounded once.
MEGAMOE_HD constexpr float divide_by_one_to_two(float a, float b) {
#ifdef __CUDA_ARCH__
  if (magnitude(a) >= 0x1p-60f && magnitude(a) <= 0x1p+60f) return divide_ordinary(a, b);
#endif
  return plain_divide(a, b);
}

// p * 2^n, and what exp is where that is no normal number.
MEGAMOE_HD_RARE constexpr float exp_f32_far(float x, float p, float n) {
  if (is_nan(x)) return x;
  if (x > 88.73f) return float_of_bits(kFloatInf);
  if (x < -103.98f) return 0.0f;
  // 2^n in two factors, so that neither overflows nor rounds before the last product does.
  const int half = static_cast<int>(n) / 2, rest = static_cast<int>(n) - half;
  return mul_rn(mul_rn(p, power_of_two(half)), power_of_two(rest));
}

// exp(x) = p * 2^n; `rounded` has n in its last bits. p is within [0.7, 1.42].
struct ExpParts {
  float p, n, rounded;

  // For |x| < 80: n is so small that a sum in the exponent is the exact product.
  MEGAMOE_HD constexpr float ordinary() const {
    return float_of_bits(bits_of_float(p) + (bits_of_float(rounded) << 23));
  }
};

MEGAMOE_HD constexpr ExpParts exp_parts(float x) {
  constexpr float kLog2E = 0x1.715476p+0f;
  constexpr float kLn2Hi = 0x1.62ep-1f;      // 12 significant bits: n * kLn2Hi is exact, |n| < 2^8
  constexpr float kLn2Lo = 0x1.0bfbe8p-15f;  // ln 2 - kLn2Hi
  constexpr float kRound = 0x1.8p+23f;       // adding and subtracting it rounds to an integer
  const float rounded = add_rn(mul_rn(x, kLog2E), kRound);
  const float n = add_rn(rounded, -kRound);
  const float r = add_rn(add_rn(x, -mul_rn(n, kLn2Hi)), -mul_rn(n, kLn2Lo));
  float p = 0x1.a01a02p-13f;                  // 1/5040
  p = add_rn(mul_rn(p, r), 0x1.6c16c2p-10f);  // 1/720
  p = add_rn(mul_rn(p, r), 0x1.111112p-7f);   // 1/120
  p = add_rn(mul_rn(p, r), 0x1.555556p-5f);   // 1/24
  p = add_rn(mul_rn(p, r), 0x1.555556p-3f);   // 1/6
  p = add_rn(mul_rn(p, r), 0.5f);
  p = add_rn(mul_rn(p, r), 1.0f);
  p = add_rn(mul_rn(p, r), 1.0f);
  return {p, n, rounded};
}

MEGAMOE_HD constexpr float exp_f32(float x) {
  const ExpParts parts = exp_parts(x);
  if (magnitude(x) < 80.0f) return parts.ordinary();
  return exp_f32_far(x, parts.p, parts.n);
}

MEGAMOE_HD constexpr float sigmoid_f32(float x) {
  const float e = exp_f32(-magnitude(x));
  return divide_by_one_to_two(x < 0.0f ? e : 1.0f, add_rn(1.0f, e));
}

MEGAMOE_HD constexpr float silu_f32(float x) {
  const float e = exp_f32(-magnitude(x));
  return divide_by_one_to_two(x < 0.0f ? mul_rn(x, e) : x, add_rn(1.0f, e));
}

}  // namespace megamoe
