#include "base/check.h"
#include "cuda/sm90/tile_times.h"
#include "engine/tune.h"

namespace megamoe {

using sm90::LayerGemm;
using sm90::TileChoice;

namespace {

LayerGemm gemm_of(const TunedGemm& gemm) { return gemm.first ? LayerGemm::kFirst : LayerGemm::kSecond; }

}  // namespace

std::vector<TunedGemm> tune_gemms(LayerBench& layer, std::int64_t tokens) {
  const auto time = [&](const TileChoice& first, const TileChoice& second) {
    const sm90::ForcedTiles forced(first, second);
    return layer.time(tokens);
  };
  const LayerConfig& config = layer.config();
  const sm90::OperandType type = sm90::operand_type(layer.activations());
  const std::int64_t rows = checked_mul(tokens, config.top_k);
  const TileChoice usual = sm90::choose_tile(type, rows, static_cast<int>(config.num_experts));
  const BenchResult result = time(usual, usual);
  std::vector<TunedGemm> gemms;
  for (const bool first : {true, false}) {
    TunedGemm& gemm = gemms.emplace_back();
    gemm.model = result.model;
    gemm.config = config;
    gemm.activations = layer.activations();
    gemm.first = first;
    gemm.tokens = tokens;
    gemm.rows = rows;
    gemm.tiles.push_back({usual.tokens, usual.row_tiles, result.median_seconds()});
    for (const TileChoice& tile : sm90::all_tiles(type)) {
      if (tile == usual) continue;
      const BenchResult other = first ? time(tile, usual) : time(usual, tile);
      gemm.tiles.push_back({tile.tokens, tile.row_tiles, other.median_seconds()});
    }
  }
  return gemms;
}

std::string tile_times_text(const std::vector<TunedGemm>& gemms) {
  sm90::TileTimes times;
  for (const TunedGemm& gemm : gemms) {
    const auto problem = sm90::GemmProblem::of(gemm.config, gemm.activations, gemm_of(gemm), gemm.rows);
    for (const TileTime& tile : gemm.tiles)
      times.add(problem, {tile.tokens, tile.row_tiles}, tile.seconds * 1e6);
  }
  return times.text();
}

}  // namespace megamoe
