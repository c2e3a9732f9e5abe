// activate.cuh: layer/activation.h for several elements at once, bit for bit.
//
// Where no element is far from ordinary (NaN, a huge magnitude, one so small that a division might underflow)
// the steps of the definition run without its branches, those of one element between those of the others;
// else the definition itself runs.
#pragma once

#include "layer/activation.h"

namespace megamoe::cuda {

// Collects whether all of some numbers have magnitudes in [low, high), NaN being in no range, without a
// branch: what lies below `low` wraps around.
struct MagnitudeRange {
  std::uint32_t low, span;  // bits, the sign shifted out
  std::uint32_t worst = 0;

  __device__ MagnitudeRange(float from, float to)
      : low(bits_of_float(from) << 1), span((bits_of_float(to) << 1) - low) {}
  __device__ void add(float x) { worst = max(worst, (bits_of_float(x) << 1) - low); }
  __device__ bool holds_all() const { return worst < span; }
};

// What ordinary gates (gpt-oss: alpha * gate) are. exp() takes |x| < 80 and divide_ordinary() 2^-60 <= |a| <=
// 2^60: below 40, exp(-|x|) is above 2^-58, and above 2^-58 so is, but for a factor of e, |x| exp(-|x|).
template <Activation kKind>
__device__ inline MagnitudeRange ordinary_gates() {
  return {kKind == Activation::kGptOss ? 0.0f : 0x1p-58f, 40.0f};
}

// NaN stays NaN.
__device__ inline float min_or_nan(float a, float b) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
__device__ inline float max_or_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

template <Activation kKind>
__device__ inline ActivatedPair activate_ordinary(const ActivationConfig& config, float gate, float up,
                                                  MagnitudeRange& gates) {
  if constexpr (kKind != Activation::kSwiGlu) {
    gate = min_or_nan(gate, config.limit);
    up = max_or_nan(min_or_nan(up, config.limit), -config.limit);
  }
  const float z = kKind == Activation::kGptOss ? __fmul_rn(config.alpha, gate) : gate;
  gates.add(z);
  const float e = exp_parts(-magnitude(z)).ordinary(), divisor = __fadd_rn(1.0f, e);
  float s;
  if constexpr (kKind == Activation::kGptOss) {
    s = __fmul_rn(gate, divide_ordinary(z < 0.0f ? e : 1.0f, divisor));
    up = __fadd_rn(up, 1.0f);
  } else {
    s = divide_ordinary(gate < 0.0f ? __fmul_rn(gate, e) : gate, divisor);
  }
  return {s, __fmul_rn(s, up)};
}

template <Activation kKind, int kTogether, int kRows>
__device__ inline bool activate_ordinary_all(const ActivationConfig& config, float (&gate)[kRows][4],
                                             float (&up)[kRows][4]) {
  MagnitudeRange gates = ordinary_gates<kKind>();
#pragma unroll
  for (int i = 0; i < 4 * kRows; ++i) {
    float &g = gate[i / 4][i % 4], &u = up[i / 4][i % 4];
    // As if it needed the result of the element kTogether before.
    if (i >= kTogether) asm volatile("" : "+f"(g), "+f"(up[(i - kTogether) / 4][(i - kTogether) % 4]));
    const ActivatedPair pair = activate_ordinary<kKind>(config, g, u, gates);
    g = pair.gate, u = pair.h;
  }
  return gates.holds_all();
}

// Four adjacent columns of some rows, in place: gate becomes what its columns hold, up becomes h. False: some
// element is not ordinary, and activate_any() must do all of them, from what they were. Steps of kTogether
// elements lie between each other: more take more registers.
template <int kTogether, int kRows>
__device__ inline bool activate_all(const ActivationConfig& config, float (&gate)[kRows][4],
                                    float (&up)[kRows][4]) {
  switch (config.kind) {
    case Activation::kSwiGlu: return activate_ordinary_all<Activation::kSwiGlu, kTogether>(config, gate, up);
    case Activation::kSwiGluClamped:
      return activate_ordinary_all<Activation::kSwiGluClamped, kTogether>(config, gate, up);
    case Activation::kGptOss: return activate_ordinary_all<Activation::kGptOss, kTogether>(config, gate, up);
    case Activation::kRelu2: break;
  }
  return false;
}
static __device__ __noinline__ ActivatedPair activate_any(const ActivationConfig& config, float gate,
                                                          float up) {
  return activate(config, gate, up);
}

}  // namespace megamoe::cuda
