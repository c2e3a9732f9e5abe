#include <algorithm>

#include "base/check.h"
#include "cuda/sm90/tile_times.h"
#include "engine/tune.h"

namespace megamoe {

using sm90::LayerGemm;
using sm90::TileChoice;

namespace {

LayerGemm gemm_of(const TunedGemm& gemm) { return gemm.first ? LayerGemm::kFirst : LayerGemm::kSecond; }

}  // namespace

// Of few rows a pass runs both GEMMs in one launch where both have kFewTile: which pays for both, or for
// none. So the others are timed beside a partner without it; and where the pair is the fastest of all, its
// time is what both have.
std::vector<TunedGemm> tune_gemms(LayerBench& layer, std::int64_t tokens) {
  const auto time = [&](const TileChoice& first, const TileChoice& second) {
    const sm90::ForcedTiles forced(first, second);
    return layer.time(tokens);
  };
  const LayerConfig& config = layer.config();
  const sm90::OperandType type = sm90::operand_type(layer.activations());
  const std::int64_t rows = checked_mul(tokens, config.top_k);
  const int experts = static_cast<int>(config.num_experts);
  const TileChoice usual = sm90::choose_tile(type, rows, experts),
                   partner = sm90::choose_larger_tile(type, rows, experts);
  const BenchResult result = time(partner, partner);
  const double partner_seconds = result.median_seconds();
  double fastest = partner_seconds;
  std::vector<TunedGemm> gemms;
  for (const bool first : {true, false}) {
    TunedGemm& gemm = gemms.emplace_back();
    gemm.model = result.model;
    gemm.config = config;
    gemm.activations = layer.activations();
    gemm.first = first;
    gemm.tokens = tokens;
    gemm.rows = rows;
    for (const TileChoice& tile : sm90::all_tiles(type)) {
      const double seconds = tile == partner ? partner_seconds
                             : first         ? time(tile, partner).median_seconds()
                                             : time(partner, tile).median_seconds();
      gemm.tiles.insert(tile == usual ? gemm.tiles.begin() : gemm.tiles.end(),
                        TileTime{tile.tokens, tile.row_tiles, seconds});
      fastest = std::min(fastest, seconds);
    }
  }
  if (type != sm90::OperandType::kBf16 || rows > sm90::kFewRows) return gemms;
  const double few = time(sm90::kFewTile, sm90::kFewTile).median_seconds();
  for (TunedGemm& gemm : gemms) {
    for (TileTime& tile : gemm.tiles) {
      if (TileChoice{tile.tokens, tile.row_tiles} == sm90::kFewTile && few < fastest) tile.seconds = few;
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
