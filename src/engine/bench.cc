#include "engine/bench.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "base/check.h"
#include "base/memory.h"
#include "engine/backends.h"
#include "engine/tune.h"
#include "layer/geometries.h"

namespace megamoe {
namespace {

constexpr std::uint64_t kWeightSeed = 1;

LayerConfig config_of(const ModelGeometry& geometry, std::int64_t experts) {
  LayerConfig config = geometry.config;
  config.router = {};  // routings are made here
  if (experts == 0) return config;
  if (experts < config.top_k || experts > config.num_experts) {
    fail(ErrorCode::kInvalidArgument,
         "{} has {} experts and a token takes {}; expected {} to {} experts, got {}", geometry.name,
         config.num_experts, config.top_k, config.top_k, config.num_experts, experts);
  }
  config.num_experts = experts;
  return config;
}

MoeLayerOptions layer_options(const BenchOptions& options, ActivationFormat format) {
  MoeLayerOptions out;
  out.backend = options.backend;
  out.activations = format;
  if (format == ActivationFormat::kNvfp4) out.x_scale = options.x_scale;
  return out;
}

void check_options(const BenchOptions& options) {
  if (options.repeat < 0) {
    fail(ErrorCode::kInvalidArgument, "the number of measurements must be 0 (automatic) or more, got {}",
         options.repeat);
  }
  if (options.x_scale == ScaleSource::kDynamicTensor) {  // of all tokens: no row could be checked on its own
    fail(ErrorCode::kInvalidArgument, "a layer is timed with x scales static, layer-max or token, got {}",
         to_string(options.x_scale));
  }
  for (const std::int64_t tokens : options.tokens) {
    if (tokens < 1)
      fail(ErrorCode::kInvalidArgument, "the number of tokens must be 1 or more, got {}", tokens);
  }
  for (const std::string& model : options.models) config_of(find_geometry(model), options.experts);
  const Backend& backend = find_backend(options.backend);
  for (const ActivationFormat format : options.activations) {
    if (!backend.runs(format, WeightFormat::kNvfp4)) {
      fail(ErrorCode::kUnsupported, "the {} backend does not run {} activations with nvfp4 weights",
           backend.name(), to_string(format));
    }
  }
}

// Made in no time; tells where the backend works.
MoeLayer smallest_layer(const BenchOptions& options) {
  const LayerConfig config = {
      .hidden = 16, .intermediate = 16, .num_experts = 1, .top_k = 1, .activation = {}, .router = {}};
  return {random_layer(config, kWeightSeed), layer_options(options, ActivationFormat::kBf16)};
}

// Before the system ends the process for it.
void check_memory(const ModelGeometry& geometry, const LayerConfig& config) {
  const std::int64_t bytes =
      checked_mul(checked_mul(nvfp4_bytes(config), matrices_of(config)), config.num_experts);
  if (const std::int64_t available = available_memory(); bytes > available) {
    fail(ErrorCode::kOutOfMemory,
         "{} experts of {} take {:.1f} GiB of memory, {:.1f} GiB are available; fewer experts take less",
         config.num_experts, geometry.name, static_cast<double>(bytes) * 0x1p-30,
         static_cast<double>(available) * 0x1p-30);
  }
}

// Calls measure(layer, tokens) for every model, format and number of tokens.
template <class Measure>
void for_each_result(const BenchOptions& options, const std::vector<std::int64_t>& tokens,
                     std::int64_t cache_bytes, BenchTarget& target,
                     const std::function<void(const std::string&)>& start, const Measure& measure) {
  for (const std::string& model : options.models) {
    LayerWeights weights = random_layer(config_of(find_geometry(model), options.experts), kWeightSeed);
    weights.name = model;
    for (const ActivationFormat format : options.activations) {
      start(fmt::format("the weights of {}", model));
      LayerBench layer(weights, layer_options(options, format), options.routing, options.repeat, cache_bytes,
                       target, options.sustained);
      for (const std::int64_t count : tokens) {
        start(fmt::format("{}, {}, {} tokens", model, to_string(format), count));
        measure(layer, count);
      }
    }
  }
}

}  // namespace

std::unique_ptr<BenchTarget> bench_target_for(const MoeLayer& layer) {
#ifdef MEGAMOE_HOPPER
  if (layer.on_gpu()) return gpu_bench_target();
#endif
  MEGAMOE_CHECK(!layer.on_gpu());
  return host_bench_target();
}

BenchReport bench(const BenchOptions& options, const std::function<void(const std::string&)>& on_start) {
  check_options(options);
  const auto start = [&](const std::string& what) {
    if (on_start) on_start(what);
  };
  BenchReport report;
  report.backend = find_backend(options.backend).name();
  const MoeLayer smallest = smallest_layer(options);
  const bool on_gpu = smallest.on_gpu();
  for (const std::string& model : options.models) {
    const ModelGeometry& geometry = find_geometry(model);
    if (!on_gpu) check_memory(geometry, config_of(geometry, options.experts));
  }
  const std::unique_ptr<BenchTarget> target = bench_target_for(smallest);
  start("the machine");
  report.machine = target->machine();
  std::vector<std::int64_t> tokens = options.tokens;
  if (tokens.empty()) {
    tokens = {1, 8, 64, 512};
    if (on_gpu) tokens.insert(tokens.end(), {4096, 16384});
  }
  for_each_result(
      options, tokens, report.machine.cache_bytes, *target, start,
      [&](LayerBench& layer, std::int64_t count) { report.results.push_back(layer.time(count)); });
  return report;
}

const TileTime& TunedGemm::fastest() const {
  return *std::min_element(tiles.begin(), tiles.end(),
                           [](const TileTime& a, const TileTime& b) { return a.seconds < b.seconds; });
}

TuneReport tune(const BenchOptions& given, const std::function<void(const std::string&)>& on_start,
                [[maybe_unused]] const std::function<void(const TuneReport&)>& on_measured) {
  constexpr int kRepeat = 5;
  constexpr std::int64_t kMostTokens = 16384;
  check_options(given);
  BenchOptions options = given;
  if (options.repeat == 0) options.repeat = kRepeat;
  for (std::int64_t power = 1; given.tokens.empty() && power <= kMostTokens; power *= 2) {
    options.tokens.push_back(power);
    if (power > 1 && power < kMostTokens) options.tokens.push_back(power + power / 2);
  }
  const MoeLayer smallest = smallest_layer(options);
  if (!smallest.on_gpu()) {
    fail(ErrorCode::kUnsupported, "tiles are timed on a GPU; the backend is {}, which runs on none",
         smallest.backend());
  }
  const auto start = [&](const std::string& what) {
    if (on_start) on_start(what);
  };
  start("the machine");
  TuneReport report;
#ifdef MEGAMOE_HOPPER
  const std::unique_ptr<BenchTarget> target = bench_target_for(smallest);
  const BenchMachine machine = target->machine();
  report.device = machine.device;
  const auto measure = [&](LayerBench& layer, std::int64_t tokens) {
    for (TunedGemm& gemm : tune_gemms(layer, tokens)) report.gemms.push_back(std::move(gemm));
    report.text = fmt::format("# {}\n{}", report.device, tile_times_text(report.gemms));
    if (on_measured) on_measured(report);
  };
  for_each_result(options, options.tokens, machine.cache_bytes, *target, start, measure);
#endif
  return report;
}

}  // namespace megamoe
