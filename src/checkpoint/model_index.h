// model_index.h: which tensors of a checkpoint are its experts, in whose naming, and how they are encoded.
//
// Each tensor is judged by what it is (dtype, rank, suffix); config.json and hf_quant_config.json are then
// held against it, and a contradiction is an error. Every tensor under an expert's name is used, excluded by
// name, or an error; every slot (layer, expert, projection) is filled exactly once.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/model_config.h"

namespace megamoe {

enum class Projection { kGate, kUp, kDown };
inline constexpr std::array<Projection, 3> kProjections = {Projection::kGate, Projection::kUp,
                                                           Projection::kDown};
std::string_view to_string(Projection projection);  // "gate", "up", "down"

enum class Encoding {
  kDense,      // F32, F16 or BF16
  kNvfp4,      // U8 codes, E4M3 per 16, FP32 tensor scale
  kMxfp4,      // U8/I8 codes, E8M0 (or U8) per 32
  kFp8Block,   // E4M3, FP32 or E8M0 per 128x128 (DeepSeek-V3); multiplies
  kFp8Tensor,  // E4M3, one FP32 per tensor or per row; multiplies
};
inline constexpr std::int64_t kFp8Block = 128;  // rows and columns under one scale of Encoding::kFp8Block
// The types of dense matrices, biases and routers.
constexpr bool is_float(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}
std::string_view to_string(Encoding encoding);  // "dense", "nvfp4", "mxfp4", "fp8-block", "fp8"

// The families of names that expert tensors come in.
enum class Family {
  kPlain,              // dense or FP8, as Hugging Face models store them
  kModelOpt,           // .weight, .weight_scale, .weight_scale_2, .input_scale
  kCompressedTensors,  // .weight_packed, .weight_scale, .weight_global_scale, .input_global_scale
  kDeepSeekV4,         // .weight I8, .scale E8M0
  kGptOss,             // *_blocks, *_scales, *_bias
};
std::string_view to_string(Family family);

// The matrix of one projection of one expert, as stored. [rows, cols] are those of the weight, y = x * W^T.
// Where a tensor holds several experts or gate and up together, `expert`, `row_first` and `row_step` say
// which part is meant.
struct ExpertMatrix {
  Encoding encoding = Encoding::kDense;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  const TensorRef* weight = nullptr;
  const TensorRef* block_scale = nullptr;   // all but kDense
  const TensorRef* tensor_scale = nullptr;  // kNvfp4
  const TensorRef* input_scale = nullptr;   // or null
  const TensorRef* unused_input_scale =
      nullptr;                      // or null: one for FP8 activations, which have their own here
  const TensorRef* bias = nullptr;  // or null
  bool reciprocal = false;          // tensor_scale and input_scale are stored as 1/value (compressed-tensors)
  bool transposed = false;  // stored [cols, rows] (per expert); packed codes along cols still pair two cols
  std::int64_t expert = 0;  // which slice of a tensor that holds all experts
  bool fused_experts = false;  // the tensor has a leading dimension of experts
  // This projection's rows are row_first, row_first + row_step, ... of the stored rows.
  std::int64_t row_first = 0;
  std::int64_t row_step = 1;
  std::int64_t stored_rows = 0;  // rows of the stored matrix (2 * rows where gate and up share it)
};

struct MoeLayerInfo {
  int layer = 0;       // its number in the model
  bool mtp = false;    // a multi-token-prediction layer (mtp.i...)
  std::string prefix;  // "model.layers.0.mlp": what precedes ".experts"
  Family family = Family::kPlain;
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  std::int64_t num_experts = 0;
  bool gated = true;
  std::vector<std::array<std::optional<ExpertMatrix>, 3>> experts;  // [E][projection]
  std::array<std::optional<ExpertMatrix>, 3> shared;
  const TensorRef* router_weight = nullptr;   // [E, H]
  const TensorRef* router_bias = nullptr;     // [E]: added to the logits
  const TensorRef* selection_bias = nullptr;  // [E]: e_score_correction_bias
  const TensorRef* hash_table = nullptr;      // tid2eid
  const TensorRef* shared_gate = nullptr;     // [1, H] or [H]
};

// The tensors of floats that decide where tokens go and what they weigh there: those that the layer has of
// its router and the shared expert's gate.
std::vector<const TensorRef*> router_tensors(const MoeLayerInfo& layer);

struct ModelIndexOptions {
  // For fused 3-D expert tensors whose two orders cannot be told apart by shape: "", "rows-first" ([E, 2I,
  // H]) or "cols-first" ([E, H, 2I]).
  std::string fused_layout;
};

struct ModelIndex {
  std::shared_ptr<const Checkpoint> checkpoint;
  std::string model_type;                // config.json's, or ""
  ModelConfig config;                    // what config.json and hf_quant_config.json say
  std::vector<MoeLayerInfo> layers;      // by number; mtp layers last, numbered on behind the others
  std::vector<const TensorRef*> others;  // of no routed expert (routers and shared experts are here too)
  std::vector<std::string> notes;        // suspicious but not wrong
  std::int64_t expert_tensors = 0;       // tensors of routed experts; with `others`, all there are
};

ModelIndex index_model(std::shared_ptr<const Checkpoint> checkpoint, const ModelIndexOptions& options = {});

// The layer numbered `layer`; throws kNotFound that lists the layers there are.
const MoeLayerInfo& find_layer(const ModelIndex& model, int layer);

// "model.layers.0.mlp.experts.3.gate": for messages and tables.
std::string matrix_name(const MoeLayerInfo& layer, std::int64_t expert, Projection projection);

}  // namespace megamoe
