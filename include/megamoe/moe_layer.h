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
  std::string backend;  // a name from list_backends(), or "" for the best one here that runs the layer
  ActivationFormat activations = ActivationFormat::kBf16;
  // kNvfp4 only. Left empty: static where every expert has its scale in the checkpoint, else dynamic by row.
  std::optional<ScaleSource> x_scale = {};
  std::optional<ScaleSource> h_scale = {};
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

// What forward_on_stream() counts, in GPU memory. The caller copies an object made by the constructor there
// before the first pass, and reads it whenever the stream has got that far; passes only add to it.
struct StreamStatus {
  unsigned long long saturated = 0;  // activation blocks that were cut at their tensor scale
  unsigned long long bad_id =
      ~0ull;  // the least token * top_k + slot whose id was out of range; ~0: there is none
};

// A layer whose backend runs on a GPU belongs to the device that was current when it was made.
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
  // their tensor scale. On a GPU, unless somebody listens to the stages, the pass runs there in one go, in
  // memory that the layer keeps; callers on other threads wait for each other.
  std::int64_t forward(MatrixView<const bf16> x, MatrixView<const std::int32_t> ids,
                       MatrixView<const float> weights, MatrixView<bf16> y,
                       std::span<std::byte> workspace) const;
  std::int64_t forward(MatrixView<const bf16> x, MatrixView<const std::int32_t> ids,
                       MatrixView<const float> weights, MatrixView<bf16> y) const;

  // Whether the backend runs on a GPU, so that the next two can be called; they throw kUnsupported elsewhere.
  bool on_gpu() const;
  // Bytes of GPU memory that forward_on_stream() needs for this many tokens under the worst routing. Throws
  // kOutOfMemory on overflow, kUnsupported for more tokens than one pass takes: 2^31 - 1 (token, slot) pairs.
  std::int64_t stream_workspace_bytes(std::int64_t tokens) const;
  // forward() on GPU memory: every pointer is the layer's device's, and so is `stream`, a cudaStream_t (null:
  // that device's default stream). Puts the pass on the stream and returns: it allocates nothing, waits for
  // nothing, reads nothing back, and can be captured in a CUDA graph by its very first call. The current
  // device need not be the layer's and stays what it was. Threads may call it at once, each with a workspace
  // and a y of its own.
  //
  // x and y may have any row stride, but rows of x start at 16-byte boundaries; ids and weights are
  // contiguous. `workspace` at a 256-byte boundary, as cudaMalloc gives, with stream_workspace_bytes() or
  // more; what it held does not matter. An id outside [-1, E) adds 0 and is noted in `status`, as are
  // saturated blocks; null: nobody asks. Throws kInvalidArgument for anything else that does not fit, before
  // anything is put on the stream.
  void forward_on_stream(MatrixView<const bf16> x, MatrixView<const std::int32_t> ids,
                         MatrixView<const float> weights, MatrixView<bf16> y, std::span<std::byte> workspace,
                         void* stream, StreamStatus* status = nullptr) const;

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
