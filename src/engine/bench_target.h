// bench_target.h: where a layer is timed: in host memory by the clock, or on a GPU by its events.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "megamoe/moe_layer.h"

namespace megamoe {

struct BenchMachine {
  std::string device;            // "AMD EPYC 9654, 8 threads", "NVIDIA H200"
  std::int64_t cache_bytes = 0;  // of the last cache before memory
  double bandwidth = 0;          // bytes per second
  std::string bandwidth_of;      // what was measured: "reading", "copying, bytes read and written"
  double flops = 0;              // multiplications and additions in a second; 0 where they were not measured
  std::string flops_of;          // what was measured, or empty
  double fp8_flops = 0;          // the same for fp8 activations, where it differs
};

// What the machine does at some moment; 0 where that was not measured.
struct BenchRates {
  double bandwidth = 0;  // bytes per second
  double flops = 0;      // multiplications and additions in a second
};

// Tokens and the routings of the passes that are timed in a row.
struct BenchInputs {
  std::int64_t tokens = 0;
  std::vector<bf16> x;                         // [tokens, H], of every pass
  std::vector<float> weights;                  // [tokens, top_k], of every pass
  std::vector<std::vector<std::int32_t>> ids;  // for each pass [tokens, top_k]
};

class BenchTarget {
 public:
  virtual ~BenchTarget() = default;
  // Measures it.
  virtual BenchMachine machine() const = 0;
  // What passes in a row should read at least for the fixed cost of timing them not to show.
  virtual std::int64_t least_bytes() const = 0;
  // Bytes of host memory that a pass takes beside its inputs and y.
  virtual std::int64_t host_bytes(const MoeLayer& layer, std::int64_t tokens) const = 0;
  // What the calls below run; both must outlive them. Throws kOutOfMemory.
  virtual void load(const MoeLayer& layer, const BenchInputs& inputs) = 0;
  // Runs one pass, in memory that was filled with `poison` before, and returns y [tokens, H].
  virtual std::vector<bf16> run(std::size_t pass, int poison) = 0;
  // Runs all passes in a row; seconds.
  virtual double time() = 0;
  // Leaves the machine idle after passes that took `seconds`, where it would slow down without pauses.
  virtual void rest(double seconds) { (void)seconds; }
  // Measures in little time what bounds the passes: on a machine that others use, too, it changes from one
  // moment to the next. Nothing where it does not.
  virtual BenchRates rates() { return {}; }
  // y [tokens, H] of the pass that ran last.
  virtual std::vector<bf16> y() const = 0;
};

std::unique_ptr<BenchTarget> host_bench_target();
std::unique_ptr<BenchTarget> gpu_bench_target();  // in builds with a GPU backend
// The one for layers like this.
std::unique_ptr<BenchTarget> bench_target_for(const MoeLayer& layer);

}  // namespace megamoe
