// calibrate.h: static activation scales from recorded activations.
//
// The layer runs with BF16 activations. For each expert, x is what was routed to it and h what its own gate
// and up made of that; the NVFP4 tensor scale of each is amax / 2688 of all that was seen. An expert that saw
// no token, or nothing but zeros, takes the layer's largest scale: too large loses a little, 1 loses all.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/input_scales.h"
#include "megamoe/moe_layer.h"

namespace megamoe {

class Calibration {
 public:
  // Takes over the layer's on_stage. `layer` must run with kBf16 activations and outlive this.
  explicit Calibration(MoeLayer& layer);

  // Adds what these tokens show. Throws kInvalidArgument that names the token for a NaN or infinity.
  void add(MatrixView<const bf16> x, MatrixView<const std::int32_t> ids, MatrixView<const float> weights);

  struct Result {
    std::vector<ExpertInputScales> experts;  // [E]
    std::vector<std::int64_t> borrowed;      // experts that took the layer's largest scale for x or h
  };
  // Throws kInvalidArgument if no expert saw anything.
  Result result() const;

 private:
  void on_stage(const Stage& stage);

  MoeLayer& layer_;
  std::vector<ExpertInputScales> seen_;  // rows and amax so far
  std::vector<std::int64_t> offsets_;    // of the pass that is running
  std::vector<std::int32_t> row_to_token_;
  MatrixView<const bf16> x_;
};

}  // namespace megamoe
