#include "cpu/activations.h"

#include <limits>

#include "layer/activation.h"

namespace megamoe::cpu {
namespace {

// numerics/exp.h without a branch: the argument is cut to where the formula holds, and what lies outside is
// put in at the end. (A NaN is not below the upper cut.)
inline float exp_lane(float x) {
  constexpr float kLog2E = 0x1.715476p+0f, kLn2Hi = 0x1.62ep-1f, kLn2Lo = 0x1.0bfbe8p-15f;
  constexpr float kRound = 0x1.8p+23f, kTop = 88.73f, kBottom = -103.98f;
  const float below = x < kTop ? x : kTop;
  const float cut = below > kBottom ? below : kBottom;
  const float n = (cut * kLog2E + kRound) - kRound;
  const float r = (cut - n * kLn2Hi) - n * kLn2Lo;
  float p = 0x1.a01a02p-13f;
  p = p * r + 0x1.6c16c2p-10f;
  p = p * r + 0x1.111112p-7f;
  p = p * r + 0x1.555556p-5f;
  p = p * r + 0x1.555556p-3f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const auto whole = static_cast<std::int32_t>(n);
  const std::int32_t half = whole / 2, rest = whole - half;  // both far above -126
  const float low = float_of_bits(static_cast<std::uint32_t>(half + 127) << 23);
  const float high = float_of_bits(static_cast<std::uint32_t>(rest + 127) << 23);
  float result = (p * low) * high;
  result = x > kTop ? std::numeric_limits<float>::infinity() : result;
  result = x < kBottom ? 0.0f : result;
  return x == x ? result : x;
}

inline float sigmoid_lane(float x) {
  const float e = exp_lane(-magnitude(x));
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

inline float silu_lane(float x) {
  const float e = exp_lane(-magnitude(x));
  return x * (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

}  // namespace

void exp_f32(const float* x, std::int64_t count, float* out) {
  for (std::int64_t i = 0; i < count; ++i) out[i] = exp_lane(x[i]);
}
void sigmoid_f32(const float* x, std::int64_t count, float* out) {
  for (std::int64_t i = 0; i < count; ++i) out[i] = sigmoid_lane(x[i]);
}
void silu_f32(const float* x, std::int64_t count, float* out) {
  for (std::int64_t i = 0; i < count; ++i) out[i] = silu_lane(x[i]);
}

void activate(const ActivationConfig& config, float* gate, const float* up, std::int64_t count, float* h) {
  const float limit = config.limit, alpha = config.alpha;
  switch (config.kind) {
    case Activation::kSwiGlu:
      for (std::int64_t i = 0; i < count; ++i) {
        gate[i] = silu_lane(gate[i]);
        h[i] = gate[i] * up[i];
      }
      break;
    case Activation::kSwiGluClamped:
      for (std::int64_t i = 0; i < count; ++i) {
        gate[i] = silu_lane(cut_above(gate[i], limit));
        h[i] = gate[i] * cut_both(up[i], limit);
      }
      break;
    case Activation::kGptOss:
      for (std::int64_t i = 0; i < count; ++i) {
        const float g = cut_above(gate[i], limit);
        gate[i] = g * sigmoid_lane(alpha * g);
        h[i] = gate[i] * (cut_both(up[i], limit) + 1.0f);
      }
      break;
    case Activation::kRelu2:
      for (std::int64_t i = 0; i < count; ++i) {
        const float r = up[i] < 0.0f ? 0.0f : up[i];
        h[i] = r * r;
      }
      break;
  }
}

}  // namespace megamoe::cpu
