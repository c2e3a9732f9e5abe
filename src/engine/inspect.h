// inspect.h: what a checkpoint's experts are and what about them is suspicious; reports, never refuses.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/model_index.h"

namespace megamoe {

enum class Severity {
  kNote,     // worth knowing
  kWarning,  // may cost accuracy, or is not what the format's writers usually leave
  kError,    // the layer will not load, or gives NaN
};
std::string_view to_string(Severity severity);  // "note", "warning", "error"

struct Finding {
  Severity severity = Severity::kNote;
  int layer = -1;  // -1: about the whole checkpoint
  std::string text;
};

struct MatrixInspection {
  Encoding encoding = Encoding::kDense;
  DType dtype = DType::kU8;  // of the weight as stored
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t bytes = 0;                   // its share of weight and block scales
  std::optional<double> tensor_scale = {};  // the multiplier
  std::optional<double> input_scale = {};   // the multiplier
  std::int64_t scales = 0;                  // block scales, and of these:
  std::int64_t saturated_scales = 0;        // the largest there is (E4M3 0x7E)
  std::int64_t nan_scales = 0;              // NaN, or infinite where the scale is FP32
  std::int64_t negative_scales = 0;
  std::int64_t zero_scales = 0;
  std::int64_t nonfinite_values = 0;  // of the bias, and of a kDense weight with InspectOptions::values
  bool all_zero = false;              // every code (kDense: value) is zero
};

struct ExpertInspection {
  std::int64_t expert = 0;                                          // -1: the shared expert
  std::array<std::optional<MatrixInspection>, 3> projections = {};  // by Projection
};

struct LayerInspection {
  int layer = 0;
  bool mtp = false;
  std::string prefix;
  Family family = Family::kPlain;
  std::vector<std::string> encodings = {};  // of the routed experts, each once: "nvfp4", "dense BF16"
  std::int64_t num_experts = 0;
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  bool has_shared = false;
  bool has_router = false;
  std::int64_t bytes = 0;  // of all experts, the shared one included
  std::int64_t elements = 0;
  std::int64_t matrices = 0;      // of the routed experts
  std::int64_t input_scales = 0;  // how many of them have one
  double min_tensor_scale = 0;    // 0 where there is none
  double max_tensor_scale = 0;
  std::int64_t unequal_gate_up = 0;            // experts whose gate and up have different tensor scales
  double max_gate_up_ratio = 1;                // the largest ratio of the two
  std::vector<ExpertInspection> experts = {};  // the shared one last

  double bits_per_weight() const {
    return elements == 0 ? 0.0 : 8.0 * static_cast<double>(bytes) / static_cast<double>(elements);
  }
};

struct Inspection {
  std::string model_type;
  std::vector<LayerInspection> layers;
  std::vector<Finding> findings;  // worst first
  std::int64_t files = 0;
  std::int64_t tensors = 0;
  std::int64_t bytes = 0;         // of all tensors
  std::int64_t expert_bytes = 0;  // of the experts' weights and block scales
};

struct InspectOptions {
  bool values = false;       // also reads every dense weight and counts those that are not finite
  std::optional<int> layer;  // only this one
};

Inspection inspect(const ModelIndex& model, const InspectOptions& options = {});

}  // namespace megamoe
