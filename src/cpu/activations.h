// activations.h: the activation functions over many numbers; the same bits as numerics/exp.h.
#pragma once

#include <cstdint>

#include "megamoe/layer.h"

namespace megamoe::cpu {

// out may be the same memory as x.
void exp_f32(const float* x, std::int64_t count, float* out);
void sigmoid_f32(const float* x, std::int64_t count, float* out);
void silu_f32(const float* x, std::int64_t count, float* out);

// h = act(gate, up). `gate` is replaced by what multiplies the up half: silu(gate), for gpt-oss
// gate * sigmoid(alpha * gate). Without a gate, `gate` is not touched and may be null.
void activate(const ActivationConfig& config, float* gate, const float* up, std::int64_t count, float* h);

}  // namespace megamoe::cpu
