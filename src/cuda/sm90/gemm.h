// gemm.h: the two grouped GEMMs of the layer on Hopper.
//
// Launchers: raw device pointers, sizes, a stream; nothing is allocated or waited for. Weights are in the
// packed form of weight_layout.h. At most 1024 experts; fewer than 2^31 rows.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "cuda/combine.h"
#include "cuda/sm90/weight_layout.h"
#include "cuda/sort.h"
#include "megamoe/layer.h"

namespace megamoe::sm90 {

// A piece of a GEMM that a CTA computes at a time.
struct TileChoice {
  int tokens = 0;     // of a tile, a multiple of 8; at most, where tiles are wide
  int row_tiles = 0;  // of 64 weight rows. BF16 operands: 4, 3 or 2 of ever wider tiles, or 1 and four
                      // warpgroups share its K; FP8 operands: 4
  friend bool operator==(const TileChoice&, const TileChoice&) = default;
};
// The widest whose accumulators leave four warpgroups enough registers.
constexpr int narrow_tile(OperandType type) { return type == OperandType::kBf16 ? 64 : 56; }
// Beyond, tiles have the widths of their experts' rows, up to this: that of three warpgroups where operands
// are BF16, of two with two row tiles each where they are FP8;
constexpr int wide_tile(OperandType type) { return type == OperandType::kBf16 ? 136 : 112; }
// and for many rows, where operands are BF16, of two.
constexpr int widest_tile(OperandType type) { return type == OperandType::kBf16 ? 256 : wide_tile(type); }

// Of a tile that does not share K.
constexpr int row_tiles_of(OperandType type, int tokens) {
  return type == OperandType::kFp8 || tokens <= narrow_tile(type) ? 4 : tokens <= wide_tile(type) ? 3 : 2;
}

constexpr bool is_tile(OperandType type, const TileChoice& tile) {
  if (tile.row_tiles == 1) return type == OperandType::kBf16 && tile.tokens == 8;
  const bool width = tile.tokens == wide_tile(type) || tile.tokens == widest_tile(type) ||
                     (tile.tokens >= 8 && tile.tokens <= narrow_tile(type) && tile.tokens % 8 == 0);
  return width && tile.row_tiles == row_tiles_of(type, tile.tokens);
}

// What the weights are decoded to for such activations.
constexpr OperandType operand_type(ActivationFormat activations) {
  return activations == ActivationFormat::kFp8 ? OperandType::kFp8 : OperandType::kBf16;
}

// What both GEMMs take.
struct GroupedInput {
  const std::uint8_t* weights = nullptr;  // [experts][packed_bytes], packed for the tokens' operand type
  int experts = 0;
  std::int64_t weight_rows = 0;           // I (of gate and up each), or H
  std::int64_t cols = 0;                  // K, a multiple of 16
  const std::int64_t* offsets = nullptr;  // [experts + 1] on the device
  std::int64_t max_rows = 0;  // no routing has more rows; chooses the tile, and with it the order of sums
  // Tokens; `rows` and `cols` count. BF16: rows at multiples of 16 bytes. NVFP4: contiguous, scales are the
  // tensor scales [*]. FP8: as fp8_rows.h says, and no `gather`.
  ActivationRows tokens;
  // NVFP4: instead of codes and block scales, tokens.values [max_rows, cols] has the routed rows, decoded but
  // for their tensor scales, which lie as `gather` says.
  bool decoded = false;
  const std::int32_t* gather = nullptr;  // row r reads token row gather[r]; null: r itself
  void* workspace = nullptr;             // gemm_workspace_bytes(), 256-byte aligned, free after the call;
                                         // none where tokens are decoded
  // The kernel ahead in the stream waits for the one before it (await_previous_kernel) and writes neither
  // offsets nor weights: those are read while it runs.
  bool offsets_settled = false;
  TileChoice tile = {};  // {}: choose_tile()
};

// Bytes that a GEMM of at most max_rows rows needs at `workspace`; 0 where it needs none. `gathers`: it is
// given `gather`.
std::int64_t gemm_workspace_bytes(ActivationFormat format, bool gathers, std::int64_t max_rows,
                                  std::int64_t cols);

struct Gemm1 {
  GroupedInput in;
  ActivationConfig activation;
  const float* weight_scales = nullptr;  // [experts][2]: gate's and up's tensor scale; relu2: [experts]
  const float* gate_bias = nullptr;      // [experts, I] or null
  const float* up_bias = nullptr;        // [experts, I] or null
  L1Output mode = L1Output::kCompactBf16;
  ActivationRows out;       // as PreparedLayer::gemm1 says; kFp8, which FP8 tokens alone make:
                            // as fp8_rows.h says, for in.max_rows rows
  bool decode_out = false;  // kNvfp4: into out.values [rows, I], as GroupedInput::decoded says
  unsigned long long* saturated = nullptr;  // blocks of h cut to 448 are added here; may be null
};
cudaError_t gemm1(const Gemm1& call, cudaStream_t stream);

struct Gemm2 {
  GroupedInput in;
  const float* weight_scales = nullptr;  // [experts]
  const float* bias = nullptr;           // [experts, H] or null
  float* out = nullptr;                  // [rows, H]
};
cudaError_t gemm2(const Gemm2& call, cudaStream_t stream);

// Both in one launch, for at most kFewRows rows and operands that are BF16; the bits are those of gemm1() and
// gemm2() with the tile {8, 1}.
inline constexpr TileChoice kFewTile{8, 1};
inline constexpr int kFewRows = cuda::kOnePartPairs;
constexpr int few_counters(std::int64_t rows) { return 64 + static_cast<int>(rows); }
inline constexpr int kFewTokensDone = 1;  // of the counters
inline constexpr int kWarpPairs = 32;
struct FewGemms {
  // BF16 tokens, or NVFP4 ones decoded, which the kernel ahead may still be writing: until
  // counters[kFewTokensDone] says that all are there this one waits. A row for each token or, with `by_pair`,
  // for each pair. `gather` says where rows in expert order have their tensor scales; the offsets and the
  // workspace are not needed.
  Gemm1 first;
  bool by_pair = false;
  Gemm2 second;  // its tokens are what the first one writes, decoded
  // The pairs that become rows. They, weights and BF16 tokens are older than the sort, and counters 0 before
  // it lets others begin: this kernel may begin while the sort still runs.
  const std::int32_t* ids = nullptr;       // [tokens, top_k]; out of range: no row
  const float* routing_weights = nullptr;  // [tokens, top_k]; 0: no row
  int top_k = 0;
  // More than kWarpPairs pairs: what the sort, ahead, makes of them, with tiles for kFewTile.
  const cuda::RowTile* row_tiles = nullptr;
  const std::int32_t* num_row_tiles = nullptr;
  const std::int32_t* row_to_token = nullptr;
  const std::int32_t* row_to_slot = nullptr;
  std::uint32_t* counters = nullptr;  // [few_counters(rows)]
  // What combine() makes of the second GEMM's result; nothing shared, at most kWarpPairs pairs. y null:
  // nothing.
  cuda::CombineParams combine;
};
cudaError_t few_gemms(const FewGemms& call, cudaStream_t stream);

// Rows of an expert, if they spread evenly over as many as can have some.
constexpr std::int64_t mean_rows(std::int64_t rows, int experts) {
  const std::int64_t busy = rows < experts ? rows : experts;
  return busy == 0 ? 0 : (rows + busy - 1) / busy;
}

// Where kFewTile is taken: one launch for both GEMMs wins up to some rows an expert, five by measurements of
// three models; beyond, tiles of eight rows decode weights twice too often. With kFewestRows in all it does
// anyway, for larger pieces of weights leave SMs without any. A pass that cannot have one launch (a dynamic
// scale of h, the other forms of h) takes this tile all the same, so that the bits are the same.
inline constexpr int kFewestRows = 16, kFewMean = 5;
constexpr bool are_few(OperandType type, std::int64_t rows, int experts) {
  return type == OperandType::kBf16 &&
         (rows <= kFewestRows || (rows <= kFewRows && mean_rows(rows, experts) <= kFewMean));
}

// A tile for more rows: a narrow one that is wide enough for most experts, whose rows scatter around their
// mean by its square root: one row too many decodes the weights again. Where none is, wide ones, and the
// widest where the next narrower would take two. How many roots: by bench/tiles_h200.txt, which
// TileTimesTest holds this against.
constexpr TileChoice choose_larger_tile(OperandType type, std::int64_t rows, int experts) {
  const std::int64_t mean = mean_rows(rows, experts);
  if (rows <= kFewestRows) return {8, 4};
  std::int64_t root = 1;
  while (root * root < mean) ++root;
  const std::int64_t most = mean + root * 3 / 2;
  const int width = most <= narrow_tile(type) ? static_cast<int>((most + 7) / 8 * 8)
                    : mean <= wide_tile(type) ? wide_tile(type)
                                              : widest_tile(type);
  return {width, row_tiles_of(type, width)};
}

// The tile for a problem: a pure function of its size.
constexpr TileChoice choose_tile(OperandType type, std::int64_t rows, int experts) {
  return are_few(type, rows, experts) ? kFewTile : choose_larger_tile(type, rows, experts);
}

// Every tile there is.
std::vector<TileChoice> all_tiles(OperandType type);

}  // namespace megamoe::sm90
