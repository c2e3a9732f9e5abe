// activation.h: h = act(gate, up) for one element, in FP32.
//
// swiglu          silu(gate) * up
// swiglu-clamped  gate cut to <= limit, up to [-limit, limit]; then silu(gate) * up
// gpt-oss         cut alike; (gate * sigmoid(alpha * gate)) * (up + 1)
// relu2           relu(up)^2; there is no gate
//
// Every step is one FP32 rounding; a NaN passes through the cuts as a NaN.
#pragma once

#include "megamoe/layer.h"
#include "numerics/exp.h"

namespace megamoe {

struct ActivatedPair {
  float gate;  // what the gate columns of interleaved output hold
  float h;
};

MEGAMOE_HD constexpr float cut_above(float x, float limit) { return x > limit ? limit : x; }
MEGAMOE_HD constexpr float cut_both(float x, float limit) {
  return x > limit ? limit : x < -limit ? -limit : x;
}

MEGAMOE_HD constexpr ActivatedPair activate(const ActivationConfig& config, float gate, float up) {
  switch (config.kind) {
    case Activation::kSwiGlu: {
      const float s = silu_f32(gate);
      return {s, mul_rn(s, up)};
    }
    case Activation::kSwiGluClamped: {
      const float s = silu_f32(cut_above(gate, config.limit));
      return {s, mul_rn(s, cut_both(up, config.limit))};
    }
    case Activation::kGptOss: {
      const float g = cut_above(gate, config.limit);
      const float s = mul_rn(g, sigmoid_f32(mul_rn(config.alpha, g)));
      return {s, mul_rn(s, add_rn(cut_both(up, config.limit), 1.0f))};
    }
    case Activation::kRelu2: {
      const float r = up < 0.0f ? 0.0f : up;
      return {0.0f, mul_rn(r, r)};
    }
  }
  return {0.0f, 0.0f};
}

}  // namespace megamoe
