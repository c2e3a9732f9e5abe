// gemm.cc: what a caller of the GEMMs asks before it calls them.
#include "cuda/sm90/gemm.h"

#include "base/check.h"

namespace megamoe::sm90 {

std::int64_t gemm_workspace_bytes(ActivationFormat format, bool gathers, std::int64_t max_rows,
                                  std::int64_t cols) {
  if (format == ActivationFormat::kFp8 || (format == ActivationFormat::kBf16 && !gathers)) return 0;
  return checked_mul(checked_mul(max_rows, cols), sizeof(bf16));
}

std::vector<TileChoice> all_tiles(OperandType type) {
  std::vector<TileChoice> tiles;
  if (type == OperandType::kBf16) tiles.push_back({8, 1});
  for (int tokens = 8; tokens <= narrow_tile(type); tokens += 8)
    tiles.push_back({tokens, row_tiles_of(type, tokens)});
  tiles.push_back({wide_tile(type), row_tiles_of(type, wide_tile(type))});
  if (widest_tile(type) > wide_tile(type))
    tiles.push_back({widest_tile(type), row_tiles_of(type, widest_tile(type))});
  return tiles;
}

}  // namespace megamoe::sm90
