// gemm_test.cc: both GEMMs against sums in FP64: the layers of models people run, and every tile.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string_view>

#include "cuda/sm90/gemm_test.h"
#include "layer/geometries.h"
#include "megamoe/error.h"
#include "tests/independent.h"

namespace megamoe::sm90 {
namespace {

using testing::check_gemm1;
using testing::check_gemm2;
using testing::Operands;
using testing::Rows;
using testing::Verdict;

constexpr int kPoisons[] = {0x7F, 0xFF, 0x00};

// Sums are off by what the order of additions explains.
void expect_close(const Verdict& v) {
  EXPECT_GT(v.checked, 0);
  EXPECT_EQ(v.beyond, 0) << v.first_beyond;
}
void expect_equal_sums(const Verdict& v) {
  expect_equal(v);
  EXPECT_LT(v.largest_sum, testing::kExactLimit) << "the test's own operands are too wide";
}

// Those of either operand type.
std::vector<TileChoice> every_tile() {
  std::vector<TileChoice> tiles = all_tiles(OperandType::kBf16);
  for (const TileChoice& tile : all_tiles(OperandType::kFp8)) {
    if (std::ranges::find(tiles, tile) == tiles.end()) tiles.push_back(tile);
  }
  return tiles;
}

// One case: both GEMMs in every format that has the tile, every mode, over the same routing, each twice.
// Hands each verdict to `judge` together with its format and whether it is the second GEMM's.
struct Case {
  const LayerWeights& weights;
  const DeviceLayer& layer;
  Operands operands;
  RoutedRows routed;
  std::int64_t tokens;   // of x; 0: x has the routed rows
  std::int64_t samples;  // outputs of each GEMM that are checked
  GemmOptions options;
  std::uint64_t seed;
};
template <class Judge>
void run_case(const Case& c, const Judge& judge) {
  const LayerConfig& config = c.weights.config;
  const std::int64_t rows = c.routed.rows();
  SCOPED_TRACE(::testing::Message() << rows << " rows, max_rows " << c.options.max_rows << ", "
                                    << c.options.tile);
  GemmOptions again = c.options;
  again.poison ^= 0xFF;
  GemmOptions with_decoded = again;
  with_decoded.decoded = true;
  for (const ActivationFormat format : kFormats) {
    if (c.options.tile != TileChoice{} && !is_tile(operand_type(format), c.options.tile)) continue;
    const Rows x =
        testing::wide_rows(format, c.tokens != 0 ? c.tokens : rows, config.hidden, c.operands, c.seed);
    HiddenResult compact{Rows(ActivationFormat::kBf16, 0, 0, 0)};
    for (const L1Output mode : modes_of(config, format)) {
      SCOPED_TRACE(::testing::Message() << to_string(format) << ", h as " << to_string(mode));
      const std::vector<float> scales = testing::h_scales(rows, c.seed + 1);
      const HiddenResult result = c.layer.gemm1(x, c.routed, mode, scales, c.options);
      expect_same(c.layer.gemm1(x, c.routed, mode, scales, again), result);
      if (format == ActivationFormat::kNvfp4 || mode == L1Output::kNvfp4) {
        expect_same(c.layer.gemm1(x, c.routed, mode, scales, with_decoded),
                    mode == L1Output::kNvfp4 ? decoded(result) : result);
      }
      if (mode == L1Output::kCompactBf16) compact = result;
      if (mode == L1Output::kFp8) {
        expect_same(result, as_fp8(compact.h));
        continue;
      }
      judge(check_gemm1(first_call(c.weights, x, c.routed), mode, result.h.view(), c.samples), format,
            mode == L1Output::kNvfp4, false);
    }
    SCOPED_TRACE(::testing::Message() << to_string(format) << ", second GEMM");
    const Rows h = testing::wide_rows(format, rows, config.intermediate, c.operands, c.seed + 2);
    const std::vector<float> y = c.layer.gemm2(h, c.routed, c.options);
    EXPECT_TRUE(cuda::same_bytes(c.layer.gemm2(h, c.routed, again), y)) << "when run again";
    if (format == ActivationFormat::kNvfp4) {
      EXPECT_TRUE(cuda::same_bytes(c.layer.gemm2(h, c.routed, with_decoded), y)) << "decoded";
    }
    judge(check_gemm2(second_call(c.weights, h, c.routed), y.data(), c.samples), format, false, true);
  }
}

// ---- Models

constexpr const char* kModels[] = {"deepseek-v4-flash", "deepseek-v4-pro", "deepseek-v3",    "qwen3-30b-a3b",
                                   "gpt-oss-120b",      "glm-4.5-air",     "nemotron-3-nano"};
constexpr std::size_t kTilesOfModel = 2;  // that are forced; the models have all of them among themselves

class ModelGemms : public HopperTest, public ::testing::WithParamInterface<const char*> {
 protected:
  // Every case of the model: numbers of rows by the tile that is chosen for them, and forced tiles.
  template <class Judge>
  void run_model(Operands operands, const Judge& judge) const {
    LayerConfig config = find_geometry(GetParam()).config;
    config.num_experts = 2 + config.hidden / 16 % 3;  // few, one of them without rows
    config.top_k = 1;
    config.router = {};  // groups do not divide so few
    const bool bias = config.activation.kind == Activation::kGptOss;
    const auto weights = testing::wide_layer(config, operands, bias, 1);
    const DeviceLayer layer(weights->weights);
    const int experts = static_cast<int>(config.num_experts);
    struct Size {
      std::int64_t rows, max_rows;
      TileChoice tile;
    };
    std::vector<Size> sizes;
    for (const std::int64_t rows : {1, 7, 8, 9, 40, 150, 300}) sizes.push_back({rows, rows, {}});
    const std::vector<TileChoice> tiles = every_tile();
    const auto model =
        static_cast<std::size_t>(std::ranges::find(kModels, std::string_view(GetParam())) - kModels);
    for (std::size_t i = 0; i < kTilesOfModel; ++i) {
      const TileChoice tile = tiles[(model + i * std::size(kModels)) % tiles.size()];
      const std::int64_t rows = 2 * tile.tokens + 5;
      sizes.push_back({rows, rows + 100 * static_cast<std::int64_t>(i), tile});
    }
    cuda::Random random(2);
    std::uint64_t seed = 3;
    for (const Size& s : sizes) {
      run_case({.weights = weights->weights,
                .layer = layer,
                .operands = operands,
                .routed = ragged_rows(s.rows, experts, s.rows / 2 + 1, random),
                .tokens = s.rows / 2 + 1,
                .samples = 4096,
                .options = {.tile = s.tile, .max_rows = s.max_rows, .poison = kPoisons[seed / 3 % 3]},
                .seed = seed},
               judge);
      seed += 3;
    }
  }
};

TEST_P(ModelGemms, StayWithinTheErrorOfTheirSums) {
  struct {
    Verdict values, codes, y;
  } all[3];
  run_model(Operands::kRandom, [&](const Verdict& v, ActivationFormat format, bool fp4, bool second) {
    expect_close(v);
    auto& of = all[static_cast<int>(format)];
    (second ? of.y : fp4 ? of.codes : of.values).add(v);
  });
  const auto percent = [](std::int64_t part, std::int64_t whole) {
    return whole == 0 ? 0.0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole);
  };
  for (const ActivationFormat format : kFormats) {
    const auto& [values, codes, y] = all[static_cast<int>(format)];
    EXPECT_TRUE(format == ActivationFormat::kFp8 || codes.scales > 1000);
    EXPECT_LT(codes.different_share(), testing::kDifferentShare) << codes.first_different;
    EXPECT_LE(y.worst, 1.0);
    std::printf(
        "%s, %s: of %lld codes of h %.4f %% differ (of their scales %.4f %%), %.1f %% might; "
        "of %lld BF16 h %.4f %% differ; %lld y are off by at most %.2f %% of the bound\n",
        GetParam(), std::string(to_string(format)).c_str(), static_cast<long long>(codes.checked),
        percent(codes.different, codes.checked), percent(codes.different_scales, codes.scales),
        percent(codes.open, codes.checked), static_cast<long long>(values.checked),
        percent(values.different, values.checked), static_cast<long long>(y.checked), 100.0 * y.worst);
  }
}

TEST_P(ModelGemms, AreEqualWhereSumsAreExact) {
  run_model(Operands::kExact, [](const Verdict& v, ActivationFormat, bool, bool) { expect_equal_sums(v); });
}

INSTANTIATE_TEST_SUITE_P(Models, ModelGemms, ::testing::ValuesIn(kModels), [](const auto& model) {
  std::string name = model.param;
  std::replace_if(
      name.begin(), name.end(), [](char c) { return c == '-' || c == '.'; }, '_');
  return name;
});

// ---- Tiles

// Without a GPU: the choice is a function of the numbers alone.
TEST(TileChoices, AreTilesThatThereAreAndFitTheRows) {
  EXPECT_LE(every_tile().size(), kTilesOfModel * std::size(kModels)) << "no model takes the others";
  std::vector<std::int64_t> numbers;  // of rows: all small ones, then ever further apart
  for (std::int64_t rows = 1; rows < (std::int64_t{1} << 31); rows += 1 + rows / 2000)
    numbers.push_back(rows);
  for (const OperandType type : {OperandType::kBf16, OperandType::kFp8}) {
    const std::vector<TileChoice> tiles = all_tiles(type);
    for (const TileChoice& kind : tile_kinds(type)) EXPECT_EQ(std::ranges::count(tiles, kind), 1) << kind;
    std::vector<bool> chosen(tiles.size());
    for (const int experts : {1, 2, 3, 4, 7, 16, 60, 128, 256, 384, 1023, 1024}) {
      for (const std::int64_t rows : numbers) {
        const TileChoice tile = choose_tile(type, rows, experts);
        const auto at = std::ranges::find(tiles, tile);
        ASSERT_NE(at, tiles.end()) << tile << " for " << rows << " rows of " << experts << " experts";
        chosen[static_cast<std::size_t>(at - tiles.begin())] = true;
        const double mean =
            std::ceil(static_cast<double>(rows) / static_cast<double>(std::min<std::int64_t>(rows, experts)));
        const bool few = type == OperandType::kBf16 && rows <= kFewRows && mean <= kFewMean;
        if (rows <= 16 || few) {
          ASSERT_EQ(tile, tiles[0]);
          continue;
        }
        // How far an expert's rows lie above the mean is their root, roughly. A narrow tile does for one root
        // more, and a width less would not do for two; nor would any narrow tile where wide ones are taken.
        const double root = std::sqrt(mean), one_more = mean + root, two_more = mean + 2 * std::ceil(root);
        if (tile.tokens == widest_tile(type) && widest_tile(type) > wide_tile(type)) {
          ASSERT_GT(mean, wide_tile(type)) << tile << " for " << rows << " rows of " << experts << " experts";
          continue;
        }
        if (tile.tokens == wide_tile(type) && widest_tile(type) > wide_tile(type)) {
          ASSERT_LE(mean, wide_tile(type)) << tile << " for " << rows << " rows of " << experts << " experts";
        }
        const int narrower = tile.tokens == wide_tile(type) ? narrow_tile(type) : tile.tokens - 8;
        if (tile.tokens < wide_tile(type)) {
          ASSERT_LE(one_more, tile.tokens) << tile << " for " << rows << " rows of " << experts << " experts";
        }
        ASSERT_LT(narrower, two_more) << tile << " for " << rows << " rows of " << experts << " experts";
      }
    }
    EXPECT_EQ(std::ranges::count(chosen, false), 0) << "nobody asks for these";
  }
}

class GemmTest : public HopperTest {};

// Rows around a tile's width for 16 experts, most of them without any.
RoutedRows rows_around(std::int64_t tile, std::int64_t tokens, cuda::Random& random) {
  RoutedRows routed;
  routed.offsets = {0};
  for (const std::int64_t rows : {tile - 1, std::int64_t{0}, tile, tile + 1, std::int64_t{0}, 2 * tile + 3}) {
    routed.offsets.push_back(routed.offsets.back() + rows);
  }
  routed.offsets.resize(17, routed.offsets.back());
  for (std::int64_t r = 0; r < routed.rows() && tokens > 0; ++r) {
    routed.gather.push_back(static_cast<std::int32_t>(random.integer(0, tokens - 1)));
  }
  return routed;
}

// Both GEMMs see each width as K and as weight rows: parts of a chunk of 64 columns, of a stage, and a stage
// begun; tiles of 64 weight rows that are not full, and fewer of them than row groups.
TEST_F(GemmTest, EveryTileOverEveryShape) {
  struct Shape {
    std::int64_t hidden, intermediate;
  };
  const std::vector<TileChoice> tiles = every_tile();
  cuda::Random random(1);
  std::uint64_t seed = 1;
  std::size_t shape = 0;
  for (const Shape& s : {Shape{16, 208},
                         {48, 80},
                         {80, 48},
                         {272, 96},
                         {2064, 16},
                         {16, 2064},
                         {64, 128},
                         {176, 272},
                         {1008, 368}}) {
    ++shape;
    const auto run = [&](Operands operands, const ActivationConfig& activation, std::size_t every) {
      const LayerConfig config = testing::make_config(s.hidden, s.intermediate, 16, 1, activation);
      SCOPED_TRACE(::testing::Message()
                   << s.hidden << " x " << s.intermediate << ", " << to_string(activation.kind));
      const auto weights = testing::wide_layer(config, operands, random.integer(0, 1) == 0, seed);
      const DeviceLayer layer(weights->weights);
      const bool everything = operands == Operands::kExact && s.hidden * s.intermediate < 100'000;
      for (std::size_t t = shape % every; t < tiles.size(); t += every, seed += 3) {
        const std::int64_t tokens = random.integer(0, 1) == 0 ? 0 : 29;
        const RoutedRows routed = rows_around(tiles[t].tokens, tokens, random);
        run_case({.weights = weights->weights,
                  .layer = layer,
                  .operands = operands,
                  .routed = routed,
                  .tokens = tokens,
                  .samples = everything ? kEverything : 20000,
                  .options = {.tile = tiles[t],
                              .max_rows = routed.rows() + random.integer(0, 1) * 1000,
                              .poison = kPoisons[seed / 3 % 3],
                              .strided = random.integer(0, 1) == 0},
                  .seed = seed},
                 [&](const Verdict& v, ActivationFormat, bool, bool) {
                   operands == Operands::kExact ? expect_equal_sums(v) : expect_close(v);
                 });
      }
    };
    run(Operands::kExact, kActivations[random.integer(0, 2)], 1);
    run(Operands::kExact, kActivations[3], 1);
    run(Operands::kRandom, kActivations[random.integer(0, 3)], 3);
  }
}

// Experts with every number of rows that makes a width of its own, one row fewer than that, and more than one
// tile; the weight rows end in the middle of what a cluster's CTAs share.
TEST_F(GemmTest, WideTilesOfEveryWidth) {
  for (const auto& [type, widest] : {std::pair{OperandType::kBf16, wide_tile(OperandType::kBf16)},
                                     std::pair{OperandType::kBf16, widest_tile(OperandType::kBf16)},
                                     std::pair{OperandType::kFp8, widest_tile(OperandType::kFp8)}}) {
    RoutedRows routed{{0}, {}};
    std::vector<std::int64_t> counts = {0, widest + 1, 2 * widest + 1, 3 * widest};
    for (std::int64_t width = 8; width <= widest; width += 8)
      counts.insert(counts.end(), {width, width - 1, width - 7});
    cuda::Random random(1);
    for (std::size_t i = counts.size(); i > 1; --i)
      std::swap(counts[i - 1], counts[size(random.integer(0, static_cast<std::int64_t>(i) - 1))]);
    for (const std::int64_t count : counts) routed.offsets.push_back(routed.offsets.back() + count);
    std::uint64_t seed = 1;
    for (const Operands operands : {Operands::kExact, Operands::kRandom}) {
      const auto weights = testing::wide_layer(
          testing::make_config(272, 208, routed.experts(), 1, kActivations[0]), operands, true, seed);
      const DeviceLayer layer(weights->weights);
      run_case({.weights = weights->weights,
                .layer = layer,
                .operands = operands,
                .routed = routed,
                .tokens = 0,
                .samples = 200000,
                .options = {.tile = {widest, row_tiles_of(type, widest)}, .max_rows = routed.rows() + 100},
                .seed = ++seed},
               [&](const Verdict& v, ActivationFormat, bool, bool) {
                 operands == Operands::kExact ? expect_equal_sums(v) : expect_close(v);
               });
    }
  }
}

// As many experts as there may be, most of them without rows; and all rows the last one's.
TEST_F(GemmTest, ManyExperts) {
  std::uint64_t seed = 1;
  for (const int experts : {1023, 1024}) {
    RoutedRows scattered{{0}, {}}, last{{0}, {}};
    for (int e = 0; e < experts; ++e) {
      const bool busy = e % 97 == 5 || e == experts - 1;
      scattered.offsets.push_back(scattered.offsets.back() + (busy ? 1 + e * 7 % 300 : 0));
      last.offsets.push_back(e == experts - 1 ? 700 : 0);
    }
    const auto weights =
        testing::wide_layer(testing::make_config(16, 16, experts, 1), Operands::kExact, false, seed);
    const DeviceLayer layer(weights->weights);
    for (const OperandType type : {OperandType::kBf16, OperandType::kFp8}) {
      for (const TileChoice& tile : tile_kinds(type)) {
        for (const RoutedRows& routed : {scattered, last}) {
          run_case({.weights = weights->weights,
                    .layer = layer,
                    .operands = Operands::kExact,
                    .routed = routed,
                    .tokens = 0,
                    .samples = kEverything,
                    .options = {.tile = tile},
                    .seed = ++seed},
                   [&](const Verdict& v, ActivationFormat, bool, bool) { expect_equal_sums(v); });
        }
      }
    }
  }
}

// More pieces of work than there are SMs, and long sums that depend on their order.
TEST_F(GemmTest, EveryTileGivesTheSameBitsAgain) {
  const std::int64_t hidden = 1008, intermediate = 720, rows = 1500;
  const auto weights =
      testing::wide_layer(testing::make_config(hidden, intermediate, 16, 1), Operands::kRandom, true, 1);
  const DeviceLayer layer(weights->weights);
  cuda::Random random(1);
  const RoutedRows routed = ragged_rows(rows, 16, 200, random);
  const std::vector<float> scales = testing::h_scales(rows, 2);
  for (const ActivationFormat format : kFormats) {
    const Rows x = testing::wide_rows(format, 200, hidden, Operands::kRandom, 3),
               h = testing::wide_rows(format, rows, intermediate, Operands::kRandom, 4);
    const L1Output fused = modes_of(weights->weights.config, format).back();
    for (const TileChoice& tile : tiles_for(format)) {
      SCOPED_TRACE(::testing::Message() << tile << ", " << to_string(format));
      const HiddenResult first = layer.gemm1(x, routed, fused, scales, {.tile = tile});
      const std::vector<float> y = layer.gemm2(h, routed, {.tile = tile});
      for (const int poison : kPoisons) {
        const GemmOptions again{.tile = tile, .max_rows = rows + poison, .poison = poison};
        expect_same(layer.gemm1(x, routed, fused, scales, again), first);
        EXPECT_TRUE(cuda::same_bytes(layer.gemm2(h, routed, again), y));
      }
    }
  }
}

// A call's rows of tokens may not be overwritten by the next one's while they are read, nor read too early.
TEST_F(GemmTest, CallsInARowKeepToTheirOrder) {
  const std::int64_t hidden = 1008, intermediate = 720, calls = 12;
  const auto weights =
      testing::wide_layer(testing::make_config(hidden, intermediate, 16, 1), Operands::kRandom, true, 1);
  const DeviceLayer layer(weights->weights);
  cuda::Random random(1);
  for (const ActivationFormat format : kFormats) {
    for (const TileChoice& tile : tile_kinds(format)) {
      const RoutedRows routed = ragged_rows(random.integer(1, 1500), 16, 0, random);
      SCOPED_TRACE(::testing::Message()
                   << tile << ", " << to_string(format) << ", " << routed.rows() << " rows");
      std::vector<Rows> h;
      for (std::int64_t i = 0; i < calls; ++i) {
        h.push_back(testing::wide_rows(format, routed.rows(), intermediate, Operands::kRandom,
                                       static_cast<std::uint64_t>(i)));
      }
      const std::vector<std::vector<float>> y = layer.gemm2_in_a_row(h, routed, {.tile = tile});
      for (std::size_t i = 0; i < h.size(); ++i) {
        EXPECT_TRUE(cuda::same_bytes(y[i], layer.gemm2(h[i], routed, {.tile = tile}))) << "call " << i;
      }
    }
  }
}

// By the same tile a row has the same bits alone, in the middle of others, and beside a faulty one.
TEST_F(GemmTest, ARowDoesNotDependOnItsNeighbours) {
  const std::int64_t hidden = 720, intermediate = 368;
  const auto weights =
      testing::wide_layer(testing::make_config(hidden, intermediate, 16, 1), Operands::kRandom, true, 1);
  const DeviceLayer layer(weights->weights);
  RoutedRows alone{std::vector<std::int64_t>(17, 1), {}};
  std::fill_n(alone.offsets.begin(), 6, 0);  // the sixth expert's
  cuda::Random random(1);
  for (const ActivationFormat format : kFormats) {
    for (const TileChoice& tile : tiles_for(format)) {
      const std::int64_t rows = 2 * tile.tokens;
      RoutedRows many{std::vector<std::int64_t>(17, rows), {}};
      std::fill_n(many.offsets.begin(), 6, 0);
      const GemmOptions options{.tile = tile};
      SCOPED_TRACE(::testing::Message() << tile << ", " << to_string(format));
      const auto first_row = [](const Rows& all) {
        Rows row(all.format, 1, all.cols, 0);
        const auto take = [](auto& to, const auto& from) {
          std::copy_n(from.begin(), to.size(), to.begin());
        };
        take(row.values, all.values), take(row.codes, all.codes);
        take(row.block_scales, all.block_scales), take(row.scales, all.scales);
        return row;
      };
      const auto swap_rows = [](Rows& all, std::int64_t other) {
        const auto swap = [&](auto& values) {
          const auto width = static_cast<std::int64_t>(values.size()) / all.rows;
          std::swap_ranges(values.begin(), values.begin() + width, values.begin() + other * width);
        };
        swap(all.values), swap(all.codes), swap(all.block_scales), swap(all.scales);
      };
      Rows x = testing::wide_rows(format, rows, hidden, Operands::kRandom, 2),
           h = testing::wide_rows(format, rows, intermediate, Operands::kRandom, 3);
      const Rows x_alone = first_row(x), h_alone = first_row(h);
      const std::int64_t place = random.integer(1, rows - 1);
      swap_rows(x, place), swap_rows(h, place);
      for (Rows* all : {&x, &h}) {  // the row before is faulty
        if (format == ActivationFormat::kBf16) all->values[size((place - 1) * all->cols + 3)] = {0x7FC0};
        if (format == ActivationFormat::kFp8) all->codes[size((place - 1) * all->cols + 3)] = 0x7F;
        if (format == ActivationFormat::kNvfp4) all->block_scales[size((place - 1) * all->cols / 16)] = 0x7F;
      }
      const auto slice = [&](const auto& values, std::int64_t width) {
        return std::vector(values.begin() + place * width, values.begin() + (place + 1) * width);
      };
      const std::vector<bf16> in_batch = layer.gemm1(x, many, L1Output::kCompactBf16, {}, options).h.values;
      EXPECT_TRUE(cuda::same_bytes(layer.gemm1(x_alone, alone, L1Output::kCompactBf16, {}, options).h.values,
                                   slice(in_batch, intermediate)));
      EXPECT_TRUE(cuda::same_bytes(layer.gemm2(h_alone, alone, options),
                                   slice(layer.gemm2(h, many, options), hidden)));
    }
  }
}

// As in a pass whose ids are all out of range: there is room for rows, and they are not looked at, nor is
// what they were gathered from.
TEST_F(GemmTest, NoRows) {
  const auto weights = testing::wide_layer(testing::make_config(64, 32, 3, 1), Operands::kRandom, false, 1);
  const DeviceLayer layer(weights->weights);
  for (const ActivationFormat format : kFormats) {
    std::vector<GemmOptions> calls = {{.max_rows = 0}, {.max_rows = 1}, {.max_rows = 500}};
    for (const TileChoice& tile : tile_kinds(format)) calls.push_back({.tile = tile, .max_rows = 300});
    for (const GemmOptions& call : calls) {
      SCOPED_TRACE(::testing::Message()
                   << to_string(format) << ", max_rows " << call.max_rows << ", " << call.tile);
      const RoutedRows none{{0, 0, 0, 0}, {}}, gathered{{0, 0, 0, 0}, {0x7F7F7F7F}};
      const Rows x = testing::wide_rows(format, call.max_rows, 64, Operands::kRandom, 1);
      EXPECT_TRUE(layer.gemm1(x, none, L1Output::kCompactBf16, {}, call).h.values.empty());
      if (format != ActivationFormat::kFp8) {
        EXPECT_TRUE(layer.gemm1(x, gathered, L1Output::kCompactBf16, {}, call).h.values.empty());
      }
      const Rows h = testing::wide_rows(format, call.max_rows, 32, Operands::kRandom, 1);
      EXPECT_TRUE(layer.gemm2(h, none, call).empty());
    }
  }
}

TEST_F(GemmTest, RefusesTilesThatThereAreNot) {
  const auto weights = testing::wide_layer(testing::make_config(64, 32, 1, 1), Operands::kRandom, false, 1);
  const DeviceLayer layer(weights->weights);
  for (const ActivationFormat format : kFormats) {
    const int wider = widest_tile(operand_type(format)) + 8;
    for (const TileChoice& tile :
         {TileChoice{12, 4}, {16, 1}, {wider, 3}, {wider, 4}, {wider - 16, 3}, {wider - 16, 4}}) {
      const Rows h = testing::wide_rows(format, 5, 32, Operands::kRandom, 1);
      EXPECT_THROW(layer.gemm2(h, {{0, 5}, {}}, {.tile = tile}), Error) << tile;
    }
  }
}

// ---- Small: what compute-sanitizer runs

class SmallGemms : public HopperTest {};

TEST_F(SmallGemms, WrittenCase) {
  // One block everywhere: gate = 16 * 8 = 128, whose silu is 128, up = 16 / 4 = 4; a token scale of 2 doubles
  // both.
  testing::TestLayer layer(testing::make_config(16, 16, 1, 1));
  const auto all = [](int value) { return [value](std::int64_t, std::int64_t) { return value; }; };
  ExpertWeights& expert = layer.weights.experts[0];
  expert.gate = layer.nvfp4(16, 16, 8.0f, all(2), all(0x38));
  expert.up = layer.nvfp4(16, 16, 0.25f, all(2), all(0x38));
  expert.down = layer.nvfp4(16, 16, 0.5f, all(10), all(0x38));
  const DeviceLayer device(layer.weights);
  Rows x(ActivationFormat::kNvfp4, 2, 16, 0);
  x.codes.assign(x.codes.size(), 0x22);
  x.block_scales.assign(2, 0x38);
  x.scales = {1.0f, 2.0f};
  const RoutedRows routed{{0, 3}, {1, 0, 1}};
  const Rows compact = device.gemm1(x, routed, L1Output::kCompactBf16, {}).h;
  const Rows wide = device.gemm1(x, routed, L1Output::kInterleavedBf16, {}).h;
  for (std::int64_t r = 0; r < 3; ++r) {
    const bool doubled = r != 1;
    for (std::int64_t i = 0; i < 16; ++i) {
      EXPECT_EQ(compact.values[size(r * 16 + i)].bits, doubled ? 0x4500 : 0x4400);                // 2048, 512
      EXPECT_EQ(wide.values[size(r * 32 + i / 8 * 16 + i % 8)].bits, doubled ? 0x4380 : 0x4300);  // 256, 128
      EXPECT_EQ(wide.values[size(r * 32 + i / 8 * 16 + 8 + i % 8)].bits, doubled ? 0x4500 : 0x4400);
    }
  }
  // 2048 / (6 * 64) is 5.33, as E4M3 5.5, and 2048 / (5.5 * 64) is 5.8: code 7. 512 / (6 * 64): 1.375, code 7
  // too. 2048 / (6 * 0.5) is beyond 448: cut.
  const HiddenResult fp4 = device.gemm1(x, routed, L1Output::kNvfp4, {64.0f, 64.0f, 0.5f});
  EXPECT_EQ(fp4.h.codes, std::vector<std::uint8_t>(24, 0x77));
  EXPECT_EQ(fp4.h.block_scales, (std::vector<std::uint8_t>{0x4B, 0x3B, 0x7E}));
  EXPECT_EQ(fp4.saturated, 1u);
  // y = 16 * -0.5 * 6 * scale * tensor scale.
  const std::vector<float> y = device.gemm2(fp4.h, routed);
  for (std::int64_t i = 0; i < 16; ++i) {
    EXPECT_EQ(y[size(i)], -48.0f * 5.5f * 64.0f);
    EXPECT_EQ(y[size(16 + i)], -48.0f * 1.375f * 64.0f);
    EXPECT_EQ(y[size(32 + i)], -48.0f * 448.0f * 0.5f);
  }
}

// Each tile and format, on a shape whose last chunk, tile of weights and tile of tokens are not full. Without
// a gate one tile of each kind: the checkers are slow.
TEST_F(SmallGemms, EveryTile) {
  cuda::Random random(1);
  const auto run = [&](const ActivationConfig& activation, const std::vector<TileChoice>& tiles) {
    const auto weights =
        testing::wide_layer(testing::make_config(144, 80, 4, 1, activation), Operands::kExact, true, 2);
    const DeviceLayer layer(weights->weights);
    for (const TileChoice& tile : tiles) {
      const std::int64_t rows = 2 * tile.tokens + 3;
      run_case({.weights = weights->weights,
                .layer = layer,
                .operands = Operands::kExact,
                .routed = ragged_rows(rows, 4, 5, random),
                .tokens = 5,
                .samples = kEverything,
                .options = {.tile = tile, .max_rows = rows + 20},
                .seed = 3},
               [](const Verdict& v, ActivationFormat, bool, bool) { expect_equal_sums(v); });
    }
  };
  run(kActivations[2], every_tile());
  for (const OperandType type : {OperandType::kBf16, OperandType::kFp8})
    run(kActivations[3], tile_kinds(type));
}

// Sums so long that a piece of work takes its stages of shared memory again, with a last stage that is cut
// short; wide enough for all warpgroups and both CTAs of a cluster.
TEST_F(SmallGemms, LongSums) {
  cuda::Random random(1);
  const auto run = [&](std::int64_t cols, const std::vector<TileChoice>& tiles) {
    const auto weights = testing::wide_layer(testing::make_config(cols, 256, 1, 1, kActivations[0]),
                                             Operands::kExact, false, 2);
    const DeviceLayer layer(weights->weights);
    for (const TileChoice& tile : tiles) {
      run_case({.weights = weights->weights,
                .layer = layer,
                .operands = Operands::kExact,
                .routed = ragged_rows(tile.tokens - 3, 1, 3, random),
                .tokens = 3,
                .samples = 2000,
                .options = {.tile = tile},
                .seed = 3},
               [](const Verdict& v, ActivationFormat, bool, bool) { expect_equal_sums(v); });
    }
  };
  run(4176, {{8, 1}});
  for (const OperandType type : {OperandType::kBf16, OperandType::kFp8})
    run(1040, {{32, 4}, {narrow_tile(type), 4}, {wide_tile(type), type == OperandType::kFp8 ? 4 : 3}});
  run(1040, {{widest_tile(OperandType::kBf16), 2}});
}

// Wide tiles of which each CTA has several, one after the other in the same shared memory: h from registers,
// y, bit for bit those of a narrow tile. Some tiles of E4M3 are left to finish(): those of columns beyond the
// last whole group of 128, and those with a token of zeros.
TEST_F(SmallGemms, SeveralPiecesForEachCta) {
  constexpr int kExperts = 40;
  constexpr std::int64_t kRows = 24 * kExperts;
  cuda::Random random(1);
  const RoutedRows routed = ragged_rows(kRows, kExperts, 0, random);
  const std::vector<float> scales = testing::h_scales(kRows, 1);
  const auto first = testing::wide_layer(testing::make_config(64, 2000, kExperts, 1, kActivations[0]),
                                         Operands::kRandom, false, 2);
  const auto second = testing::wide_layer(testing::make_config(4096, 64, kExperts, 1, kActivations[0]),
                                          Operands::kRandom, true, 3);
  const DeviceLayer first_layer(first->weights), second_layer(second->weights);
  for (const auto& [format, mode] : {std::pair{ActivationFormat::kBf16, L1Output::kCompactBf16},
                                     std::pair{ActivationFormat::kNvfp4, L1Output::kNvfp4},
                                     std::pair{ActivationFormat::kFp8, L1Output::kFp8}}) {
    const OperandType type = operand_type(format);
    Rows x = testing::wide_rows(format, kRows, 64, Operands::kRandom, 4);
    for (std::int64_t r = 0; format == ActivationFormat::kFp8 && r < kRows; r += 50)
      std::fill_n(x.codes.begin() + r * 64, 64, std::uint8_t{0});
    const auto run_first = [&](const TileChoice& tile) {
      return first_layer.gemm1(x, routed, mode, mode == L1Output::kNvfp4 ? scales : std::vector<float>(),
                               {.tile = tile, .decoded = true});
    };
    const TileChoice narrow{narrow_tile(type), 4};
    for (const TileChoice& tile : tile_kinds(type)) {
      if (tile.tokens <= narrow_tile(type)) continue;
      SCOPED_TRACE(tile);
      expect_same(run_first(tile), run_first(narrow));
      EXPECT_TRUE(cuda::same_bytes(second_layer.gemm2(x, routed, {.tile = tile}),
                                   second_layer.gemm2(x, routed, {.tile = narrow})));
    }
  }
}

}  // namespace
}  // namespace megamoe::sm90
