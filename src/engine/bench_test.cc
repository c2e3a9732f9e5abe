// bench_test.cc: what a benchmark is fed, and that nothing is timed whose result is wrong.
#include "engine/bench.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>

#include "cpu/kernels.h"
#include "engine/backends.h"
#include "engine/bench_inputs.h"
#include "engine/bench_layer.h"
#include "engine/tune.h"
#include "megamoe/error.h"
#include "numerics/bf16.h"
#include "numerics/nvfp4.h"

namespace megamoe {
namespace {

LayerConfig small_config(ActivationConfig activation = {}) {
  return {.hidden = 128,
          .intermediate = 96,
          .num_experts = 6,
          .top_k = 2,
          .activation = activation,
          .router = {}};
}

double mean_square(const std::vector<double>& values) {
  double sum = 0;
  for (const double v : values) sum += v * v;
  return sum / static_cast<double>(values.size());
}

TEST(RandomTokens, HaveVarianceOneAndABound) {
  double sum = 0, squares = 0, largest = 0;
  const std::vector<bf16> tokens = random_tokens(1 << 20, 7);
  for (const bf16 token : tokens) {
    const double v = to_float(token);
    sum += v, squares += v * v, largest = std::max(largest, std::abs(v));
  }
  const auto count = static_cast<double>(tokens.size());
  // Standard deviations of the two means: 1 / 1024, and below sqrt(2) / 1024.
  EXPECT_NEAR(sum / count, 0, 0.005);
  EXPECT_NEAR(squares / count, 1, 0.008);
  EXPECT_LE(largest, 3.5);
  EXPECT_GT(largest, 3);
  EXPECT_NE(random_tokens(100, 7), random_tokens(100, 8));
}

TEST(RandomLayer, GivesSumsOfVarianceOne) {
  LayerConfig config = small_config();
  config.hidden = 2048;
  const LayerWeights layer = random_layer(config, 3);
  const std::vector<bf16> x = random_tokens(config.hidden, 4);
  std::vector<double> sums;
  for (const ExpertWeights& expert : layer.experts) {
    for (const WeightMatrix* w : {&expert.gate, &expert.up}) {
      for (std::int64_t r = 0; r < w->rows; ++r) {
        double sum = 0;
        for (std::int64_t k = 0; k < w->cols; ++k) {
          const int code = w->codes[(r * w->cols + k) / 2] >> (k % 2 * 4) & 15;
          sum += to_float(x[static_cast<std::size_t>(k)]) * decode_e2m1(static_cast<std::uint8_t>(code)) *
                 decode_e4m3(w->scales[(r * w->cols + k) / kNvfp4Block]) * w->tensor_scale;
        }
        sums.push_back(sum);
      }
    }
  }
  // 1152 sums: a standard deviation of 4 % of theirs, and 3 % of that of x.
  EXPECT_NEAR(mean_square(sums), 1, 0.2);
}

// Experts share a pool; they must not share a matrix.
TEST(RandomLayer, HasDifferentExpertsAndScalesThatAreWideEnough) {
  using Kind = Activation;
  for (const ActivationConfig& activation :
       {ActivationConfig{}, ActivationConfig{.kind = Kind::kSwiGluClamped, .limit = 10},
        ActivationConfig{.kind = Kind::kGptOss, .limit = 7}, ActivationConfig{.kind = Kind::kRelu2}}) {
    const LayerConfig config = small_config(activation);
    const LayerWeights layer = random_layer(config, 1);
    EXPECT_NO_THROW(validate(layer));
    std::set<const std::uint8_t*> places;
    for (const ExpertWeights& expert : layer.experts) {
      for (const WeightMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
        EXPECT_TRUE(matrix->rows == 0 || places.insert(matrix->codes).second);
      }
      EXPECT_EQ(expert.up_bias != nullptr, activation.kind == Kind::kGptOss);
    }
    // In nvfp4 the input scales are found and wide enough, so that h is quantised in the first GEMM.
    MoeLayerOptions options;
    options.activations = ActivationFormat::kNvfp4;
    const MoeLayer moe(layer, options);
    EXPECT_EQ(moe.options().h_scale, ScaleSource::kStatic);
    constexpr std::int64_t kTokens = 40;
    RoutingSequence routings(RoutingKind::kUniform, config.num_experts, config.top_k, kTokens, 5);
    const std::vector<std::int32_t> ids = routings.next();
    const std::vector<float> weights = random_expert_weights(kTokens, config.top_k, 6);
    const std::vector<bf16> x = random_tokens(kTokens * config.hidden, 2);
    std::vector<bf16> y(x.size());
    EXPECT_EQ(moe.forward({x.data(), kTokens, config.hidden}, {ids.data(), kTokens, config.top_k},
                          {weights.data(), kTokens, config.top_k}, {y.data(), kTokens, config.hidden}),
              0)
        << "blocks saturated";
  }
}

TEST(RandomExpertWeights, AddUpToOne) {
  const std::vector<float> weights = random_expert_weights(100, 3, 1);
  ASSERT_EQ(weights.size(), 300u);
  for (std::size_t t = 0; t < 300; t += 3) {
    EXPECT_NEAR(weights[t] + weights[t + 1] + weights[t + 2], 1, 1e-6);
    for (std::size_t slot = 0; slot < 3; ++slot) EXPECT_GT(weights[t + slot], 0.1f);
  }
}

std::vector<int> rows_of_experts(const std::vector<std::int32_t>& ids, std::size_t experts) {
  std::vector<int> rows(experts);
  for (const std::int32_t id : ids) ++rows.at(static_cast<std::size_t>(id));
  std::sort(rows.rbegin(), rows.rend());
  return rows;
}

TEST(Routings, AreDistinctForEachToken) {
  for (const RoutingKind kind : {RoutingKind::kUniform, RoutingKind::kZipf, RoutingKind::kOne}) {
    const std::vector<std::int32_t> ids = RoutingSequence(kind, 9, 5, 500, 1).next();
    ASSERT_EQ(ids.size(), 2500u);
    for (std::size_t t = 0; t < 2500; t += 5) {
      EXPECT_EQ(std::set<std::int32_t>(ids.begin() + static_cast<std::ptrdiff_t>(t),
                                       ids.begin() + static_cast<std::ptrdiff_t>(t) + 5)
                    .size(),
                5u);
    }
  }
}

TEST(Routings, SpreadAsTheyAreCalled) {
  constexpr std::int64_t kTokens = 20000;
  // One slot: shares 1/4 each; 12/25, 6/25, 4/25, 3/25. Within 6 standard deviations, below 71 tokens each.
  const double uniform[] = {0.25, 0.25, 0.25, 0.25}, zipf[] = {0.48, 0.24, 0.16, 0.12};
  for (const auto& [kind, shares] : {std::pair{RoutingKind::kUniform, uniform}, {RoutingKind::kZipf, zipf}}) {
    const std::vector<int> rows = rows_of_experts(RoutingSequence(kind, 4, 1, kTokens, 2).next(), 4);
    for (std::size_t e = 0; e < 4; ++e) EXPECT_NEAR(rows[e], shares[e] * kTokens, 6 * 71) << to_string(kind);
  }
  const std::vector<int> one = rows_of_experts(RoutingSequence(RoutingKind::kOne, 4, 2, 10, 3).next(), 4);
  EXPECT_EQ(one, (std::vector<int>{10, 10, 0, 0}));
}

TEST(Routings, ComeFromTheirSeed) {
  for (const RoutingKind kind : {RoutingKind::kUniform, RoutingKind::kZipf}) {
    const auto ids = [&](std::uint64_t seed) { return RoutingSequence(kind, 64, 4, 50, seed).next(); };
    EXPECT_EQ(ids(1), ids(1));
    EXPECT_NE(ids(1), ids(2));
  }
}

TEST(Routings, TakeEveryExpertInTurn) {
  RoutingSequence routings(RoutingKind::kUniform, 12, 3, 1, 4);
  for (int round = 0; round < 2; ++round) {
    std::set<std::int32_t> seen;
    for (int pass = 0; pass < 4; ++pass) {
      for (const std::int32_t e : routings.next()) EXPECT_TRUE(seen.insert(e).second);
    }
    EXPECT_EQ(seen.size(), 12u);
  }
}

TEST(UsedExperts, AreAscendingAndOnce) {
  EXPECT_EQ(used_experts({4, 1, 4, 0}, 6), (std::vector<std::int32_t>{0, 1, 4}));
  EXPECT_TRUE(used_experts({}, 6).empty());
}

TEST(ReuseDistance, CountsWhatIsReadInBetween) {
  // One pass over and over: a matrix of 10 comes again after the other one of 10 and two of 3.
  EXPECT_EQ(reuse_distance({{0, 1}}, 2, 10, 3), 10 + 2 * 3);
  // Alone it is read again after its own second matrix.
  EXPECT_EQ(reuse_distance({{0}}, 2, 10, 3), 3);
  // 0 0' 1 1' 0 0' ...: the first matrix of 0 waits for 3 + 10 + 3.
  EXPECT_EQ(reuse_distance({{0}, {1}}, 2, 10, 3), 16);
  // 0 0' 0 0' 1 1': the worst counts.
  EXPECT_EQ(reuse_distance({{0}, {0}, {1}}, 2, 10, 3), 3);
  // 0 1 0' 1' 1 2 1' 2': 1 waits for 0' and 1', its second matrix for 1 and 2.
  EXPECT_EQ(reuse_distance({{0, 1}, {1, 2}}, 3, 10, 3), 6);
  EXPECT_EQ(reuse_distance({{}}, 3, 10, 3), std::numeric_limits<std::int64_t>::max());
}

// The host, told of a fault to make.
class FaultyTarget : public BenchTarget {
 public:
  enum Fault { kNone, kNotANumber, kUnequal, kWrongRow, kTimedOtherwise };
  explicit FaultyTarget(Fault fault) : fault_(fault), host_(host_bench_target()) {}
  void set(Fault fault) { fault_ = fault, runs_ = 0; }

  BenchMachine machine() const override { return {}; }
  std::int64_t least_bytes() const override { return 0; }
  std::int64_t host_bytes(const MoeLayer& layer, std::int64_t tokens) const override {
    return host_->host_bytes(layer, tokens);
  }
  void load(const MoeLayer& layer, const BenchInputs& inputs) override { host_->load(layer, inputs); }
  std::vector<bf16> run(std::size_t pass, int poison) override {
    std::vector<bf16> y = host_->run(pass, poison);
    ++runs_;
    if (fault_ == kNotANumber) y.back() = bf16{0x7FC0};
    if (fault_ == kUnequal && runs_ == 2) y[0].bits ^= 1;
    if (fault_ == kWrongRow) {  // the last token's
      for (std::size_t i = y.size() - 128; i < y.size(); ++i) y[i] = to_bf16(to_float(y[i]) * 1.1f);
    }
    return y;
  }
  double time() override {
    ++timed;
    host_->time();
    return 0.25 * timed;
  }
  void rest(double seconds) override { rested += seconds; }
  std::vector<bf16> y() const override {
    std::vector<bf16> y = host_->y();
    if (fault_ == kTimedOtherwise) y[5].bits ^= 1;
    return y;
  }
  int timed = 0;
  double rested = 0;

 private:
  Fault fault_;
  std::unique_ptr<BenchTarget> host_;
  int runs_ = 0;
};

LayerBench small_bench(BenchTarget& target, ActivationFormat format, int repeat, std::int64_t cache_bytes = 0,
                       const std::string& backend = "cpu") {
  MoeLayerOptions options;
  options.backend = backend;
  options.activations = format;
  return {random_layer(small_config(), 1), options, RoutingKind::kUniform, repeat, cache_bytes, target};
}

TEST(LayerBenchTest, ReportsWhatItMeasured) {
  for (const ActivationFormat format :
       {ActivationFormat::kBf16, ActivationFormat::kFp8, ActivationFormat::kNvfp4}) {
    FaultyTarget target(FaultyTarget::kNone);
    const BenchResult result = small_bench(target, format, 3).time(7);
    EXPECT_EQ(result.activations, format);
    EXPECT_EQ(result.tokens, 7);
    EXPECT_EQ(result.rows, 14);
    EXPECT_EQ(result.passes, 1);
    EXPECT_EQ(result.seconds, (std::vector<double>{0.5, 0.75, 1.0}));  // the first one warmed up
    EXPECT_EQ(result.median_seconds(), 0.75);
    EXPECT_EQ(result.flops, 2.0 * 14 * 3 * 128 * 96);
    EXPECT_EQ(result.weight_bytes, result.experts_used * 3 * 128 * 96 * 9 / 16);
    EXPECT_DOUBLE_EQ(result.flops_per_second() * 0.75, result.flops);
    EXPECT_FALSE(result.warm);
    EXPECT_EQ(result.checked_rows, 4);
    EXPECT_LT(result.checked_error, 0x1p-8);
    EXPECT_TRUE(format != ActivationFormat::kNvfp4 || result.checked_error == 0);
  }
}

// Wherever this machine has a backend: by the clock, or by a graph of as many passes as make a millisecond.
TEST(LayerBenchTest, TimesEveryBackend) {
  for (const Backend* backend : all_backends()) {
    if (!backend->supported()) continue;
    for (const ActivationFormat format :
         {ActivationFormat::kBf16, ActivationFormat::kFp8, ActivationFormat::kNvfp4}) {
      if (!backend->runs(format, WeightFormat::kNvfp4)) continue;
      SCOPED_TRACE(fmt::format("{} {}", backend->name(), to_string(format)));
      MoeLayerOptions options;
      options.backend = backend->name();
      options.activations = format;
      const LayerWeights weights = random_layer(small_config(), 1);
      const std::unique_ptr<BenchTarget> target = bench_target_for(MoeLayer(weights, options));
      for (const RoutingKind routing : {RoutingKind::kUniform, RoutingKind::kOne}) {
        LayerBench layer(weights, options, routing, 2, 0, *target);
        for (const std::int64_t tokens : {33, 1}) {  // fewer after more: nothing of the old stays
          const BenchResult result = layer.time(tokens);
          EXPECT_EQ(result.seconds.size(), 2u);
          EXPECT_GT(result.median_seconds(), 0);
          EXPECT_EQ(result.checked_rows, backend->name() == "ref" ? 0 : std::min<std::int64_t>(tokens, 4));
        }
      }
    }
  }
}

TEST(LayerBenchTest, MeasuresForHalfASecondWhereNobodySaysHowOften) {
  FaultyTarget target(FaultyTarget::kNone);
  EXPECT_EQ(small_bench(target, ActivationFormat::kNvfp4, 0).time(1).seconds.size(), 3u);
}

TEST(LayerBenchTest, RestsAfterEachMeasurementUnlessSustained) {
  for (const bool sustained : {false, true}) {
    FaultyTarget target(FaultyTarget::kNone);
    MoeLayerOptions options;
    options.backend = "cpu";
    LayerBench layer(random_layer(small_config(), 1), options, RoutingKind::kUniform, 2, 0, target,
                     sustained);
    layer.time(1);
    EXPECT_EQ(target.rested, sustained ? 0 : 0.25 + 0.5 + 0.75);
  }
}

TEST(LayerBenchTest, RotatesExpertsUntilTheCacheIsCold) {
  constexpr std::int64_t kExpert = 3 * 128 * 96 * 9 / 16;
  FaultyTarget target(FaultyTarget::kNone);
  // A token takes 2 of 6 experts: two passes keep a whole one between two uses.
  const BenchResult cold = small_bench(target, ActivationFormat::kNvfp4, 2, kExpert / 2).time(1);
  EXPECT_EQ(cold.passes, 2);
  EXPECT_EQ(cold.experts_used, 2);
  EXPECT_FALSE(cold.warm);
  EXPECT_EQ(cold.seconds[0], 0.5 / 2);
  const BenchResult warm = small_bench(target, ActivationFormat::kNvfp4, 1, 100 * kExpert).time(1);
  EXPECT_EQ(warm.passes, 3);  // six experts, no further apart
  EXPECT_TRUE(warm.warm);
}

TEST(LayerBenchTest, TheReferenceIsNotHeldAgainstItself) {
  FaultyTarget target(FaultyTarget::kNone);
  const BenchResult result = small_bench(target, ActivationFormat::kBf16, 1, 0, "ref").time(2);
  EXPECT_EQ(result.checked_rows, 0);
}

TEST(LayerBenchTest, TimesNothingWrong) {
  struct Case {
    FaultyTarget::Fault fault;
    const char* part;
  };
  for (const auto& [fault, part] : {Case{FaultyTarget::kNotANumber, "y is not finite at token 8, column 127"},
                                    {FaultyTarget::kUnequal, "two passes gave different bits"},
                                    {FaultyTarget::kWrongRow, "4 rows differ from the reference's by"},
                                    {FaultyTarget::kTimedOtherwise, "other bits than an untimed one"}}) {
    for (const ActivationFormat format : {ActivationFormat::kBf16, ActivationFormat::kNvfp4}) {
      FaultyTarget target(fault);
      LayerBench layer = small_bench(target, format, 1);
      try {
        layer.time(9);
        FAIL() << part;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kInternal);
        EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
      }
      EXPECT_EQ(target.timed > 0, fault == FaultyTarget::kTimedOtherwise) << part;
    }
  }
}

// The passes of some tokens are kept, and what they are held against.
TEST(LayerBenchTest, TheSameTokensAgainAreCheckedAgain) {
  FaultyTarget target(FaultyTarget::kNone);
  LayerBench layer = small_bench(target, ActivationFormat::kBf16, 2);
  for (const std::int64_t tokens : {9, 9, 3, 9}) {
    const BenchResult result = layer.time(tokens);
    EXPECT_EQ(result.tokens, tokens);
    EXPECT_EQ(result.seconds.size(), 2u);
    EXPECT_EQ(result.checked_rows, std::min<std::int64_t>(tokens, 4));
  }
  for (const FaultyTarget::Fault fault : {FaultyTarget::kNotANumber, FaultyTarget::kUnequal,
                                          FaultyTarget::kWrongRow, FaultyTarget::kTimedOtherwise}) {
    target.set(fault);
    EXPECT_THROW(layer.time(9), Error) << fault;
  }
  target.set(FaultyTarget::kNone);
  EXPECT_NO_THROW(layer.time(9));
}

TEST(Tune, TimesEveryTileOfBothGemms) {
  BenchOptions options = {.models = {"qwen3-30b-a3b"},
                          .activations = {ActivationFormat::kBf16, ActivationFormat::kFp8},
                          .tokens = {1, 33},
                          .backend = {},
                          .experts = 8,
                          .repeat = 2};
  for (const Backend* backend : all_backends()) {
    if (!backend->supported()) continue;
    SCOPED_TRACE(backend->name());
    options.backend = backend->name();
    if (backend->name() != "hopper") {
      try {
        tune(options);
        FAIL();
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
        EXPECT_NE(std::string(error.what()).find("timed on a GPU"), std::string::npos) << error.what();
      }
      continue;
    }
    std::vector<std::size_t> measured;
    std::string last;
    const TuneReport report = tune(options, {}, [&](const TuneReport& so_far) {
      measured.push_back(so_far.gemms.size());
      EXPECT_GT(so_far.text.size(), last.size());
      last = so_far.text;
    });
    ASSERT_EQ(report.gemms.size(), 8u);
    EXPECT_EQ(measured, (std::vector<std::size_t>{2, 4, 6, 8}));
    EXPECT_EQ(report.text, last);
    std::size_t tiles = 0;
    for (std::size_t i = 0; i < 8; ++i) {
      const TunedGemm& gemm = report.gemms[i];
      EXPECT_EQ(gemm.activations, options.activations[i / 4]);
      EXPECT_EQ(gemm.tokens, options.tokens[i / 2 % 2]);
      EXPECT_EQ(gemm.rows, gemm.tokens * 8);
      EXPECT_EQ(gemm.first, i % 2 == 0);
      std::set<std::pair<int, int>> different;
      for (const TileTime& tile : gemm.tiles) {
        EXPECT_GT(tile.seconds, 0);
        EXPECT_TRUE(different.emplace(tile.tokens, tile.row_tiles).second);
      }
      EXPECT_GE(different.size(), 8u);
      EXPECT_GE(gemm.loss(), 0);
      tiles += different.size();
    }
    EXPECT_EQ(std::count(report.text.begin(), report.text.end(), '\n'),
              static_cast<std::ptrdiff_t>(tiles + 2));
  }
}

TEST(Tune, TheFastestIsHeldAgainstTheUsual) {
  TunedGemm gemm;
  gemm.tiles = {{16, 4, 2.0}, {8, 4, 3.0}, {24, 4, 1.6}, {32, 4, 1.7}};
  EXPECT_EQ(gemm.usual().tokens, 16);
  EXPECT_EQ(gemm.fastest().tokens, 24);
  EXPECT_DOUBLE_EQ(gemm.loss(), 0.25);
}

TEST(LayerBenchTest, RefusesTokensThatDoNotFit) {
  FaultyTarget target(FaultyTarget::kNone);
  LayerBench layer = small_bench(target, ActivationFormat::kBf16, 1);
  for (const std::int64_t tokens : {1LL << 38, 1LL << 61}) {
    try {
      layer.time(tokens);
      FAIL() << tokens;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory) << error.what();
    }
  }
}

TEST(BenchTargets, MeasureTheMachine) {
  for (const Backend* backend : all_backends()) {
    if (!backend->supported()) continue;
    SCOPED_TRACE(backend->name());
    MoeLayerOptions options;
    options.backend = backend->name();
    const MoeLayer layer(random_layer(small_config(), 1), options);
    const BenchMachine machine = bench_target_for(layer)->machine();
    EXPECT_FALSE(machine.device.empty());
    EXPECT_GE(machine.cache_bytes, 32 << 10);
    EXPECT_GT(machine.bandwidth, 1e8);
    EXPECT_LT(machine.bandwidth, 1e14);
    EXPECT_EQ(machine.flops > 0, layer.on_gpu());
    EXPECT_EQ(machine.flops_of.empty(), !layer.on_gpu());
  }
}

TEST(LayerBenchTest, MeasuresTheMachineAlongWithTheHost) {
  for (const std::string backend : {"ref", "cpu"}) {
    const std::unique_ptr<BenchTarget> target = host_bench_target();
    const BenchResult result = small_bench(*target, ActivationFormat::kNvfp4, 3, 0, backend).time(2);
    ASSERT_EQ(result.rates.size(), 3u);
    for (const BenchRates& rates : result.rates) {
      EXPECT_GT(rates.bandwidth, 1e8);
      EXPECT_LT(rates.bandwidth, 1e14);
      const bool known = backend == "cpu" && cpu::chosen_kernel().only_products_nvfp4 != nullptr;
      EXPECT_EQ(rates.flops > 1e8, known) << rates.flops;
    }
  }
}

TEST(BenchReport, TheLongerFloorCounts) {
  BenchResult result;
  result.weight_bytes = 600, result.flops = 1000;
  BenchReport report;
  report.machine.bandwidth = 300;
  EXPECT_EQ(report.floor_seconds(result), 2);
  report.machine.flops = 200;
  EXPECT_EQ(report.floor_seconds(result), 5);
  report.machine.flops = 1000;
  EXPECT_EQ(report.floor_seconds(result), 2);
  report.machine.fp8_flops = 100;
  EXPECT_EQ(report.floor_seconds(result), 2);
  result.activations = ActivationFormat::kFp8;
  EXPECT_EQ(report.floor_seconds(result), 10);
  // What was measured along with the passes counts first, and of that the medians.
  result.rates = {{100, 500}, {200, 0.1}, {150, 600}};
  EXPECT_EQ(report.memory_seconds(result), 4);
  EXPECT_EQ(report.compute_seconds(result), 2);
}

TEST(Bench, RefusesBeforeItMeasures) {
  const auto refuses = [](const BenchOptions& options, ErrorCode code, const std::string& part) {
    bool started = false;
    try {
      bench(options, [&](const std::string&) { started = true; });
      FAIL() << part;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code);
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
    EXPECT_FALSE(started) << part;
  };
  const BenchOptions good = {
      .models = {"qwen3-30b-a3b"}, .activations = {ActivationFormat::kBf16}, .tokens = {1}, .backend = "cpu"};
  BenchOptions bad = good;
  bad.models = {"qwen"};
  refuses(bad, ErrorCode::kNotFound, "\"qwen\"");
  bad = good, bad.tokens = {1, 0};
  refuses(bad, ErrorCode::kInvalidArgument, "got 0");
  bad = good, bad.repeat = -1;
  refuses(bad, ErrorCode::kInvalidArgument, "got -1");
  bad = good, bad.experts = 7;
  refuses(bad, ErrorCode::kInvalidArgument, "8 to 128 experts, got 7");
  bad = good, bad.experts = 129;
  refuses(bad, ErrorCode::kInvalidArgument, "8 to 128 experts, got 129");
  bad = good, bad.x_scale = ScaleSource::kDynamicTensor;
  refuses(bad, ErrorCode::kInvalidArgument, "got tensor");
  bad = good, bad.backend = "abacus";
  refuses(bad, ErrorCode::kNotFound, "abacus");
}

}  // namespace
}  // namespace megamoe
