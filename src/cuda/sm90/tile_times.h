// tile_times.h: how long a layer took with each tile of its GEMMs on some machine, and the tile that follows.
//
// As text, a line for each: activations, GEMM, an expert's weight rows and columns, experts, rows, tile,
// microseconds. Empty lines and those that begin with # say nothing.
//
//   nvfp4 first 4096 4096 256 384 16x4 931.2
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda/sm90/gemm.h"

namespace megamoe::sm90 {

enum class LayerGemm { kFirst, kSecond };

// What a tile is chosen for: nothing that depends on a routing.
struct GemmProblem {
  ActivationFormat activations;
  LayerGemm gemm;
  std::int64_t weight_rows;  // of an expert: H; I, or with a gate 2I
  std::int64_t cols;         // K
  std::int64_t experts;
  std::int64_t rows;  // of the worst routing
  friend auto operator<=>(const GemmProblem&, const GemmProblem&) = default;

  static GemmProblem of(const LayerConfig& config, ActivationFormat activations, LayerGemm gemm,
                        std::int64_t rows);
};

std::string to_string(const TileChoice& tile);  // "16x4": of 16 tokens and 4 row tiles

class TileTimes {
 public:
  // Throws kInvalidFile that names `source` and the line.
  static TileTimes parse(std::string_view text, std::string_view source);
  // Of the file that the environment variable MEGAMOE_TILES names; empty where it names none. Throws what
  // parse() and reading a file throw.
  static TileTimes of_environment();
  std::string text() const;

  void add(const GemmProblem& problem, const TileChoice& tile, double microseconds);

  // choose_tile()'s, unless another one took 1 % less in the measurement that speaks for the problem: that of
  // as many rows, or of the next larger number where it is not twice as large.
  TileChoice choose(const GemmProblem& problem) const;

  using Map = std::map<GemmProblem, std::vector<std::pair<TileChoice, double>>>;
  const Map& all() const { return times_; }

 private:
  Map times_;
};

// While it lives, the GEMMs of every layer that this thread runs take these tiles, for measurements.
class ForcedTiles {
 public:
  ForcedTiles(const TileChoice& first, const TileChoice& second);
  ~ForcedTiles();
  ForcedTiles(const ForcedTiles&) = delete;
  ForcedTiles& operator=(const ForcedTiles&) = delete;

  static const TileChoice* of(LayerGemm gemm);  // null: none is forced

 private:
  TileChoice tiles_[2];
};

}  // namespace megamoe::sm90
