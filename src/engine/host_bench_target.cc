// host_bench_target.cc: layers whose tokens and results lie in host memory.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>

#include "base/aligned_buffer.h"
#include "base/check.h"
#include "base/memory.h"
#include "base/parallel.h"
#include "engine/bench_target.h"

namespace megamoe {
namespace {

double seconds_of(const auto& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "CPU";
}

// Bytes per second of all threads together, the best of a few times.
double read_bandwidth(std::int64_t cache_bytes) {
  constexpr std::int64_t kPiece = 1 << 17;  // numbers, 1 MiB
  const std::int64_t bytes = std::clamp<std::int64_t>(4 * cache_bytes, 256LL << 20, 2LL << 30);
  const AlignedBuffer<std::uint64_t> numbers(bytes / static_cast<std::int64_t>(sizeof(std::uint64_t)));
  parallel_for(numbers.size(), kPiece, [&](std::int64_t begin, std::int64_t end) {
    std::fill(numbers.data() + begin, numbers.data() + end, 1u);
  });
  double best = std::numeric_limits<double>::max();
  for (int i = 0; i < 5; ++i) {
    std::atomic<std::uint64_t> sum = 0;
    best = std::min(best, seconds_of([&] {
                      parallel_for(numbers.size(), kPiece, [&](std::int64_t begin, std::int64_t end) {
                        std::uint64_t part = 0;
                        for (std::int64_t at = begin; at < end; ++at) part += numbers[at];
                        sum += part;
                      });
                    }));
    MEGAMOE_CHECK(sum == static_cast<std::uint64_t>(numbers.size()));
  }
  return static_cast<double>(bytes) / best;
}

class HostBenchTarget final : public BenchTarget {
 public:
  BenchMachine machine() const override {
    const std::int64_t cache = last_level_cache();
    return {.device = fmt::format("{}, {} threads", cpu_name(), num_threads()),
            .cache_bytes = cache,
            .bandwidth = read_bandwidth(cache),
            .bandwidth_of = "reading",
            .flops_of = {}};
  }
  std::int64_t least_bytes() const override { return 0; }

  std::int64_t host_bytes(const MoeLayer& layer, std::int64_t tokens) const override {
    return layer.workspace_bytes(tokens);
  }

  void load(const MoeLayer& layer, const BenchInputs& inputs) override {
    layer_ = &layer;
    inputs_ = &inputs;
    workspace_ = {};  // the old one goes before the new one comes
    workspace_ = AlignedBuffer<std::byte>(layer.workspace_bytes(inputs_->tokens));
    y_.assign(inputs_->x.size(), bf16{});
  }

  std::vector<bf16> run(std::size_t pass, int poison) override {
    std::memset(static_cast<void*>(workspace_.data()), poison, static_cast<std::size_t>(workspace_.size()));
    std::memset(static_cast<void*>(y_.data()), poison, y_.size() * sizeof(bf16));
    forward(pass);
    return y_;
  }

  double time() override {
    return seconds_of([&] {
      for (std::size_t pass = 0; pass < inputs_->ids.size(); ++pass) forward(pass);
    });
  }

  std::vector<bf16> y() const override { return y_; }

 private:
  void forward(std::size_t pass) {
    const std::int64_t tokens = inputs_->tokens, hidden = layer_->config().hidden;
    const int top_k = layer_->config().top_k;
    layer_->forward({inputs_->x.data(), tokens, hidden}, {inputs_->ids[pass].data(), tokens, top_k},
                    {inputs_->weights.data(), tokens, top_k}, {y_.data(), tokens, hidden}, workspace_);
  }

  const MoeLayer* layer_ = nullptr;
  const BenchInputs* inputs_ = nullptr;
  AlignedBuffer<std::byte> workspace_;
  std::vector<bf16> y_;
};

}  // namespace

std::unique_ptr<BenchTarget> host_bench_target() { return std::make_unique<HostBenchTarget>(); }

}  // namespace megamoe
