// host_bench_target.cc: layers whose tokens and results lie in host memory.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <string>

#include "base/aligned_buffer.h"
#include "base/check.h"
#include "base/memory.h"
#include "base/parallel.h"
#include "cpu/kernels.h"
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

constexpr std::int64_t kLinesAhead[] = {0, 64, 160};  // of which the best counts

// Memory that is read to see how fast that goes, by all threads together.
class ReadProbe {
 public:
  explicit ReadProbe(std::int64_t cache_bytes)
      : numbers_(std::clamp<std::int64_t>(4 * cache_bytes, 256LL << 20, 2LL << 30) / kSize) {
    parallel_for(numbers_.size(), kPiece, [&](std::int64_t begin, std::int64_t end) {
      std::fill(numbers_.data() + begin, numbers_.data() + end, 1u);
    });
  }
  // Bytes per second, of the 1 / `parts` of it that was read longest ago. Lines are asked for so many lines
  // ahead; what is best differs between processors.
  double bandwidth(std::int64_t parts, std::int64_t lines_ahead) {
    const std::int64_t count = numbers_.size() / parts;
    if (next_ + count > numbers_.size()) next_ = 0;
    const std::uint64_t* numbers = numbers_.data() + next_;
    next_ += count;
    std::atomic<std::uint64_t> sum = 0;
    const double seconds = seconds_of([&] {
      parallel_for(count, kPiece, [&](std::int64_t begin, std::int64_t end) {
        std::uint64_t part = 0;
        for (std::int64_t line = begin; line < end; line += kLine) {
          __builtin_prefetch(numbers + line + lines_ahead * kLine);
          for (std::int64_t i = 0; i < kLine; ++i) part += numbers[line + i];
        }
        sum += part;
      });
    });
    MEGAMOE_CHECK(sum == static_cast<std::uint64_t>(count));
    return static_cast<double>(count * kSize) / seconds;
  }

 private:
  static constexpr std::int64_t kSize = sizeof(std::uint64_t), kLine = kCacheLine / kSize;
  static constexpr std::int64_t kPiece = (1 << 20) / kSize;
  AlignedBuffer<std::uint64_t> numbers_;
  std::int64_t next_ = 0;
};

// Multiplications and additions in a second of all threads together, by the instructions of the chosen
// kernel; 0 where those are not known.
double product_rate(ActivationFormat format) {
  constexpr std::int64_t kRounds = 1 << 17;  // a fraction of a millisecond
  const cpu::Kernel& kernel = cpu::chosen_kernel();
  const auto products =
      format == ActivationFormat::kNvfp4 ? kernel.only_products_nvfp4 : kernel.only_products_f32;
  if (products == nullptr) return 0;
  std::atomic<std::int64_t> count = 0;
  const double seconds = seconds_of([&] {
    parallel_for(num_threads(), 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) count += products(kRounds);
    });
  });
  return static_cast<double>(count) / seconds;
}

class HostBenchTarget final : public BenchTarget {
 public:
  BenchMachine machine() const override {
    double best = 0;
    for (int i = 0; i < 2; ++i) {
      for (const std::int64_t ahead : kLinesAhead) best = std::max(best, read_probe_->bandwidth(1, ahead));
    }
    return {.device = fmt::format("{}, {} threads", cpu_name(), num_threads()),
            .cache_bytes = cache_,
            .bandwidth = best,
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

  // Each is over in a moment, so that of a few tries the best counts: in another some thread may have had to
  // wait for its processor.
  BenchRates rates() override {
    constexpr std::int64_t kParts = 8;
    const bool own = layer_->backend() == "cpu";
    BenchRates best;
    for (const std::int64_t ahead : kLinesAhead) {
      best.bandwidth = std::max(best.bandwidth, read_probe_->bandwidth(kParts, ahead));
      if (own) best.flops = std::max(best.flops, product_rate(layer_->options().activations));
    }
    return best;
  }

  std::vector<bf16> y() const override { return y_; }

 private:
  void forward(std::size_t pass) {
    const std::int64_t tokens = inputs_->tokens, hidden = layer_->config().hidden;
    const int top_k = layer_->config().top_k;
    layer_->forward({inputs_->x.data(), tokens, hidden}, {inputs_->ids[pass].data(), tokens, top_k},
                    {inputs_->weights.data(), tokens, top_k}, {y_.data(), tokens, hidden}, workspace_);
  }

  const std::int64_t cache_ = last_level_cache();
  const std::unique_ptr<ReadProbe> read_probe_ = std::make_unique<ReadProbe>(cache_);
  const MoeLayer* layer_ = nullptr;
  const BenchInputs* inputs_ = nullptr;
  AlignedBuffer<std::byte> workspace_;
  std::vector<bf16> y_;
};

}  // namespace

std::unique_ptr<BenchTarget> host_bench_target() { return std::make_unique<HostBenchTarget>(); }

}  // namespace megamoe
