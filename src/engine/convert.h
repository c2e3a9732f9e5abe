// convert.h: a checkpoint that is FP4 already, in another family's NVFP4.
#pragma once

#include <filesystem>
#include <string>

#include "engine/rewrite.h"

namespace megamoe {

struct ConvertOptions {
  Family to = Family::kModelOpt;  // or kCompressedTensors
  // For MXFP4 sources, which get a tensor scale; one that an NVFP4 source has is kept as it is.
  GateUpScale gate_up_scale = GateUpScale::kShared;
  bool overwrite = false;
  std::string fused_layout;  // see ModelIndexOptions
};

// NVFP4 keeps its codes and block scales byte for byte, inside and outside the experts; tensor scales are
// inverted once. MXFP4 is cast. Staging, resuming and errors are those of quantize_checkpoint.
RewriteReport convert_checkpoint(const std::filesystem::path& source,
                                 const std::filesystem::path& destination, const ConvertOptions& options,
                                 const ProgressFn& progress = {});

}  // namespace megamoe
