// moe_layer.h: a mixture-of-experts layer that is loaded once and run many times.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "megamoe/layer.h"
#include "megamoe/types.h"

namespace megamoe {

struct MoeLayerOptions {
  std::string backend;  // a name from list_backends(), or "" for the best one here
  ActivationFormat activations = ActivationFormat::kBf16;
  // kNvfp4 only. Left empty: static where every expert has its scale in the checkpoint, else dynamic by row.
  std::optional<ScaleSource> x_scale;
  std::optional<ScaleSource> h_scale;
  // kFused writes h in its final format from the first GEMM; the other two write BF16 and quantise it
  // afterwards. All three give the same bits; kFused needs a static h scale in kNvfp4 and falls back without.
  enum class L1 { kFused, kCompact, kInterleaved };
  L1 l1 = L1::kFused;
  // For load(): the order of fused expert tensors that shapes leave open, "rows-first" or "cols-first".
  std::string fused_layout = {};
};

// What a stage of forward() left, handed to MoeLayer::on_stage in order: "x", "x_codes", "offsets", "h", ...
struct Stage {
  std::string name;
  DType dtype;
  std::vector<std::int64_t> shape;
  const void* data;  // host memory, valid during the call
};

class MoeLayer {
 public:
  // From a checkpoint (a file or a directory): the layer numbered `layer`.
  static MoeLayer load(const std::filesystem::path& checkpoint, int layer,
                       const MoeLayerOptions& options = {});
  // From weights in memory; checks them.
  MoeLayer(LayerWeights weights, const MoeLayerOptions& options);
  ~MoeLayer();
  MoeLayer(MoeLayer&&) noexcept;
  MoeLayer& operator=(MoeLayer&&) noexcept;

  const LayerConfig& config() const;
  const MoeLayerOptions& options() const;  // with every choice made
  std::string_view backend() const;
  const std::vector<std::string>& notes() const;  // what a user should know about the weights

  // Logits [tokens, E] of x [tokens, H] by the checkpoint's router; throws kInvalidArgument where it has
  // none.
  void router_logits(MatrixView<const bf16> x, MatrixView<float> logits) const;
  // Expert ids and weights [tokens, top_k] from logits [tokens, E]. A hash-routed layer needs `token_ids`
  // [tokens].
  void route(MatrixView<const float> logits, MatrixView<std::int32_t> ids, MatrixView<float> weights,
             std::span<const std::int32_t> token_ids = {}) const;

  // Bytes that forward() needs for this many tokens under the worst routing. Throws kOutOfMemory on overflow.
  std::int64_t workspace_bytes(std::int64_t tokens) const;
  // y [tokens, H] from x [tokens, H], ids and weights [tokens, top_k]. An id of -1 or a weight of 0 adds
  // exactly 0; any other id outside [0, E) is an error that names token and slot. `workspace` at a 64-byte
  // boundary; the two-way form allocates its own. Returns the number of activation blocks that saturated at
  // their tensor scale.
  std::int64_t forward(MatrixView<const bf16> x, MatrixView<const std::int32_t> ids,
                       MatrixView<const float> weights, MatrixView<bf16> y,
                       std::span<std::byte> workspace) const;
  std::int64_t forward(MatrixView<const bf16> x, MatrixView<const std::int32_t> ids,
                       MatrixView<const float> weights, MatrixView<bf16> y) const;

  // Called after every stage of forward(); for debugging and calibration.
  void on_stage(std::function<void(const Stage&)> callback);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Name, description, need and support of every backend in this build, best first.
struct BackendInfo {
  std::string name;
  std::string description;
  std::string needs;
  bool supported;
};
std::vector<BackendInfo> list_backends();

}  // namespace megamoe
