// gpu_bench_target.cc: layers whose tokens and results lie in a GPU's memory. All passes of a measurement are
// one captured graph, so that no launch from the host is timed.
#include <chrono>
#include <cstddef>
#include <optional>
#include <thread>

#include "cuda/device.h"
#include "cuda/graph_timer.h"
#include "cuda/sm90/tensor_rate.h"
#include "engine/bench_target.h"

namespace megamoe {
namespace {

using cuda::DeviceArray;

class GpuBenchTarget final : public BenchTarget {
 public:
  BenchMachine machine() const override {
    const cuda::DeviceInfo info = cuda::device_info(cuda::current_device());
    return {.device = info.name,
            .cache_bytes = info.l2,
            .bandwidth = cuda::copy_bandwidth(stream_),
            .bandwidth_of = "copying, bytes read and written",
            .flops = sm90::tensor_rate(sm90::OperandType::kBf16, stream_),
            .flops_of = "wgmma in BF16, from registers and shared memory",
            .fp8_flops = sm90::tensor_rate(sm90::OperandType::kFp8, stream_)};
  }

  // A millisecond or so: launching a graph costs some microseconds.
  std::int64_t least_bytes() const override { return 4LL << 30; }

  std::int64_t host_bytes(const MoeLayer&, std::int64_t) const override { return 0; }

  void load(const MoeLayer& layer, const BenchInputs& inputs) override {
    graph_.reset(), workspace_ = {}, x_ = {}, y_ = {}, weights_ = {}, ids_.clear();  // before new ones come
    layer_ = &layer;
    tokens_ = inputs.tokens;
    x_ = DeviceArray<bf16>(inputs.x);
    weights_ = DeviceArray<float>(inputs.weights);
    for (const std::vector<std::int32_t>& ids : inputs.ids) ids_.emplace_back(ids);
    y_ = DeviceArray<bf16>(x_.count());
    workspace_ = DeviceArray<std::byte>(layer.stream_workspace_bytes(tokens_));
  }

  std::vector<bf16> run(std::size_t pass, int poison) override {
    workspace_.fill(poison), y_.fill(poison);
    forward(pass);
    return y();
  }

  double time() override {
    if (!graph_) {
      graph_.emplace(stream_, [&] {
        for (std::size_t pass = 0; pass < ids_.size(); ++pass) forward(pass);
      });
    }
    return cuda::stream_seconds(stream_, [&] { graph_->launch(stream_); });
  }

  // A GPU lowers its clocks where it takes more than its power limit allows for long.
  void rest(double seconds) override {
    constexpr double kRest = 3;  // a quarter of the time at work
    std::this_thread::sleep_for(std::chrono::duration<double>(kRest * seconds));
  }

  std::vector<bf16> y() const override {
    stream_.synchronize();
    return y_.download();
  }

 private:
  void forward(std::size_t pass) const {
    const std::int64_t hidden = layer_->config().hidden;
    const int top_k = layer_->config().top_k;
    layer_->forward_on_stream({x_.data(), tokens_, hidden}, {ids_[pass].data(), tokens_, top_k},
                              {weights_.data(), tokens_, top_k}, {y_.data(), tokens_, hidden},
                              {workspace_.data(), static_cast<std::size_t>(workspace_.bytes())},
                              stream_.get());
  }

  cuda::Stream stream_;
  const MoeLayer* layer_ = nullptr;
  std::int64_t tokens_ = 0;
  DeviceArray<bf16> x_, y_;
  DeviceArray<float> weights_;
  std::vector<DeviceArray<std::int32_t>> ids_;
  DeviceArray<std::byte> workspace_;
  std::optional<cuda::CapturedGraph> graph_;
};

}  // namespace

std::unique_ptr<BenchTarget> gpu_bench_target() { return std::make_unique<GpuBenchTarget>(); }

}  // namespace megamoe
