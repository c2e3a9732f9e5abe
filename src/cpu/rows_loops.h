// rows_loops.h: the loops of rows.h, for the compiler to vectorise. As the library has them twice, for
// different CPUs, all of it has internal linkage and nothing is used that other files share.
#pragma once

#include "cpu/rows.h"

namespace megamoe::cpu {
namespace {

constexpr std::int64_t kLanes = 16;  // of a panel

inline std::uint32_t bits_of(float x) { return __builtin_bit_cast(std::uint32_t, x); }
inline float from_bits(std::uint32_t x) { return __builtin_bit_cast(float, x); }

// exp of numerics/exp.h for x <= 0, without a branch: the argument is cut to where the formula holds, and
// what lies outside is put in at the end. (A NaN is not below the cut.)
inline float exp_lane(float x) {
  constexpr float kLog2E = 0x1.715476p+0f, kLn2Hi = 0x1.62ep-1f, kLn2Lo = 0x1.0bfbe8p-15f;
  constexpr float kRound = 0x1.8p+23f, kBottom = -103.98f;
  const float cut = x > kBottom ? x : kBottom;
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
  const float low = from_bits(static_cast<std::uint32_t>(half + 127) << 23);
  const float high = from_bits(static_cast<std::uint32_t>(rest + 127) << 23);
  const float result = x < kBottom ? 0.0f : (p * low) * high;
  return x == x ? result : x;
}

inline float negative_magnitude(float x) { return from_bits(bits_of(x) | 0x80000000u); }
inline float sigmoid_lane(float x) {
  const float e = exp_lane(negative_magnitude(x));
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}
inline float silu_lane(float x) {
  const float e = exp_lane(negative_magnitude(x));
  return x * (x < 0.0f ? e : 1.0f) / (1.0f + e);
}
inline float cut_top(float x, float limit) { return x > limit ? limit : x; }
inline float cut_both_ends(float x, float limit) { return x > limit ? limit : x < -limit ? -limit : x; }

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
        gate[i] = silu_lane(cut_top(gate[i], limit));
        h[i] = gate[i] * cut_both_ends(up[i], limit);
      }
      break;
    case Activation::kGptOss:
      for (std::int64_t i = 0; i < count; ++i) {
        const float g = cut_top(gate[i], limit);
        gate[i] = g * sigmoid_lane(alpha * g);
        h[i] = gate[i] * (cut_both_ends(up[i], limit) + 1.0f);
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

// __restrict, as the compiler makes no vectors of these short loops where it would have to check.
void finish(const float* __restrict sums, std::int64_t stride, std::int64_t panels, float factor, float scale,
            const float* __restrict bias, float* __restrict out) {
  for (std::int64_t p = 0; p < panels; ++p, sums += stride, out += kLanes) {
    for (std::int64_t j = 0; j < kLanes; ++j) out[j] = (sums[j] * factor) * scale;
    if (bias == nullptr) continue;
    for (std::int64_t j = 0; j < kLanes; ++j) out[j] = out[j] + bias[p * kLanes + j];
  }
}

void to_bf16(const float* in, std::int64_t count, bf16* out) {
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t b = bits_of(in[i]);
    const std::uint32_t rounded = (b + 0x7FFFu + ((b >> 16) & 1u)) >> 16;
    const std::uint32_t quiet = (b >> 16) | 0x40u;
    // as signed numbers, which every vector unit can compare
    const bool nan = static_cast<std::int32_t>(b & 0x7FFFFFFFu) > 0x7F800000;
    out[i].bits = static_cast<std::uint16_t>(nan ? quiet : rounded);
  }
}

void add_weighted(float* acc, float weight, const float* in, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) acc[i] = acc[i] + weight * in[i];
}

void add(float* acc, const float* in, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) acc[i] = acc[i] + in[i];
}

constexpr Rows kLoops = {finish, activate, to_bf16, add_weighted, add};

}  // namespace
}  // namespace megamoe::cpu
