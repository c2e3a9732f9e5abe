// activate.cuh: layer/activation.h for several elements at once.
//
// To FP32, bit for bit (activate_exactly): where no element is far from ordinary (NaN, a huge magnitude, one
// so small that a division might underflow) the steps of the definition run without its branches, those of
// one element between those of the others; else the definition itself runs.
//
// To BF16, bit for bit (activate_nearly): the GPU's own exponential and reciprocal are a few last bits of
// FP32 away from the definition, which BF16 shows only where a midpoint of two of its numbers is as near.
// There the answer is false, and the definition decides.
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

// The cuts of the definition, in place. What the logistic function is of: gate, gpt-oss alpha times it.
template <Activation kKind>
__device__ inline float cut(const ActivationConfig& config, float& gate, float& up) {
  if constexpr (kKind != Activation::kSwiGlu) {
    gate = min_or_nan(gate, config.limit);
    up = max_or_nan(min_or_nan(up, config.limit), -config.limit);
  }
  return kKind == Activation::kGptOss ? __fmul_rn(config.alpha, gate) : gate;
}

template <Activation kKind>
__device__ inline ActivatedPair activate_ordinary(const ActivationConfig& config, float gate, float up,
                                                  MagnitudeRange& gates) {
  const float z = cut<kKind>(config, gate, up);
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

template <Activation kKind>
__device__ inline bool activate_ordinary_all(const ActivationConfig& config, float (&gate)[4],
                                             float (&up)[4]) {
  MagnitudeRange gates = ordinary_gates<kKind>();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const ActivatedPair pair = activate_ordinary<kKind>(config, gate[i], up[i], gates);
    gate[i] = pair.gate, up[i] = pair.h;
  }
  return gates.holds_all();
}

// Four elements in place: gate becomes what its columns hold, up becomes h. False: some element is not
// ordinary.
__device__ inline bool activate_all(const ActivationConfig& config, float (&gate)[4], float (&up)[4]) {
  switch (config.kind) {
    case Activation::kSwiGlu: return activate_ordinary_all<Activation::kSwiGlu>(config, gate, up);
    case Activation::kSwiGluClamped:
      return activate_ordinary_all<Activation::kSwiGluClamped>(config, gate, up);
    case Activation::kGptOss: return activate_ordinary_all<Activation::kGptOss>(config, gate, up);
    case Activation::kRelu2: break;
  }
  return false;
}

// Four elements in place, as the definition has them: gate becomes what its columns hold, up becomes h. A
// call, for what is seldom needed should take neither registers nor instructions where it is not.
static __device__ __noinline__ void activate_exactly(const ActivationConfig& config, float* gate, float* up) {
  float g[4], u[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) g[i] = gate[i], u[i] = up[i];
  if (activate_all(config, g, u)) {
#pragma unroll
    for (int i = 0; i < 4; ++i) gate[i] = g[i], up[i] = u[i];
    return;
  }
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const ActivatedPair pair = activate(config, gate[i], up[i]);
    gate[i] = pair.gate, up[i] = pair.h;
  }
}

// sigmoid(z) with the GPU's own exponential and reciprocal. From z = kLeastGate up it is within
// kSigmoidUlps of the definition, and z times it within kSiluUlps of silu(z): on an H200, where ActivateTest
// tried every z; elsewhere with an exponential off by two last bits and a reciprocal off by one.
inline constexpr float kLeastGate = -10.0f;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
inline constexpr std::uint32_t kSigmoidUlps = 9, kSiluUlps = 10;
#else
inline constexpr std::uint32_t kSigmoidUlps = 15, kSiluUlps = 15;
#endif
__device__ inline float near_sigmoid(float z) {
  float e, s;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(__fmul_rn(z, -0x1.715476p+0f)));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(__fadd_rn(1.0f, e)));
  return s;
}

// How far h may be from the definition's, in last bits of FP32. n of a number's last bits are at most 2 n of
// those of any product of it, however many factors; beside that the last product rounds on either side, which
// is 1, and gpt-oss's product with the gate, 2 by then.
inline constexpr std::uint32_t kNearUlps = 2 * kSigmoidUlps + 3;
static_assert(kNearUlps >= 2 * kSiluUlps + 1);

// Collects whether numbers at most kNearUlps away round to the same BF16, two numbers at a time.
class RoundsAlike {
 public:
  __device__ void add(float first, float second) {
    constexpr std::uint32_t kFirstUncertain = 0x8000u - kNearUlps;  // of the 16 bits that rounding drops
    const std::uint32_t a = bits_of_float(first) - kFirstUncertain,
                        b = bits_of_float(second) - kFirstUncertain;
    nearest_ = __vminu2(nearest_, __byte_perm(a, b, 0x5410));
  }
  __device__ bool all() const { return min(nearest_ & 0xFFFFu, nearest_ >> 16) > 2 * kNearUlps; }

 private:
  std::uint32_t nearest_ = ~0u;
};

// What an activation does before and beside its logistic function: the cuts, in place, and what the function
// is of; what is added to up.
template <Activation kKind>
struct StepsOf {
  const ActivationConfig& config;
  __device__ float cut(float& gate, float& up) const { return cuda::cut<kKind>(config, gate, up); }
  __device__ float add(float up) const { return kKind == Activation::kGptOss ? __fadd_rn(up, 1.0f) : up; }
};
// Of any activation with a gate, where code is so long that there should not be three of it: steps that an
// activation does without change nothing.
struct StepsOfAny {
  float limit, alpha, added;

  explicit __device__ StepsOfAny(const ActivationConfig& config)
      : limit(config.kind == Activation::kSwiGlu ? float_of_bits(kFloatInf) : config.limit),
        alpha(config.kind == Activation::kGptOss ? config.alpha : 1.0f),
        added(config.kind == Activation::kGptOss ? 1.0f : -0.0f) {}
  __device__ float cut(float& gate, float& up) const {
    gate = min_or_nan(gate, limit);
    up = max_or_nan(min_or_nan(up, limit), -limit);
    return __fmul_rn(alpha, gate);
  }
  __device__ float add(float up) const { return __fadd_rn(up, added); }
};

// activate_nearly(), by an activation's steps.
template <class Steps, int kRows>
__device__ inline bool activate_nearly_by(const Steps& steps, const float (&gate)[kRows][4],
                                          float (&up)[kRows][4]) {
  RoundsAlike rounds;
  float least_z = 0.0f, least_s = 1.0f;
#pragma unroll
  for (int i = 0; i < 4 * kRows; ++i) {
    float g = gate[i / 4][i % 4], u = up[i / 4][i % 4];
    const float z = steps.cut(g, u);
    const float s = __fmul_rn(g, near_sigmoid(z));
    up[i / 4][i % 4] = __fmul_rn(s, steps.add(u));
    least_z = fminf(least_z, z), least_s = fminf(least_s, fabsf(s));
    if (i % 2 == 1) rounds.add(up[i / 4][i % 4 - 1], up[i / 4][i % 4]);
  }
  // Below 2^-100 last bits are of another size. NaN is in no minimum: it comes out as the definition's does.
  return rounds.all() && least_z > kLeastGate && least_s > 0x1p-100f;
}

// Four adjacent columns of some rows: up becomes a number that rounds to the same BF16 as h. False: this
// cannot be told, and activate_exactly() must do all of them, from what they were.
template <int kRows>
__device__ inline bool activate_nearly(const ActivationConfig& config, const float (&gate)[kRows][4],
                                       float (&up)[kRows][4]) {
  switch (config.kind) {
    case Activation::kSwiGlu: return activate_nearly_by(StepsOf<Activation::kSwiGlu>{config}, gate, up);
    case Activation::kSwiGluClamped:
      return activate_nearly_by(StepsOf<Activation::kSwiGluClamped>{config}, gate, up);
    case Activation::kGptOss: return activate_nearly_by(StepsOf<Activation::kGptOss>{config}, gate, up);
    case Activation::kRelu2: break;
  }
  return false;
}

}  // namespace megamoe::cuda
