#include "cuda/sm90/tile_times.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "base/check.h"
#include "base/file.h"

namespace megamoe::sm90 {
namespace {

constexpr double kWorthIt = 1.01;  // times closer than that are not told apart

std::string_view to_string(LayerGemm gemm) { return gemm == LayerGemm::kFirst ? "first" : "second"; }

thread_local const TileChoice* forced_tiles = nullptr;  // [2]

}  // namespace

GemmProblem GemmProblem::of(const LayerConfig& config, ActivationFormat activations, LayerGemm gemm,
                            std::int64_t rows) {
  const bool first = gemm == LayerGemm::kFirst;
  return {.activations = activations,
          .gemm = gemm,
          .weight_rows = first ? config.intermediate * (config.activation.gated() ? 2 : 1) : config.hidden,
          .cols = first ? config.hidden : config.intermediate,
          .experts = config.num_experts,
          .rows = rows};
}

std::string to_string(const TileChoice& tile) { return fmt::format("{}x{}", tile.tokens, tile.row_tiles); }

TileTimes TileTimes::parse(std::string_view text, std::string_view source) {
  TileTimes times;
  std::istringstream lines{std::string(text)};
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    std::istringstream fields(line);
    std::string activations, gemm, rest;
    if (!(fields >> activations) || activations[0] == '#') continue;
    const auto expect = [&](bool holds, std::string_view what) {
      if (!holds)
        fail(ErrorCode::kInvalidFile, "{}, line {}: expected {}, got '{}'", source, number, what, line);
    };
    GemmProblem problem{};
    TileChoice tile;
    char x = 0;
    double microseconds = 0;
    const bool complete = fields >> gemm >> problem.weight_rows >> problem.cols >> problem.experts >>
                              problem.rows >> tile.tokens >> x >> tile.row_tiles >> microseconds &&
                          x == 'x' && !(fields >> rest);
    expect(complete, "activations, GEMM, weight rows, columns, experts, rows, tile, microseconds");
    bool known = false;
    for (const ActivationFormat format :
         {ActivationFormat::kBf16, ActivationFormat::kFp8, ActivationFormat::kNvfp4}) {
      if (megamoe::to_string(format) == activations) known = true, problem.activations = format;
    }
    expect(known, "bf16, fp8 or nvfp4 first");
    problem.gemm = gemm == "first" ? LayerGemm::kFirst : LayerGemm::kSecond;
    expect(to_string(problem.gemm) == gemm, "first or second");
    expect(
        std::min({problem.weight_rows, problem.cols, problem.experts, problem.rows}) > 0 && microseconds > 0,
        "numbers above 0");
    expect(is_tile(operand_type(problem.activations), tile), "a tile that there is");
    times.add(problem, tile, microseconds);
  }
  return times;
}

TileTimes TileTimes::of_environment() {
  const char* path = std::getenv("MEGAMOE_TILES");
  if (path == nullptr || *path == '\0') return {};
  return parse(read_text_file(path), fmt::format("MEGAMOE_TILES={}", path));
}

std::string TileTimes::text() const {
  std::string text =
      "# activations, GEMM, weight rows, columns, experts, rows, tile, microseconds of a layer\n";
  for (const auto& [problem, times] : times_) {
    for (const auto& [tile, microseconds] : times) {
      text += fmt::format("{} {} {} {} {} {} {} {:.2f}\n", megamoe::to_string(problem.activations),
                          to_string(problem.gemm), problem.weight_rows, problem.cols, problem.experts,
                          problem.rows, sm90::to_string(tile), microseconds);
    }
  }
  return text;
}

void TileTimes::add(const GemmProblem& problem, const TileChoice& tile, double microseconds) {
  times_[problem].emplace_back(tile, microseconds);
}

TileChoice TileTimes::choose(const GemmProblem& problem) const {
  const TileChoice usual =
      choose_tile(operand_type(problem.activations), problem.rows, static_cast<int>(problem.experts));
  const auto at = times_.lower_bound(problem);
  if (at == times_.end() || at->first.rows >= 2 * problem.rows) return usual;
  GemmProblem measured = at->first;
  measured.rows = problem.rows;
  if (measured != problem) return usual;
  // Few rows, whose GEMMs run in one launch, and more of them do not speak for each other.
  const TileChoice usual_there =
      choose_tile(operand_type(problem.activations), at->first.rows, static_cast<int>(problem.experts));
  if ((usual == kFewTile) != (usual_there == kFewTile)) return usual;
  const auto& times = at->second;
  const auto fastest = std::min_element(times.begin(), times.end(),
                                        [](const auto& a, const auto& b) { return a.second < b.second; });
  const bool near = std::any_of(times.begin(), times.end(), [&](const auto& time) {
    return time.first == usual && time.second <= kWorthIt * fastest->second;
  });
  return near ? usual : fastest->first;
}

ForcedTiles::ForcedTiles(const TileChoice& first, const TileChoice& second) : tiles_{first, second} {
  MEGAMOE_CHECK(forced_tiles == nullptr);
  forced_tiles = tiles_;
}

ForcedTiles::~ForcedTiles() { forced_tiles = nullptr; }

const TileChoice* ForcedTiles::of(LayerGemm gemm) {
  return forced_tiles == nullptr ? nullptr : forced_tiles + static_cast<int>(gemm);
}

}  // namespace megamoe::sm90
