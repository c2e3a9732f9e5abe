// tensor_names.h: what a tensor is, as far as its name alone tells.
//
//   model.layers.3.mlp.experts.12.gate_proj.weight_scale      one expert's projection
//   model.layers.3.mlp.experts.gate_up_proj_weight_scale      all experts, gate and up together
//   layers.3.ffn.experts.12.w1.scale                          w1 is gate, w3 up, w2 down
//   block.3.mlp.mlp1_weight.blocks                            gpt-oss by its first names
//   ^^^^^^^^^^^^^^^^^^ prefix
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace megamoe {

enum class TensorRole {
  kOther,         // says nothing of experts
  kExpert,        // of one expert
  kAllExperts,    // of all experts at once
  kSharedExpert,  // of the shared expert
  kUnknown,       // under an expert's name, but nothing we know
  kUnsupported,   // under an expert's name, part of a scheme that is not supported
};

enum class TensorPart {
  kWeight,            // .weight, or nothing behind the projection
  kPacked,            // .weight_packed
  kBlocks,            // _blocks
  kWeightScale,       // .weight_scale
  kScale,             // .scale
  kScales,            // _scales
  kScaleInv,          // .weight_scale_inv (it multiplies, whatever its name says)
  kTensorScale,       // .weight_scale_2
  kGlobalScale,       // .weight_global_scale
  kInputScale,        // .input_scale
  kInputGlobalScale,  // .input_global_scale
  kBias,              // .bias
};
inline constexpr std::size_t kNumTensorParts = 12;

// The first three are those of Projection.
enum class NamedProjection { kGate, kUp, kDown, kGateUp };
inline constexpr std::size_t kNumNamedProjections = 4;

inline constexpr std::int64_t kMaxExperts = 65536;
inline constexpr std::int64_t kMaxLayers = 1 << 20;

struct TensorName {
  TensorRole role = TensorRole::kOther;
  std::string_view prefix;  // what precedes ".experts", ".shared_experts", ".mlp1_weight"
  std::string_view module;  // the name without its part
  std::int64_t expert = 0;  // kExpert
  NamedProjection projection = NamedProjection::kGate;
  TensorPart part = TensorPart::kWeight;
};
TensorName parse_tensor_name(std::string_view name);

// The number below `limit` that `text` is in its one spelling, so that no two texts are the same number.
// Without a limit: one of an int.
std::optional<std::int64_t> parse_number(std::string_view text, std::int64_t limit = std::int64_t{1} << 31);

// "prefix.name", or `name` where there is no prefix.
std::string join_names(std::string_view prefix, std::string_view name);

// The number of the layer that a prefix belongs to: of "layers.N" or "block.N", else of "mtp.N", else 0.
struct LayerNumber {
  int number = 0;
  bool mtp = false;
};
LayerNumber parse_layer_number(std::string_view prefix);

}  // namespace megamoe
