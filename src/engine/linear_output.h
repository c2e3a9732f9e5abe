// linear_output.h: one weight matrix of a checkpoint as the NVFP4 tensors of another.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/expert_matrix.h"
#include "checkpoint/safetensors_writer.h"

namespace megamoe {

struct LinearOutput {
  const ExpertMatrix* matrix = nullptr;
  // The other half of a gate and up pair that shall have one tensor scale, the one of the larger amax.
  const ExpertMatrix* scale_partner = nullptr;
  std::string module;                // "model.layers.0.mlp.experts.3.gate_proj"
  std::optional<float> input_scale;  // the multiplier; written where there is one
  bool writes_bias = false;          // its bias is a slice of a tensor that ends with this conversion
};

struct LinearFormat {
  Family family = Family::kModelOpt;  // kModelOpt or kCompressedTensors
  bool four_over_six = false;         // for what is quantised, not for what is already FP4
};

// The tensors that `linear` becomes.
std::vector<PlannedTensor> plan_tensors(const LinearOutput& linear, const LinearFormat& format);

// The bytes of those tensors, in their order.
struct LinearBytes {
  std::vector<std::vector<std::uint8_t>> tensors;
  std::int64_t inexact_blocks = 0;    // MXFP4 blocks that had to be quantised anew
  std::int64_t saturated_blocks = 0;  // blocks whose scale was cut to 448
};
LinearBytes make_tensors(const LinearOutput& linear, const LinearFormat& format);

}  // namespace megamoe
