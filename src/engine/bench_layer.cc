#include "engine/bench_layer.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "base/check.h"
#include "base/median.h"
#include "base/memory.h"
#include "engine/backends.h"
#include "engine/error_stats.h"
#include "numerics/bf16.h"

namespace megamoe {
namespace {

constexpr std::int64_t kColdFactor = 4;  // bytes between two uses of an expert, in sizes of the cache
constexpr std::size_t kMaxPasses = 64;
constexpr double kSeconds = 0.5;  // that the measurements of one result take where nobody says how many
constexpr std::size_t kFewest = 3, kMost = 100;

// The reference spends so many multiply-adds, or what the fewest rows take, on what is held against it.
constexpr std::int64_t kCheckedWork = 300'000'000;
constexpr std::int64_t kFewestCheckedRows = 2, kMostCheckedRows = 4;
// The largest relative L2 difference to the reference. Sums in another order are equal to some 2^-20, so that
// y differs where they round it to the other side: 2^-8 of the element at most, in BF16.
constexpr double kTolerance = 0x1p-8;
// In nvfp4 such a sum may also move a code of h to its neighbour, a third of its value. Of some thousand
// values of h in a row that is 2^-8 of its norm for the usual one and 2^-5 for the largest. The same bound
// holds in fp8 on a GPU, whose tensor cores keep 13 bits of a sum of 128 columns.
constexpr double kMovedCodeTolerance = 0x1p-5;

enum Seed : std::uint64_t { kTokenSeed = 2, kExpertWeightSeed, kRoutingSeed };

// The passes of a measurement, as few as leave the caches cold, or where that cannot be, as cold as it gets.
struct Passes {
  std::vector<std::vector<std::int32_t>> ids;   // [tokens, top_k] each
  std::vector<std::vector<std::int32_t>> used;  // the experts of each
  bool warm = false;

  double mean_used() const {
    double sum = 0;
    for (const auto& experts : used) sum += static_cast<double>(experts.size());
    return sum / static_cast<double>(used.size());
  }
};

Passes draw_passes(const LayerConfig& config, RoutingKind kind, std::int64_t tokens, std::int64_t cache_bytes,
                   std::int64_t least_bytes) {
  RoutingSequence routings(kind, config.num_experts, config.top_k, tokens, kRoutingSeed);
  const std::int64_t second_bytes = nvfp4_bytes(config),
                     first_bytes = (matrices_of(config) - 1) * second_bytes;
  Passes passes;
  std::int64_t read = 0, farthest = -1;
  std::size_t best = 0;
  while (passes.ids.size() < kMaxPasses) {
    passes.ids.push_back(routings.next());
    passes.used.push_back(used_experts(passes.ids.back(), config.num_experts));
    read += static_cast<std::int64_t>(passes.used.back().size()) * (first_bytes + second_bytes);
    if (read < least_bytes && passes.ids.size() < kMaxPasses) continue;
    const std::int64_t distance = reuse_distance(passes.used, config.num_experts, first_bytes, second_bytes);
    if (distance > farthest) farthest = distance, best = passes.ids.size();
    if (distance >= kColdFactor * cache_bytes) return passes;
  }
  passes.ids.resize(best), passes.used.resize(best);
  passes.warm = true;
  return passes;
}

}  // namespace

double BenchResult::median_seconds() const { return median(seconds); }

BenchRates BenchResult::median_rates() const {
  if (rates.empty()) return {};
  std::vector<double> bandwidths, flops_per_second;
  for (const BenchRates& r : rates) {
    bandwidths.push_back(r.bandwidth);
    flops_per_second.push_back(r.flops);
  }
  return {median(bandwidths), median(flops_per_second)};
}

std::int64_t nvfp4_bytes(const LayerConfig& config) {
  return checked_mul(checked_mul(config.hidden, config.intermediate) / 16, 9);
}

int matrices_of(const LayerConfig& config) { return config.activation.gated() ? 3 : 2; }

LayerBench::LayerBench(LayerWeights weights, const MoeLayerOptions& options, RoutingKind routing, int repeat,
                       std::int64_t cache_bytes, BenchTarget& target, bool sustained)
    : weights_(std::move(weights)),
      layer_(weights_, options),
      routing_(routing),
      repeat_(repeat),
      cache_bytes_(cache_bytes),
      target_(target),
      sustained_(sustained) {}

// The passes of a number of tokens.
void LayerBench::draw(std::int64_t tokens) {
  const LayerConfig& config = weights_.config;
  BenchResult result;
  result.model = weights_.name;
  result.config = config;
  result.activations = layer_.options().activations;
  result.tokens = tokens;
  result.rows = checked_mul(tokens, config.top_k);
  check_memory(tokens);
  drawn_ = {};  // until all is there
  Passes passes = draw_passes(config, routing_, tokens, cache_bytes_, target_.least_bytes());
  result.experts_used = passes.mean_used();
  result.passes = static_cast<std::int64_t>(passes.ids.size());
  result.warm = passes.warm;
  const double matrices = matrices_of(config);
  result.flops = 2.0 * static_cast<double>(result.rows) * matrices *
                 static_cast<double>(checked_mul(config.hidden, config.intermediate));
  result.weight_bytes = result.experts_used * matrices * static_cast<double>(nvfp4_bytes(config));

  inputs_.tokens = tokens;
  inputs_.x = random_tokens(checked_mul(tokens, config.hidden), kTokenSeed);
  inputs_.weights = random_expert_weights(tokens, config.top_k, kExpertWeightSeed);
  inputs_.ids = std::move(passes.ids);
  drawn_ = result;
  reference_.clear();
}

BenchResult LayerBench::time(std::int64_t tokens) {
  if (tokens != drawn_.tokens) draw(tokens);
  BenchResult result = drawn_;
  target_.load(layer_, inputs_);
  check_first_pass(result);
  const std::vector<bf16> last = target_.run(inputs_.ids.size() - 1, 0x7F);
  const double warm_up = target_.time();
  if (!sustained_) target_.rest(warm_up);
  double total = 0;
  const auto enough = [&] {
    if (repeat_ > 0) return result.seconds.size() >= static_cast<std::size_t>(repeat_);
    return result.seconds.size() >= kMost || (result.seconds.size() >= kFewest && total >= kSeconds);
  };
  while (!enough()) {
    const double seconds = target_.time();
    if (!sustained_) target_.rest(seconds);
    total += seconds;
    result.seconds.push_back(seconds / static_cast<double>(result.passes));
    result.rates.push_back(target_.rates());
  }
  if (target_.y() != last) wrong(result, "the timed passes gave other bits than an untimed one");
  return result;
}

// The system would rather end the process than refuse memory that it has not got.
void LayerBench::check_memory(std::int64_t tokens) const {
  const LayerConfig& config = weights_.config;
  // x, y, two copies of it and what is compared; ids of some passes, weights
  const std::int64_t of_token =
      6 * config.hidden * static_cast<std::int64_t>(sizeof(bf16)) + 32 * config.top_k;
  const std::int64_t bytes = checked_add(checked_mul(tokens, of_token), target_.host_bytes(layer_, tokens));
  if (const std::int64_t available = available_memory(); bytes > available) {
    fail(ErrorCode::kOutOfMemory, "{} tokens of {} take {:.1f} GiB of memory, {:.1f} GiB are available",
         tokens, weights_.name, static_cast<double>(bytes) * 0x1p-30,
         static_cast<double>(available) * 0x1p-30);
  }
}

void LayerBench::wrong(const BenchResult& result, const std::string& what) const {
  fail(ErrorCode::kInternal, "{} on {}, {} activations, {} tokens: {}; no time is reported", weights_.name,
       layer_.backend(), to_string(result.activations), result.tokens, what);
}

void LayerBench::check_first_pass(BenchResult& result) {
  const std::vector<bf16> y = target_.run(0, 0xFF);
  const auto bad = std::find_if(y.begin(), y.end(), [](bf16 v) { return !std::isfinite(to_float(v)); });
  if (bad != y.end()) {
    const std::int64_t at = bad - y.begin(), hidden = weights_.config.hidden;
    wrong(result, fmt::format("y is not finite at token {}, column {}", at / hidden, at % hidden));
  }
  if (target_.run(0, 0x00) != y) wrong(result, "two passes gave different bits");
  if (layer_.backend() != "ref") check_rows(y, result);
}

// Some rows of y, the first to the last, against `ref`.
void LayerBench::check_rows(const std::vector<bf16>& y, BenchResult& result) {
  const LayerConfig& config = weights_.config;
  const std::int64_t hidden = config.hidden;
  const std::int64_t row_work = checked_mul(hidden * config.intermediate, matrices_of(config) * config.top_k);
  const std::int64_t count =
      std::min(result.tokens, std::clamp(kCheckedWork / row_work, kFewestCheckedRows, kMostCheckedRows));
  std::vector<std::int64_t> tokens;
  std::vector<float> got;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t t = count == 1 ? 0 : i * (result.tokens - 1) / (count - 1);
    tokens.push_back(t);
    for (std::int64_t at = t * hidden; at < (t + 1) * hidden; ++at) {
      got.push_back(to_float(y[static_cast<std::size_t>(at)]));
    }
  }
  if (reference_.empty()) reference_ = reference_rows(tokens);
  result.checked_rows = count;
  result.checked_error = compare(got, reference_).relative;
  const double allowed = tolerance(result.activations);
  if (!(result.checked_error <= allowed)) {
    wrong(result,
          fmt::format("{} rows differ from the reference's by {:.3g} (relative L2), expected {:.3g} at "
                      "most",
                      count, result.checked_error, allowed));
  }
}

// Rows of y by `ref`, on a layer of the experts that those use.
std::vector<float> LayerBench::reference_rows(const std::vector<std::int64_t>& tokens) const {
  const LayerConfig& config = weights_.config;
  const std::int64_t hidden = config.hidden;
  const auto count = static_cast<std::int64_t>(tokens.size());
  LayerWeights part = weights_;
  part.experts.clear();
  std::map<std::int32_t, std::int32_t> renamed;
  std::vector<bf16> x;
  std::vector<std::int32_t> ids;
  std::vector<float> expert_weights, rows;
  for (const std::int64_t t : tokens) {
    x.insert(x.end(), inputs_.x.begin() + t * hidden, inputs_.x.begin() + (t + 1) * hidden);
    for (std::int64_t pair = t * config.top_k; pair < (t + 1) * config.top_k; ++pair) {
      const std::int32_t id = inputs_.ids[0][static_cast<std::size_t>(pair)];
      const auto [entry, added] = renamed.emplace(id, static_cast<std::int32_t>(part.experts.size()));
      if (added) part.experts.push_back(weights_.experts[static_cast<std::size_t>(id)]);
      ids.push_back(entry->second);
      expert_weights.push_back(inputs_.weights[static_cast<std::size_t>(pair)]);
    }
  }
  while (static_cast<int>(part.experts.size()) < config.top_k) part.experts.push_back(weights_.experts[0]);
  part.config.num_experts = static_cast<std::int64_t>(part.experts.size());
  MoeLayerOptions options = layer_.options();
  options.backend = "ref";
  std::vector<bf16> reference(x.size());
  MoeLayer(part, options)
      .forward({x.data(), count, hidden}, {ids.data(), count, config.top_k},
               {expert_weights.data(), count, config.top_k}, {reference.data(), count, hidden});
  for (const bf16 value : reference) rows.push_back(to_float(value));
  return rows;
}

double LayerBench::tolerance(ActivationFormat format) const {
  const bool keeps_order = find_backend(layer_.backend()).keeps_order();
  switch (format) {
    case ActivationFormat::kBf16: break;
    case ActivationFormat::kFp8: return keeps_order ? kTolerance : kMovedCodeTolerance;
    case ActivationFormat::kNvfp4: return keeps_order ? 0 : kMovedCodeTolerance;
  }
  return kTolerance;
}

}  // namespace megamoe
