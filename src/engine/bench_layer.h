// bench_layer.h: times a layer in one activation format, once its results have been checked.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/bench_inputs.h"
#include "engine/bench_target.h"
#include "megamoe/moe_layer.h"

namespace megamoe {

// One model, format and number of tokens. A measurement is some passes in a row, each with another routing;
// what belongs to a pass is the mean over them.
struct BenchResult {
  std::string model;   // LayerWeights::name
  LayerConfig config;  // with the experts that were run
  ActivationFormat activations = ActivationFormat::kBf16;
  std::int64_t tokens = 0;
  std::int64_t rows = 0;          // of the GEMMs: tokens * top_k
  double experts_used = 0;        // that got a token, of a pass
  std::int64_t passes = 0;        // of a measurement
  std::vector<double> seconds;    // of a pass, one for each measurement
  std::vector<BenchRates> rates;  // of the machine, right after each measurement
  double flops = 0;               // of a pass, multiplications and additions in both GEMMs
  double weight_bytes = 0;        // of the experts used in a pass, 4.5 bits for each weight
  // Some weights may have come from a cache: the machine's caches hold more than a quarter of what is read
  // between two uses of an expert.
  bool warm = false;
  // Before it was timed, this many rows of y were held against the backend `ref`: relative L2 difference.
  // 0 rows where `ref` itself is timed.
  std::int64_t checked_rows = 0;
  double checked_error = 0;

  double median_seconds() const;
  BenchRates median_rates() const;
  double flops_per_second() const { return flops / median_seconds(); }
  double payload_per_second() const { return weight_bytes / median_seconds(); }  // bytes
};

class LayerBench {
 public:
  // Rows of y must not depend on other tokens: no dynamic scale of all of them (ScaleSource::kDynamicTensor).
  // `target` must outlive this object; its caches hold `cache_bytes`. `repeat` measurements of each number of
  // tokens, or with 0 as many as half a second takes; with pauses (BenchTarget::rest) unless `sustained`.
  LayerBench(LayerWeights weights, const MoeLayerOptions& options, RoutingKind routing, int repeat,
             std::int64_t cache_bytes, BenchTarget& target, bool sustained = false);

  // Before any pass is timed, y is finite, two passes give the same bits and some rows are the reference's;
  // afterwards the timed passes have left the bits of an untimed one. Throws kInternal where that does not
  // hold, kOutOfMemory where the tokens do not fit. The same number of tokens again runs the same passes.
  BenchResult time(std::int64_t tokens);

  const LayerConfig& config() const { return weights_.config; }
  ActivationFormat activations() const { return layer_.options().activations; }

 private:
  void draw(std::int64_t tokens);
  void check_memory(std::int64_t tokens) const;
  [[noreturn]] void wrong(const BenchResult& result, const std::string& what) const;
  void check_first_pass(BenchResult& result);
  void check_rows(const std::vector<bf16>& y, BenchResult& result);
  std::vector<float> reference_rows(const std::vector<std::int64_t>& tokens) const;
  double tolerance(ActivationFormat format) const;

  LayerWeights weights_;
  MoeLayer layer_;
  RoutingKind routing_;
  int repeat_;
  std::int64_t cache_bytes_;
  BenchTarget& target_;
  bool sustained_;
  BenchInputs inputs_;
  BenchResult drawn_;             // what is known of passes over inputs_ before they are timed
  std::vector<float> reference_;  // the rows of y that are checked, or empty as long as none was
};

// Of one matrix [H, I] in NVFP4, 4.5 bits for each weight. Throws kOutOfMemory on overflow.
std::int64_t nvfp4_bytes(const LayerConfig& config);
// Of an expert: 3, or 2 without a gate.
int matrices_of(const LayerConfig& config);

}  // namespace megamoe
