#include <algorithm>
#include <limits>

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
// none. So the others are timed beside a partner without it; and kFewTile has the time of the one launch,
// where that is less than the fastest others take together.
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
    }
  }
  if (type != sm90::OperandType::kBf16 || rows > sm90::kFewRows) return gemms;
  TileChoice others[2];  // the fastest of each
  TileTime* few_times[2] = {};
  for (int i = 0; i < 2; ++i) {
    double fastest = std::numeric_limits<double>::infinity();
    for (TileTime& tile : gemms[static_cast<std::size_t>(i)].tiles) {
      const TileChoice choice{tile.tokens, tile.row_tiles};
      if (choice == sm90::kFewTile) {
        few_times[i] = &tile;
      } else if (tile.seconds < fastest) {
        fastest = tile.seconds, others[i] = choice;
      }
    }
  }
  const double few = time(sm90::kFewTile, sm90::kFewTile).median_seconds();
  const bool pays = few < time(others[0], others[1]).median_seconds();
  for (int i = 0; i < 2; ++i) {
    const double fastest = gemms[static_cast<std::size_t>(i)].fastest().seconds;
    few_times[i]->seconds = pays ? std::min(few, fastest) : std::max(few, few_times[i]->seconds);
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
