// packed_weights.h: one role's weights of all experts, brought to the GPU and into the order of
// weight_layout.h.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/device.h"
#include "cuda/sm90/weight_layout.h"
#include "megamoe/layer.h"

namespace megamoe::sm90 {

struct PackedWeights {
  cuda::DeviceArray<std::uint8_t> packed;  // [experts][packed_bytes]
  cuda::DeviceArray<float> scales;         // tensor scales [experts], or [experts][2] of gate and up
};

// `matrices`: NVFP4, all of one shape, one for each expert or gate and up in turn. Experts go through two
// staging buffers by turns: while one is copied to the GPU and packed there, the next are read into the
// other, so that reading the file is what takes time. Returns when all is there.
PackedWeights load_weights(OperandType type, WeightRole role,
                           const std::vector<const WeightMatrix*>& matrices);

// [experts, rows] of one bias, empty where there is none.
cuda::DeviceArray<float> load_bias(const std::vector<ExpertWeights>& experts,
                                   const float* ExpertWeights::*bias, std::int64_t rows);

}  // namespace megamoe::sm90
