// recorded.h: activations of a model's layers, recorded to a safetensors file.
//
// Names     layers.N.mlp.input [tokens, H] (BF16, F16 or F32), and where they exist: .router_logits
//           [tokens, E], .output [tokens, H], .expert_ids [tokens, top_k] with .expert_weights, .token_ids
//           [tokens] of a hash-routed layer. "model." may stand before any of them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"
#include "megamoe/moe_layer.h"

namespace megamoe {

// Names to use in place of the usual ones; a tensor that is named so must exist.
struct RecordedNames {
  std::string input, router_logits, output, expert_ids, expert_weights, token_ids;
};

struct RecordedLayer {
  std::int64_t tokens = 0;
  std::vector<bf16> x;                  // [tokens, H]
  std::vector<float> router_logits;     // [tokens, E] or empty
  std::vector<float> output;            // [tokens, H] or empty
  std::vector<std::int32_t> ids;        // [tokens, top_k] or empty
  std::vector<float> weights;           // [tokens, top_k] or empty
  std::vector<std::int32_t> token_ids;  // [tokens] or empty
  std::int64_t rounded_inputs = 0;      // inputs that BF16 did not hold exactly
};

class RecordedActivations {
 public:
  explicit RecordedActivations(const std::filesystem::path& path) : file_(SafetensorsFile::open(path)) {}

  // The layers that have an input under its usual name, ascending.
  std::vector<int> layers() const;
  // The first `max_tokens` tokens of a layer. Throws kNotFound or kInvalidFile that name the tensor.
  RecordedLayer read(int layer, const LayerConfig& config, std::int64_t max_tokens,
                     const RecordedNames& names = {}) const;

 private:
  const TensorInfo* find(const std::string& given, int layer, const std::string& usual) const;

  SafetensorsFile file_;
};

// Where expert ids and weights came from.
enum class RoutingSource { kRecordedIds, kRecordedLogits, kRouter };
std::string_view to_string(RoutingSource source);  // "recorded ids", "recorded logits", "router"

// Fills ids and weights where they were not recorded: from the recorded logits, else from the layer's router.
RoutingSource route_recorded(const MoeLayer& layer, RecordedLayer& recorded);

}  // namespace megamoe
