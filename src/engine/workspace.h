// workspace.h: every buffer of one forward pass, laid out once in one block of memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/backend.h"
#include "megamoe/moe_layer.h"

namespace megamoe {

// Which buffers a pass needs: the options with every choice made.
struct PassPlan {
  std::int64_t tokens = 0;
  std::int64_t rows = 0;   // tokens * top_k: the most rows that any routing gives
  bool x_per_row = false;  // x is quantised for each routed row (its expert's static scale), not per token
  bool h_fused = false;    // the first GEMM writes h in its final format
  bool h_interleaved = false;  // BF16 h as [rows, 2I]
};
PassPlan plan_pass(const LayerConfig& config, const MoeLayerOptions& options, std::int64_t tokens);

// Pointers into one block. Where a format has no use for a buffer the pointer is null.
struct Workspace {
  std::int32_t* ids = nullptr;  // [tokens, top_k], checked
  float* weights = nullptr;     // [tokens, top_k]
  Routing routing;
  float* amax = nullptr;        // [rows]
  ActivationRows x;             // quantised x; empty for BF16
  ActivationRows h_bf16;        // [rows, I] or [rows, 2I]
  ActivationRows h;             // what the second GEMM reads
  float* expert_out = nullptr;  // [rows, H]
  float* shared_out = nullptr;  // [tokens, H]
  std::int64_t bytes = 0;       // of the whole block
};

// Lays the buffers out from `base` (64-byte aligned); with a null base only `bytes` is meaningful. One walk
// serves the size query and the pass. Throws kOutOfMemory if the size overflows.
Workspace lay_out(const LayerConfig& config, const MoeLayerOptions& options, const PassPlan& plan,
                  bool shared, std::byte* base);

}  // namespace megamoe
