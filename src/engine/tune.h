// tune.h: times a layer with every tile that its GEMMs may take on a GPU.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine/bench.h"

namespace megamoe {

struct TileTime {
  int tokens = 0, row_tiles = 0;  // as TileChoice of src/cuda/sm90/gemm.h
  double seconds = 0;             // of a pass
};

// One of a layer's GEMMs by tiles, the other one's being its usual one (where that is of few rows: what it
// would be of more).
struct TunedGemm {
  std::string model;
  LayerConfig config;
  ActivationFormat activations = ActivationFormat::kBf16;
  bool first = true;
  std::int64_t tokens = 0;
  std::int64_t rows = 0;
  std::vector<TileTime> tiles;  // the usual one, which is chosen where nothing was measured, is the first

  const TileTime& usual() const { return tiles.front(); }
  const TileTime& fastest() const;
  double loss() const { return usual().seconds / fastest().seconds - 1; }
};

struct TuneReport {
  std::string device;
  std::vector<TunedGemm> gemms;  // by model, then format, then tokens, the first GEMM before the second
  std::string text;              // all of it, for a file that MEGAMOE_TILES names
};

// As bench(), but without numbers of tokens for the powers of two up to 16384 and half-way between them, and
// without `repeat` five measurements of each. `on_measured` gets what there is so far, after each number of
// tokens. Throws kUnsupported where the backend runs on no GPU.
TuneReport tune(const BenchOptions& options, const std::function<void(const std::string&)>& on_start = {},
                const std::function<void(const TuneReport&)>& on_measured = {});

// In builds with a GPU backend: both GEMMs; and their text.
std::vector<TunedGemm> tune_gemms(LayerBench& layer, std::int64_t tokens);
std::string tile_times_text(const std::vector<TunedGemm>& gemms);

}  // namespace megamoe
