// bench_layer: times the routed part of a layer (sort, quantise, two GEMMs, combine) on `ref` and `cpu`.
//
// Every line is verified before it is timed: `cpu` must give the bits of `ref` in nvfp4, and a relative L2
// difference below 2^-8 (BF16's own rounding of the output) in the other formats. Only then come the median
// of several runs, GFLOP/s (2 * 3 * H * I * tokens * top-k / time), GB/s (bytes of the weights of the
// experts that got a token / time) and the ratio to `ref`, which is timed on few tokens only: it is slow.
//
// Usage: bench_layer [layer [threads...]]   layers whose name holds `layer`; by default all, on 1 and all
// cores
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/parallel.h"
#include "cpu/cpu_backend.h"
#include "numerics/bf16.h"
#include "numerics/nvfp4.h"
#include "ref/ref_backend.h"

namespace megamoe {
namespace {

struct Geometry {
  const char* name;
  std::int64_t hidden, intermediate, experts;
  int top_k;
};
constexpr Geometry kGeometries[] = {
    {"tiny", 128, 96, 16, 4}, {"H2048 I768 E128", 2048, 768, 128, 8}, {"H4096 I2048 E16", 4096, 2048, 16, 4}};
constexpr std::int64_t kTokens[] = {1, 64, 512};
constexpr std::int64_t kRefTokens = 4;  // the most that `ref` is asked for in the larger geometries
constexpr double kSeconds = 0.5;        // spent on the runs behind a median

// Random NVFP4 weights. Experts share four matrices of each kind; packing gives each its own memory.
class Weights {
 public:
  explicit Weights(const Geometry& g) {
    layer.config = {.hidden = g.hidden,
                    .intermediate = g.intermediate,
                    .num_experts = g.experts,
                    .top_k = g.top_k,
                    .activation = {},
                    .router = {}};
    layer.name = g.name;
    for (std::int64_t e = 0; e < g.experts; ++e) {
      ExpertWeights w;
      w.gate = matrix(3 * (e % 4), g.intermediate, g.hidden);
      w.up = matrix(3 * (e % 4) + 1, g.intermediate, g.hidden);
      w.down = matrix(3 * (e % 4) + 2, g.hidden, g.intermediate);
      layer.experts.push_back(w);
    }
  }
  LayerWeights layer;

 private:
  WeightMatrix matrix(std::int64_t index, std::int64_t rows, std::int64_t cols) {
    const auto i = static_cast<std::size_t>(index);
    if (bytes_.size() <= i) {
      bytes_.resize(i + 1);
      bytes_[i].resize(static_cast<std::size_t>(rows * cols / 2 + rows * cols / kNvfp4Block));
      std::mt19937 random(static_cast<unsigned>(index));
      for (auto& b : bytes_[i]) b = static_cast<std::uint8_t>(random());
      // scales between 1/4 and 4
      for (std::int64_t s = rows * cols / 2; s < static_cast<std::int64_t>(bytes_[i].size()); ++s) {
        auto& b = bytes_[i][static_cast<std::size_t>(s)];
        b = static_cast<std::uint8_t>(0x28 + b % 32);
      }
    }
    const std::uint8_t* codes = bytes_[i].data();
    return {.format = WeightFormat::kNvfp4,
            .rows = rows,
            .cols = cols,
            .codes = codes,
            .scales = codes + rows * cols / 2,
            .tensor_scale = 1.0f / (4.0f * std::sqrt(static_cast<float>(cols)))};
  }
  std::vector<std::vector<std::uint8_t>> bytes_;
};

// A batch of tokens and all the memory that a pass over it needs.
class Pass {
 public:
  Pass(const LayerConfig& config, std::int64_t tokens, ActivationFormat format)
      : config_(config), format_(format), rows_(tokens * config.top_k) {
    std::mt19937 random(11);
    std::normal_distribution<float> normal;
    x_values_.resize(static_cast<std::size_t>(tokens * config.hidden));
    for (bf16& v : x_values_) v = to_bf16(normal(random));
    std::vector<std::int32_t> experts(static_cast<std::size_t>(config.num_experts));
    for (std::size_t e = 0; e < experts.size(); ++e) experts[e] = static_cast<std::int32_t>(e);
    for (std::int64_t t = 0; t < tokens; ++t) {
      std::shuffle(experts.begin(), experts.end(), random);
      ids_.insert(ids_.end(), experts.begin(), experts.begin() + config.top_k);
    }
    expert_weights_.assign(ids_.size(), 1.0f / static_cast<float>(config.top_k));
    offsets_.resize(static_cast<std::size_t>(config.num_experts + 1));
    row_to_token_.resize(ids_.size());
    row_to_slot_.resize(ids_.size());
    routing_ = {tokens,          config.top_k,         config.num_experts,
                offsets_.data(), row_to_token_.data(), row_to_slot_.data()};
    x_ = rows_of(ActivationFormat::kBf16, tokens, config.hidden, x_values_.data());
    xq_ = rows_of(format, tokens, config.hidden, nullptr);
    h_ = rows_of(format, rows_, config.intermediate, nullptr);
    expert_out_ = AlignedBuffer<float>(rows_ * config.hidden);
    y_.resize(x_values_.size());
  }

  void run(const Backend& backend, const PreparedLayer& layer) {
    backend.sort(ids_.data(), expert_weights_.data(), routing_);
    switch (format_) {
      case ActivationFormat::kBf16: break;
      case ActivationFormat::kFp8: backend.quantize_fp8(x_, xq_); break;
      case ActivationFormat::kNvfp4: backend.quantize(x_, nullptr, xq_); break;
    }
    const L1Output mode = format_ == ActivationFormat::kBf16  ? L1Output::kCompactBf16
                          : format_ == ActivationFormat::kFp8 ? L1Output::kFp8
                                                              : L1Output::kNvfp4;
    layer.gemm1(format_ == ActivationFormat::kBf16 ? x_ : xq_, false, routing_, mode, h_);
    layer.gemm2(h_, routing_, expert_out_.data());
    backend.combine(expert_out_.data(), routing_, expert_weights_.data(), nullptr,
                    {y_.data(), routing_.tokens, config_.hidden});
  }

  const std::vector<bf16>& y() const { return y_; }
  double flops() const { return 6.0 * static_cast<double>(rows_ * config_.hidden * config_.intermediate); }
  double weight_bytes() const {
    std::int64_t used = 0;
    for (std::int64_t e = 0; e < config_.num_experts; ++e) {
      used += offsets_[static_cast<std::size_t>(e)] != offsets_[static_cast<std::size_t>(e + 1)] ? 1 : 0;
    }
    return 3.0 * 9.0 / 16.0 * static_cast<double>(used * config_.hidden * config_.intermediate);
  }

 private:
  ActivationRows rows_of(ActivationFormat format, std::int64_t rows, std::int64_t cols, bf16* values) {
    ActivationRows r{.format = format, .rows = rows, .cols = cols, .row_stride = cols, .values = values};
    if (values == nullptr) r.values = bf16s_.emplace_back(rows * cols).data();
    r.codes = bytes_.emplace_back(rows * cols).data();
    r.block_scales = bytes_.emplace_back(rows * cols).data();
    const AlignedBuffer<float>& scales = floats_.emplace_back(rows * (cols / 128 + 1));
    std::fill(scales.begin(), scales.end(), 4.0f / kNvfp4Range);
    r.scales = scales.data();
    return r;
  }

  LayerConfig config_;
  ActivationFormat format_;
  std::int64_t rows_;
  std::vector<bf16> x_values_, y_;
  std::vector<std::int32_t> ids_, row_to_token_, row_to_slot_;
  std::vector<float> expert_weights_;
  std::vector<std::int64_t> offsets_;
  std::vector<AlignedBuffer<bf16>> bf16s_;
  std::vector<AlignedBuffer<std::uint8_t>> bytes_;
  std::vector<AlignedBuffer<float>> floats_;
  AlignedBuffer<float> expert_out_;
  ActivationRows x_, xq_, h_;
  Routing routing_;
};

double relative_difference(const std::vector<bf16>& a, const std::vector<bf16>& b) {
  double error = 0.0, size = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    error += std::pow(to_float(a[i]) - to_float(b[i]), 2);
    size += std::pow(to_float(b[i]), 2);
  }
  return std::sqrt(error / size);
}

double median_seconds(Pass& pass, const Backend& backend, const PreparedLayer& layer) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> times;
  double total = 0.0;
  while (times.size() < 3 || (total < kSeconds && times.size() < 1000)) {
    const auto start = Clock::now();
    pass.run(backend, layer);
    times.push_back(std::chrono::duration<double>(Clock::now() - start).count());
    total += times.back();
  }
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
  return times[times.size() / 2];
}

// Runs both backends on `tokens` tokens; false if they disagree.
bool verified(const LayerConfig& config, std::int64_t tokens, ActivationFormat format,
              const PreparedLayer& cpu, const PreparedLayer& ref) {
  Pass pass(config, tokens, format);
  pass.run(ref_backend(), ref);
  const std::vector<bf16> expected = pass.y();
  pass.run(cpu_backend(), cpu);
  if (format == ActivationFormat::kNvfp4) return pass.y() == expected;
  return relative_difference(pass.y(), expected) < 0x1p-8;
}

bool bench(const Geometry& geometry, const std::vector<int>& threads) {
  const Weights weights(geometry);
  const LayerConfig& config = weights.layer.config;
  const auto cpu = cpu_backend().prepare(weights.layer), ref = ref_backend().prepare(weights.layer);
  const bool small = geometry.hidden < 1024;
  for (const ActivationFormat format :
       {ActivationFormat::kBf16, ActivationFormat::kFp8, ActivationFormat::kNvfp4}) {
    if (!verified(config, small ? 64 : kRefTokens, format, *cpu, *ref)) {
      fmt::print("{} {}: cpu and ref disagree\n", geometry.name, to_string(format));
      return false;
    }
    for (const int count : threads) {
      set_num_threads(count);
      for (const std::int64_t tokens : kTokens) {
        Pass pass(config, tokens, format);
        const double seconds = median_seconds(pass, cpu_backend(), *cpu);
        std::string ratio = "-";
        if (small || tokens <= kRefTokens) {
          ratio = fmt::format("{:.0f}x", median_seconds(pass, ref_backend(), *ref) / seconds);
        }
        fmt::print("{:<18} {:<6} {:>3} {:>6} {:>12.1f} {:>9.1f} {:>7.2f} {:>7}\n", geometry.name,
                   to_string(format), count, tokens, seconds * 1e6, pass.flops() / seconds * 1e-9,
                   pass.weight_bytes() / seconds * 1e-9, ratio);
      }
    }
    set_num_threads(0);
  }
  return true;
}

}  // namespace
}  // namespace megamoe

int main(int argc, char** argv) {
  const std::string_view wanted = argc > 1 ? argv[1] : "";
  std::vector<int> threads;
  for (int i = 2; i < argc; ++i) threads.push_back(std::atoi(argv[i]));
  if (threads.empty()) {
    threads = {1};
    if (megamoe::available_cores() > 1) threads.push_back(megamoe::available_cores());
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // a line at a time, through pipes too
  fmt::print("{:<18} {:<6} {:>3} {:>6} {:>12} {:>9} {:>7} {:>7}\n", "layer", "x", "thr", "tokens", "us",
             "GFLOP/s", "GB/s", "vs ref");
  for (const megamoe::Geometry& geometry : megamoe::kGeometries) {
    if (std::string_view(geometry.name).find(wanted) == std::string_view::npos) continue;
    if (!megamoe::bench(geometry, threads)) return 1;
  }
  return 0;
}
