// quantize_checkpoint.h: a checkpoint with experts in any encoding becomes an NVFP4 one.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "engine/rewrite.h"

namespace megamoe {

struct QuantizeCheckpointOptions {
  Family format = Family::kModelOpt;  // or kCompressedTensors
  ActivationScales activations = ActivationScales::kNone;
  std::filesystem::path scales;  // kStatic: a file of input scales
  bool four_over_six = false;
  // Numbers of the layers; left empty: all but the multi-token-prediction ones.
  std::optional<std::vector<int>> layers;
  bool shared_experts = false;  // also these
  GateUpScale gate_up_scale = GateUpScale::kShared;
  bool overwrite = false;
  std::string fused_layout;  // see ModelIndexOptions
};

// MXFP4 experts are cast, all others quantised. Nothing stands under `destination` before it is complete; the
// same call again continues an interrupted one. Throws kInvalidArgument for an expert that is NVFP4 already.
RewriteReport quantize_checkpoint(const std::filesystem::path& source,
                                  const std::filesystem::path& destination,
                                  const QuantizeCheckpointOptions& options, const ProgressFn& progress = {});

// "0,3-5" -> {0, 3, 4, 5}. Throws kInvalidArgument.
std::vector<int> parse_layers(const std::string& text);

}  // namespace megamoe
