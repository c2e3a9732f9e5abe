// activate.cuh: layer/activation.h for several elements at once, bit for bit.
//
// Where no element is far from ordinary (NaN, a huge magnitude, one so small that a division might underflow)
// the steps of the definition run without its branches, those of one element between those of the others;
// else the definition itself runs.
#pragma once

#include "layer/activation.h"

namespace megamoe::cuda {

// exp_f32(x), and whether x is ordinary for it.
__device__ inline float exp_of_ordinary(float x, bool& ordinary) {
  ordinary = ordinary && magnitude(x) < 80.0f;
  return exp_parts(x).ordinary();
}

// divide_by_one_to_two(a, b), likewise.
__device__ inline float divide_ordinary(float a, float b, bool& ordinary) {
  ordinary = ordinary && magnitude(a) >= 0x1p-60f && magnitude(a) <= 0x1p+60f;
  return megamoe::divide_ordinary(a, b);
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

template <Activation kKind, int kRows>
__device__ inline bool activate_ordinary_all(const ActivationConfig& config, float (&gate)[kRows][4],
                                             float (&up)[kRows][4]) {
  bool ordinary = true;
#pragma unroll
  for (int i = 0; i < 4 * kRows; ++i) {
    float &g = gate[i / 4][i % 4], &u = up[i / 4][i % 4];
    const ActivatedPair pair = activate_ordinary<kKind>(config, g, u, ordinary);
    g = pair.gate, u = pair.h;
  }
  return ordinary;
}

// Four adjacent columns of some rows, in place: gate becomes what its columns hold, up becomes h. False: some
// element is not ordinary, and activate_any() must do it, from what it was.
template <int kRows>
__device__ inline bool activate_all(const ActivationConfig& config, float (&gate)[kRows][4],
                                    float (&up)[kRows][4]) {
  switch (config.kind) {
    case Activation::kSwiGlu: return activate_ordinary_all<Activation::kSwiGlu>(config, gate, up);
    case Activation::kSwiGluClamped:
      return activate_ordinary_all<Activation::kSwiGluClamped>(config, gate, up);
    case Activation::kGptOss: return activate_ordinary_all<Activation::kGptOss>(config, gate, up);
    case Activation::kRelu2: break;
  }
  return false;
}
static __device__ __noinline__ ActivatedPair activate_any(const ActivationConfig& config, float gate,
                                                          float up) {
  return activate(config, gate, up);
}

}  // namespace megamoe::cuda
