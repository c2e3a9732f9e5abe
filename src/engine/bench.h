// bench.h: times whole layers with random weights, against what the machine's memory allows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine/bench_layer.h"
#include "megamoe/moe_layer.h"

namespace megamoe {

struct BenchOptions {
  std::vector<std::string> models;  // of src/layer/geometries.cc; their routed experts alone are run
  std::vector<ActivationFormat> activations;
  std::vector<std::int64_t> tokens;  // each > 0; empty: 1, 8, 64, 512, and on a GPU 4096 and 16384
  std::string backend;               // as MoeLayerOptions
  std::int64_t experts = 0;          // as many of each model's experts, or 0 for all
  RoutingKind routing = RoutingKind::kUniform;
  ScaleSource x_scale = ScaleSource::kStaticLayerMax;  // nvfp4; any but kDynamicTensor
  int repeat = 0;          // measurements of each; 0: as many as half a second takes
  bool sustained = false;  // on a GPU: one after the other, without pauses that keep its clocks up
};

struct BenchReport {
  std::string backend;
  BenchMachine machine;
  std::vector<BenchResult> results;  // by model, then format, then tokens

  // What a pass takes at least: to read the weights of the experts used once at the measured bandwidth, or to
  // multiply at the measured rate, whichever is longer; the latter is 0 where no rate was measured. What was
  // measured along with the passes counts before what was measured once.
  double memory_seconds(const BenchResult& result) const {
    const double bandwidth = result.median_rates().bandwidth;
    return result.weight_bytes / (bandwidth > 0 ? bandwidth : machine.bandwidth);
  }
  double compute_seconds(const BenchResult& result) const {
    const bool fp8 = result.activations == ActivationFormat::kFp8 && machine.fp8_flops > 0;
    const double own = result.median_rates().flops, usual = fp8 ? machine.fp8_flops : machine.flops;
    const double flops = own > 0 ? own : usual;
    return flops > 0 ? result.flops / flops : 0;
  }
  double floor_seconds(const BenchResult& result) const {
    return std::max(memory_seconds(result), compute_seconds(result));
  }
};

// `on_start` is told what comes next. Throws kNotFound, kInvalidArgument (a number that is not positive,
// fewer experts than top_k), kUnsupported, kOutOfMemory, and what LayerBench throws.
BenchReport bench(const BenchOptions& options, const std::function<void(const std::string&)>& on_start = {});

}  // namespace megamoe
