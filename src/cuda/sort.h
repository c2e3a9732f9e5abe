// sort.h: (token, slot) pairs into expert order on the GPU: stable, the same result every time.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace megamoe::cuda {

inline constexpr int kMaxSortedExperts = 1024;
inline constexpr unsigned long long kNoBadId = ~0ull;
inline constexpr int kOnePartPairs = 1024;  // what one CTA sorts

// Some rows of one expert.
struct RowTile {
  std::int32_t expert, rows, first_row;
};

struct SortParams {
  const std::int32_t* ids = nullptr;  // [tokens, top_k]; -1 is left out
  const float* weights = nullptr;     // [tokens, top_k]; a slot of weight 0 is left out
  std::int64_t tokens = 0;            // tokens * top_k < 2^31
  int top_k = 0;
  int experts = 0;
  std::int64_t* offsets = nullptr;       // [experts + 1]
  std::int32_t* row_to_token = nullptr;  // [tokens * top_k], the first offsets[experts] are written
  std::int32_t* row_to_slot = nullptr;   // likewise
  std::int32_t* slot_to_row = nullptr;   // [tokens * top_k]; -1 where left out
  // Up to two numbers of each expert (tensor scales) that are handed on to its rows; null: none.
  const float* of_expert[2] = {};  // [experts]
  float* of_row[2] = {};           // [tokens * top_k], the first offsets[experts] are written
  // An id that is neither -1 nor an expert's is left out, and the first such pair, token * top_k + slot, put
  // here; whoever made it kNoBadId before can read it whenever the stream has got there. May be null.
  unsigned long long* bad_id = nullptr;
  // Counters and tiles are for at most kOnePartPairs pairs, and may be null. `counters` become 0 before the
  // next kernel of the stream begins, even one that does not wait for this one.
  std::uint32_t* counters = nullptr;
  int num_counters = 0;
  // Each expert's rows in tiles of at most `tile_rows`, lower experts and rows first.
  RowTile* row_tiles = nullptr;           // [tokens * top_k]
  std::int32_t* num_row_tiles = nullptr;  // how many
  int tile_rows = 0;
  void* workspace = nullptr;  // sort_workspace_bytes(), 4-byte aligned
};

std::int64_t sort_workspace_bytes(std::int64_t tokens, int top_k, int experts);

// cudaErrorInvalidValue beyond the limits above.
cudaError_t sort(const SortParams& params, cudaStream_t stream);

}  // namespace megamoe::cuda
