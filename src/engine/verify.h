// verify.h: holds a quantised checkpoint against the one it was made from, matrix by matrix.
//
// Matrices are matched by layer, expert and projection, so the two may come in different families of names.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/model_index.h"
#include "engine/error_stats.h"
#include "megamoe/progress.h"

namespace megamoe {

struct MatrixVerification {
  std::int64_t expert = 0;  // -1: the shared expert
  Projection projection = Projection::kGate;
  std::int64_t cols = 0;  // row and column of the worst element are worst_at / cols and worst_at % cols
  ErrorStats error;
  // NVFP4 alone: what folding the block scale into an E4M3 operand (W4A8) adds, relative, RMS.
  std::optional<double> fold_error;
};

struct LayerVerification {
  int layer = 0;
  bool mtp = false;
  std::int64_t num_experts = 0;
  bool gated = true;
  std::vector<MatrixVerification> matrices;  // by expert, the shared one last
};

struct Verification {
  std::vector<LayerVerification> layers;
  std::vector<std::string> mismatches;  // what is missing or has another shape; empty where all is well
  std::int64_t others_equal = 0;        // tensors of no expert with the same name and the same bytes
};

// A layer in one row.
struct LayerSummary {
  std::string label;  // "3", "mtp 0"
  std::int64_t matrices = 0;
  double most_snr_db = 0;
  double median_snr_db = 0;
  double least_snr_db = 0;   // NaN if a matrix holds a value that is not finite
  std::string worst_name;    // whose SNR that is: "expert 7 down"
  double most_relative = 0;  // that matrix's relative error
  double least_cosine = 0;
  std::optional<double> fold_error;  // RMS over the matrices that have one
};
std::string layer_label(const LayerVerification& layer);
std::vector<LayerSummary> summarize(const Verification& verification);

// Throws kInvalidFile if a matrix cannot be read. Memory: two matrices for each thread.
Verification verify(const ModelIndex& quantized, const ModelIndex& source, const ProgressFn& progress = {});

}  // namespace megamoe
