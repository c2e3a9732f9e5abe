// activate.cuh: layer/activation.h for several elements at once, bit for bit.
//
// Where no element is far from ordinary (NaN, a huge magnitude, one so small that a division might underflow)
// the steps of the definition run without its branches, those of one element between those of the others;
// else the definition itself runs.
#pragma once

#include "layer/activation.h"

namespace megamoe::cuda {

// exp_f32 of a magnitude below 80.
__device__ inline float exp_of_ordinary(float x, bool& ordinary) {
  constexpr float kRound = 0x1.8p+23f;
  ordinary = ordinary && magnitude(x) < 80.0f;
  const float rounded = __fadd_rn(__fmul_rn(x, 0x1.715476p+0f), kRound), n = __fadd_rn(rounded, -kRound);
  const float r = __fadd_rn(__fadd_rn(x, -__fmul_rn(n, 0x1.62ep-1f)), -__fmul_rn(n, 0x1.0bfbe8p-15f));
  float p = 0x1.a01a02p-13f;
  for (const float next :
       {0x1.6c16c2p-10f, 0x1.111112p-7f, 0x1.555556p-5f, 0x1.555556p-3f, 0.5f, 1.0f, 1.0f}) {
    p = __fadd_rn(__fmul_rn(p, r), next);
  }
  return __uint_as_float(__float_as_uint(p) + (__float_as_uint(rounded) << 23));
}

// a / b for b in [1, 2], a neither tiny nor huge: a compiler's own steps, without its tests.
__device__ inline float divide_ordinary(float a, float b, bool& ordinary) {
  ordinary = ordinary && magnitude(a) >= 0x1p-60f && magnitude(a) <= 0x1p+60f;
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(b));
  y = __fmaf_rn(__fmaf_rn(-b, y, 1.0f), y, y);
  float q = __fmul_rn(a, y);
  q = __fmaf_rn(__fmaf_rn(-b, q, a), y, q);
  return __fmaf_rn(__fmaf_rn(-b, q, a), y, q);
}

template <Activation kKind>
__device__ inline ActivatedPair activate_ordinary(const ActivationConfig& config, float gate, float up,
                                                  bool& ordinary) {
  if constexpr (kKind != Activation::kSwiGlu) {
    gate = cut_above(gate, config.limit), up = cut_both(up, config.limit);
  }
  float s;
  if constexpr (kKind == Activation::kGptOss) {
    const float z = __fmul_rn(config.alpha, gate), e = exp_of_ordinary(-magnitude(z), ordinary);
    s = __fmul_rn(gate, divide_ordinary(z < 0.0f ? e : 1.0f, __fadd_rn(1.0f, e), ordinary));
    up = __fadd_rn(up, 1.0f);
  } else {
    const float e = exp_of_ordinary(-magnitude(gate), ordinary);
    s = divide_ordinary(gate < 0.0f ? __fmul_rn(gate, e) : gate, __fadd_rn(1.0f, e), ordinary);
  }
  return {s, __fmul_rn(s, up)};
}

template <Activation kKind, int kCount>
__device__ inline bool activate_all_ordinary(const ActivationConfig& config, const float (&gate)[kCount],
                                             const float (&up)[kCount], ActivatedPair (&out)[kCount]) {
  bool ordinary = true;
#pragma unroll
  for (int i = 0; i < kCount; ++i) out[i] = activate_ordinary<kKind>(config, gate[i], up[i], ordinary);
  return ordinary;
}

static __device__ __noinline__ ActivatedPair activate_any(const ActivationConfig& config, float gate,
                                                          float up) {
  return activate(config, gate, up);
}

template <int kCount>
__device__ inline void activate_all(const ActivationConfig& config, const float (&gate)[kCount],
                                    const float (&up)[kCount], ActivatedPair (&out)[kCount]) {
  bool ordinary = false;
  switch (config.kind) {
    case Activation::kSwiGlu:
      ordinary = activate_all_ordinary<Activation::kSwiGlu>(config, gate, up, out);
      break;
    case Activation::kSwiGluClamped:
      ordinary = activate_all_ordinary<Activation::kSwiGluClamped>(config, gate, up, out);
      break;
    case Activation::kGptOss:
      ordinary = activate_all_ordinary<Activation::kGptOss>(config, gate, up, out);
      break;
    case Activation::kRelu2: break;
  }
  if (ordinary) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) out[i] = activate_any(config, gate[i], up[i]);
}

}  // namespace megamoe::cuda
