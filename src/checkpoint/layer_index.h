// layer_index.h: one layer of the index: from the tensors found under its prefix to its matrices.
#pragma once

#include <array>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/matrix_reading.h"
#include "checkpoint/model_index.h"

namespace megamoe {

struct LayerTensors {
  std::map<std::int64_t, std::array<MatrixParts, kNumNamedProjections>> experts;
  std::array<MatrixParts, kNumNamedProjections> all_experts;
  std::array<MatrixParts, kNumNamedProjections> shared;
};

// Fills every slot once, holds sizes against each other and against `config`, finds the router. Appends to
// `notes` what is suspicious but not wrong.
MoeLayerInfo build_layer(const Checkpoint& checkpoint, const std::string& prefix, const LayerTensors& tensors,
                         const ModelConfig& config, const ModelIndexOptions& options,
                         std::vector<std::string>& notes);

}  // namespace megamoe
