// pass.h: one forward pass: its options, its buffers, and what a backend offers that runs it whole.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/backend.h"

namespace megamoe {

// The options of a pass, every choice made.
struct PassOptions {
  ActivationFormat activations = ActivationFormat::kBf16;
  ScaleSource x_scale = ScaleSource::kDynamicRow;  // kNvfp4 alone, as the next three
  ScaleSource h_scale = ScaleSource::kDynamicRow;
  std::vector<float> x_scales;           // [E] where static; all the same for kStaticLayerMax
  std::vector<float> h_scales;           // likewise
  L1Output l1 = L1Output::kCompactBf16;  // what the first GEMM writes

  // x is quantised for each routed row (under its expert's static scale), not for each token.
  bool x_per_row() const {
    return activations == ActivationFormat::kNvfp4 && x_scale == ScaleSource::kStatic;
  }
  // The first GEMM writes h in the format that the second one reads.
  bool h_fused() const {
    return activations == ActivationFormat::kBf16 || l1 == L1Output::kFp8 || l1 == L1Output::kNvfp4;
  }
};

// Hands out aligned pieces of a block of memory, or only counts their bytes where `base` is null.
class Arena {
 public:
  Arena(std::byte* base, std::int64_t alignment) : base_(base), alignment_(alignment) {}

  // [rows, cols] elements. Throws kOutOfMemory if a size overflows.
  template <class T>
  T* take(std::int64_t rows, std::int64_t cols = 1) {
    return reinterpret_cast<T*>(take_bytes(rows, cols, sizeof(T)));
  }
  std::int64_t used() const { return used_; }

 private:
  std::byte* take_bytes(std::int64_t rows, std::int64_t cols, std::int64_t size);

  std::byte* base_;
  std::int64_t alignment_;
  std::int64_t used_ = 0;
};

// What every pass needs, in memory of the backend's kind; for the worst routing, which has tokens * top_k
// rows. Where a format has no use for a buffer the pointer is null. FP8 rows have room for whole groups of
// 128 columns, their scales for the gaps that a GPU leaves between experts.
struct PassBuffers {
  Routing routing;
  float* amax = nullptr;        // kNvfp4: [rows]
  ActivationRows x;             // quantised x; empty for kBf16
  ActivationRows h_bf16;        // [rows, I], or [rows, 2I] if interleaved; empty where h is fused
  ActivationRows h;             // what the second GEMM reads
  float* expert_out = nullptr;  // [rows, H]
  float* shared_out = nullptr;  // [tokens, H]
};
// What a backend wants of them.
struct BufferNeeds {
  bool x_per_row = false;  // quantised x has a row for each routed row, not for each token
  bool shared = false;     // there is a shared expert
  bool nvfp4_decoded =
      false;  // NVFP4 rows have tensor scales alone: the backend keeps their decoded values elsewhere
};
// The size query and the pass walk this same code.
PassBuffers take_buffers(Arena& arena, const LayerConfig& config, const PassOptions& options,
                         std::int64_t tokens, const BufferNeeds& needs);

// GPU memory starts at such an address.
inline constexpr std::int64_t kDeviceAlignment = 256;

// Operands of a pass on a GPU, all of them its memory.
struct DeviceCall {
  MatrixView<const bf16> x;                 // [tokens, H], rows at 16-byte boundaries
  const std::int32_t* ids = nullptr;        // [tokens, top_k]
  const float* weights = nullptr;           // [tokens, top_k]
  MatrixView<bf16> y;                       // [tokens, H]
  std::byte* workspace = nullptr;           // workspace_bytes(tokens), at a multiple of kDeviceAlignment
  void* stream = nullptr;                   // cudaStream_t
  unsigned long long* saturated = nullptr;  // blocks of x and h cut to 448 are added; or null
  unsigned long long* bad_pair =
      nullptr;  // becomes the least token * top_k + slot whose id is out of range; or null
};

// A whole pass on a GPU, for one layer and its options, which both outlive it. Const: any number of threads
// may use it at once, each with buffers of its own.
class DevicePass {
 public:
  virtual ~DevicePass() = default;
  // Throws kOutOfMemory if it overflows, kUnsupported for more tokens than one pass takes.
  virtual std::int64_t workspace_bytes(std::int64_t tokens) const = 0;
  // Puts the pass on the stream and returns; allocates nothing, waits for nothing, reads nothing back.
  virtual void enqueue(const DeviceCall& call) const = 0;
  // The same on host memory, ids checked by the caller, with GPU buffers that it keeps; one call at a time,
  // others wait. Returns the saturated blocks.
  virtual std::int64_t run_from_host(MatrixView<const bf16> x, MatrixView<const std::int32_t> ids,
                                     MatrixView<const float> weights, MatrixView<bf16> y) const = 0;
};

}  // namespace megamoe
