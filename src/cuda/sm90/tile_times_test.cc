// tile_times_test.cc: the tile that follows from measurements. No GPU is needed.
#include "cuda/sm90/tile_times.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <thread>
#include <utility>

#include "base/file.h"
#include "base/test_variable.h"
#include "checkpoint/test_files.h"
#include "megamoe/error.h"

namespace megamoe::sm90 {
namespace {

constexpr GemmProblem kProblem = {.activations = ActivationFormat::kNvfp4,
                                  .gemm = LayerGemm::kFirst,
                                  .weight_rows = 4096,
                                  .cols = 4096,
                                  .experts = 256,
                                  .rows = 2560};
constexpr TileChoice kUsual = choose_tile(OperandType::kBf16, 2560, 256), kOther{40, 4};
static_assert(kUsual != kOther);

TileChoice chosen(double usual_us, double other_us, const GemmProblem& problem = kProblem) {
  TileTimes times;
  times.add(kProblem, kUsual, usual_us);
  times.add(kProblem, kOther, other_us);
  return times.choose(problem);
}

TEST(TileTimesTest, TheFastestIsChosenIfItIsWorthIt) {
  EXPECT_EQ(TileTimes().choose(kProblem), kUsual);
  EXPECT_EQ(chosen(100, 98), kOther);
  EXPECT_EQ(chosen(100, 99.5), kUsual);
  EXPECT_EQ(chosen(100, 120), kUsual);
  TileTimes times;  // the usual one was not measured
  times.add(kProblem, kOther, 1);
  EXPECT_EQ(times.choose(kProblem), kOther);
}

TEST(TileTimesTest, AMeasurementSpeaksForHalfAsManyRowsToItsOwn) {
  const auto with_rows = [](std::int64_t rows) {
    GemmProblem problem = kProblem;
    problem.rows = rows;
    return chosen(100, 50, problem) == kOther;
  };
  EXPECT_TRUE(with_rows(2560));
  EXPECT_TRUE(with_rows(1281));
  EXPECT_FALSE(with_rows(1280));
  EXPECT_FALSE(with_rows(2561));
  EXPECT_FALSE(with_rows(0));
  // The next larger one.
  TileTimes times;
  GemmProblem problem = kProblem;
  times.add(problem, {24, 4}, 1);
  problem.rows = 2000;
  times.add(problem, {32, 4}, 1);
  EXPECT_EQ(times.choose(kProblem), (TileChoice{24, 4}));
  EXPECT_EQ(times.choose(problem), (TileChoice{32, 4}));
  problem.rows = 2001;
  EXPECT_EQ(times.choose(problem), (TileChoice{24, 4}));
}

TEST(TileTimesTest, FewRowsAndMoreOfThemDoNotSpeakForEachOther) {
  GemmProblem few = kProblem, more = kProblem;
  few.rows = 1020, more.rows = 1152;
  TileTimes times;
  times.add(more, kOther, 1);
  EXPECT_EQ(times.choose(more), kOther);
  EXPECT_EQ(times.choose(few), kFewTile);
  times.add(few, {16, 4}, 1);
  few.rows = 600;
  EXPECT_EQ(times.choose(few), (TileChoice{16, 4}));
}

TEST(TileTimesTest, OtherProblemsKeepTheirTile) {
  std::vector<GemmProblem> others(5, kProblem);
  others[0].activations = ActivationFormat::kBf16;
  others[1].gemm = LayerGemm::kSecond;
  others[2].weight_rows = 2048;
  others[3].cols = 7168;
  others[4].experts = 255;
  for (const GemmProblem& other : others) {
    EXPECT_EQ(chosen(100, 50, other),
              choose_tile(operand_type(other.activations), other.rows, static_cast<int>(other.experts)));
  }
}

TEST(TileTimesTest, ProblemsOfALayer) {
  LayerConfig config{
      .hidden = 64, .intermediate = 32, .num_experts = 4, .top_k = 2, .activation = {}, .router = {}};
  const auto of = [&](LayerGemm gemm) { return GemmProblem::of(config, ActivationFormat::kFp8, gemm, 10); };
  EXPECT_EQ(of(LayerGemm::kFirst), (GemmProblem{ActivationFormat::kFp8, LayerGemm::kFirst, 64, 64, 4, 10}));
  EXPECT_EQ(of(LayerGemm::kSecond), (GemmProblem{ActivationFormat::kFp8, LayerGemm::kSecond, 64, 32, 4, 10}));
  config.activation.kind = Activation::kRelu2;
  EXPECT_EQ(of(LayerGemm::kFirst).weight_rows, 32);
}

TEST(TileTimesTest, TextComesBack) {
  TileTimes times;
  for (const ActivationFormat format :
       {ActivationFormat::kBf16, ActivationFormat::kFp8, ActivationFormat::kNvfp4}) {
    for (const LayerGemm gemm : {LayerGemm::kFirst, LayerGemm::kSecond}) {
      GemmProblem problem = kProblem;
      problem.activations = format, problem.gemm = gemm;
      double us = 931.25;
      for (const TileChoice& tile : all_tiles(operand_type(format))) times.add(problem, tile, us += 100);
    }
  }
  const std::string text = times.text();
  EXPECT_NE(text.find("\nnvfp4 first 4096 4096 256 2560 16x4 1231.25\n"), std::string::npos) << text;
  const TileTimes parsed = TileTimes::parse("\n# a comment\n \n" + text, "test");
  EXPECT_EQ(parsed.text(), text);
  EXPECT_EQ(parsed.choose(kProblem), (TileChoice{8, 1}));
}

TEST(TileTimesTest, RefusesWhatItDoesNotUnderstand) {
  const std::string good = "fp8 second 4096 2048 256 384 16x4 931.2";
  EXPECT_NE(TileTimes::parse(good, "f").text().find("fp8 second"), std::string::npos);
  for (const auto& [line, part] : std::vector<std::pair<std::string, std::string>>{
           {"fp8 second 4096 2048 256 384 16x4", "microseconds"},
           {good + " 1", "microseconds"},
           {"fp8 second 4096 2048 256 384 16 4 931.2", "microseconds"},
           {"fp8 second 4096 2048 256 384 16*4 931.2", "microseconds"},
           {"fp8 second 4096 2048 256 99999999999999999999 16x4 931.2", "microseconds"},
           {"fp8 second 4096 2048 256 384 16x4 inf", "microseconds"},
           {"fp4 second 4096 2048 256 384 16x4 931.2", "bf16, fp8 or nvfp4"},
           {"fp8 third 4096 2048 256 384 16x4 931.2", "first or second"},
           {"fp8 second 4096 2048 256 -384 16x4 931.2", "above 0"},
           {"fp8 second 4096 2048 256 384 16x4 0", "above 0"},
           {"fp8 second 4096 2048 256 384 12x4 931.2", "a tile that there is"},
           {"fp8 second 4096 2048 256 384 64x4 931.2", "a tile that there is"},
           {"bf16 second 4096 2048 256 384 16x3 931.2", "a tile that there is"}}) {
    try {
      TileTimes::parse(good + "\n" + line + "\n", "the-file");
      FAIL() << line;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidFile);
      for (const std::string& expected : {part, line, std::string("the-file, line 2")}) {
        EXPECT_NE(std::string(error.what()).find(expected), std::string::npos) << error.what();
      }
    }
  }
}

TEST(TileTimesTest, TheEnvironmentNamesAFile) {
  const testing::TempDir folder;
  const std::filesystem::path path = folder / "tiles.txt";
  {
    const ForcedVariable none("MEGAMOE_TILES", "");
    EXPECT_EQ(TileTimes::of_environment().choose(kProblem), kUsual);
  }
  const ForcedVariable forced("MEGAMOE_TILES", path.string());
  EXPECT_THROW(TileTimes::of_environment(), Error);
  write_file_atomically(path, "nvfp4 first 4096 4096 256 2560 40x4 1\n");
  EXPECT_EQ(TileTimes::of_environment().choose(kProblem), kOther);
  write_file_atomically(path, "nvfp4 first\n");
  try {
    TileTimes::of_environment();
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("MEGAMOE_TILES=" + path.string() + ", line 1"),
              std::string::npos)
        << error.what();
  }
}

// What is kept of a GPU's measurements: the formula's tile is the fastest or nearly so.
TEST(TileTimesTest, TheFormulaIsNearTheFastest) {
  const std::filesystem::path source = MEGAMOE_SOURCE_DIR, path = source / "bench" / "tiles_h200.txt";
  if (!std::filesystem::exists(source)) GTEST_SKIP() << "copied to a machine without " << source;
  const TileTimes times = TileTimes::parse(read_text_file(path), path.string());
  EXPECT_GT(times.all().size(), 200u);
  double sum = 0;
  for (const auto& [problem, of_tiles] : times.all()) {
    const TileChoice tile =
        choose_tile(operand_type(problem.activations), problem.rows, static_cast<int>(problem.experts));
    const auto time = [](const auto& of_tile) { return of_tile.second; };
    const double fastest = std::ranges::min(of_tiles, {}, time).second;
    const auto own = std::ranges::find(of_tiles, tile, &std::pair<TileChoice, double>::first);
    ASSERT_NE(own, of_tiles.end()) << to_string(tile) << " for " << problem.rows << " rows";
    EXPECT_LE(own->second, 1.06 * fastest) << to_string(tile) << " for " << problem.rows << " rows";
    sum += own->second / fastest;
  }
  EXPECT_LE(sum / static_cast<double>(times.all().size()), 1.001);
}

TEST(TileTimesTest, TilesAreForcedForThisThreadAlone) {
  EXPECT_EQ(ForcedTiles::of(LayerGemm::kFirst), nullptr);
  {
    const ForcedTiles forced({8, 4}, {16, 4});
    EXPECT_EQ(*ForcedTiles::of(LayerGemm::kFirst), (TileChoice{8, 4}));
    EXPECT_EQ(*ForcedTiles::of(LayerGemm::kSecond), (TileChoice{16, 4}));
    std::thread([] { EXPECT_EQ(ForcedTiles::of(LayerGemm::kFirst), nullptr); }).join();
  }
  EXPECT_EQ(ForcedTiles::of(LayerGemm::kSecond), nullptr);
}

}  // namespace
}  // namespace megamoe::sm90
