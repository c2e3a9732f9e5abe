// backend.h: what every backend does: the operations of the layer, one after the other.
//
// Pointers are memory of the backend's own kind (host memory for `ref` and `cpu`). An operation checks
// nothing that its caller can check once; `engine` does that. All are deterministic: the same input gives
// the same bits for any thread count.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "megamoe/layer.h"
#include "megamoe/types.h"

namespace megamoe {

// Rows of activations in one of the three formats.
struct ActivationRows {
  ActivationFormat format = ActivationFormat::kBf16;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t row_stride = 0;    // kBf16: elements from row to row; the others are contiguous
  bf16* values = nullptr;         // kBf16:  [rows, cols]; where a backend's own pass keeps kNvfp4 decoded,
                                  // what codes and block scales stand for, instead of them
  std::uint8_t* codes = nullptr;  // kFp8:   [rows, cols] E4M3;  kNvfp4: [rows, cols / 2]
  std::uint8_t* block_scales = nullptr;  // kNvfp4: [rows, cols / 16] E4M3
  float* scales = nullptr;               // kFp8:   [rows, ceil(cols / 128)];  kNvfp4: [rows] tensor scales
};

// The (token, slot) pairs that go to some expert, in expert order; within an expert by token, then slot.
struct Routing {
  std::int64_t tokens = 0;
  int top_k = 0;
  std::int64_t num_experts = 0;
  std::int64_t* offsets = nullptr;       // [num_experts + 1]; rows of expert e: offsets[e] .. offsets[e+1]
  std::int32_t* row_to_token = nullptr;  // [tokens * top_k], the first offsets[num_experts] are used
  std::int32_t* row_to_slot = nullptr;   // [tokens * top_k], likewise
};

// What the first GEMM writes.
enum class L1Output {
  kInterleavedBf16,  // [R, 2I]: gate and up alternate every 8 columns; the up columns hold the result h,
                     // the gate columns silu(gate) (gpt-oss: gate * sigmoid(alpha * gate))
  kCompactBf16,      // [R, I]: h alone
  kFp8,              // h quantised in the epilogue, E4M3 per row and 128 columns
  kNvfp4,            // h quantised in the epilogue under h.scales, nothing else written
};
std::string_view to_string(L1Output output);

class DevicePass;    // pass.h
struct PassOptions;  // pass.h

// The weights of a layer in the form a backend wants them; made once, used by every call.
class PreparedLayer {
 public:
  virtual ~PreparedLayer() = default;
  virtual const LayerConfig& config() const = 0;

  // First GEMM. x holds one row per token and `x_is_gathered` is false, or one per routed row and it is
  // true. `out` receives rows offsets[0] .. offsets[E]; for kInterleavedBf16 and kCompactBf16 in
  // out.values; for kNvfp4 out.scales [R] is an input: the tensor scale of each row of h.
  // Returns the blocks of h that saturated at their tensor scale (kNvfp4; else 0).
  virtual std::int64_t gemm1(const ActivationRows& x, bool x_is_gathered, const Routing& routing,
                             L1Output mode, const ActivationRows& out) const = 0;
  // Second GEMM: y_e [R, H] FP32 (bias included), one row per routed row.
  virtual void gemm2(const ActivationRows& h, const Routing& routing, float* out) const = 0;
  // The shared expert on every token, BF16 activations: out [tokens, H] FP32, its sigmoid gate applied.
  virtual void shared_expert(const ActivationRows& x, float* out) const = 0;

  // The whole pass in one go, for a backend that runs on a GPU; null for one that works in host memory.
  // Refers to this object.
  virtual std::unique_ptr<DevicePass> device_pass(const PassOptions& options) const;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string_view name() const = 0;         // "ref", "cpu", ...
  virtual std::string_view description() const = 0;  // one line for `megamoe backends`
  virtual std::string_view needs() const = 0;        // "any CPU", "Hopper GPU", ...
  virtual bool supported() const = 0;                // on this machine, now

  // Whether it multiplies such activations by weights in such a format; a shared expert's are BF16.
  virtual bool runs(ActivationFormat activations, WeightFormat weights) const = 0;
  // Whether sums of NVFP4 products are added in the reference's order, so that W4A4 gives the reference's
  // bits.
  virtual bool keeps_order() const = 0;

  virtual std::unique_ptr<PreparedLayer> prepare(const LayerWeights& weights) const = 0;

  // Expert ids [tokens, top_k] and weights [tokens, top_k] from logits [tokens, E]. `selection_bias` [E] or
  // null. `hash_ids` [tokens, top_k] replaces the choice where the layer is hash-routed, else null.
  virtual void route(const float* logits, std::int64_t tokens, const LayerConfig& config,
                     const float* selection_bias, const std::int32_t* hash_ids, std::int32_t* ids,
                     float* weights) const = 0;
  // Stable sort of ids [tokens, top_k] into `routing` (sizes set by the caller). id -1 is left out, and so is
  // a slot of weight 0.
  virtual void sort(const std::int32_t* ids, const float* weights, const Routing& routing) const = 0;
  // NVFP4 of x [rows, cols] under given tensor scales out.scales [rows]; returns the saturated blocks.
  // `row_map` (or null): row r of `out` is row row_map[r] of x.
  virtual std::int64_t quantize(const ActivationRows& x, const std::int32_t* row_map,
                                const ActivationRows& out) const = 0;
  // E4M3 of x per row and 128 columns; fills out.codes and out.scales.
  virtual void quantize_fp8(const ActivationRows& x, const ActivationRows& out) const = 0;
  // NVFP4 of the up columns of `x` [rows, 2I] as kInterleavedBf16 leaves them; returns the saturated blocks.
  virtual std::int64_t deinterleave_quantize(const ActivationRows& x, const ActivationRows& out) const = 0;
  // Largest finite magnitude of each row of x -> amax [rows].
  virtual void row_amax(const ActivationRows& x, float* amax) const = 0;
  // Of the up columns of x [rows, 2I], as deinterleave_quantize takes it.
  virtual void deinterleave_row_amax(const ActivationRows& x, float* amax) const = 0;
  // y[t] = bf16(sum over slots in slot order, in FP32, of weight * y_e, then + shared[t]). `shared` may be
  // null. `weights` [tokens, top_k]. A slot that was left out adds exactly nothing.
  virtual void combine(const float* expert_out, const Routing& routing, const float* weights,
                       const float* shared, MatrixView<bf16> y) const = 0;
};

}  // namespace megamoe
