#include "cuda/sm90/hopper_backend.h"

#include <algorithm>

#include "cuda/combine.h"
#include "cuda/device.h"
#include "cuda/quantize.h"
#include "cuda/route.h"
#include "cuda/sm90/fp8_rows.h"
#include "cuda/sm90/hopper_layer.h"
#include "cuda/sm90/host_operands.h"
#include "cuda/sort.h"

namespace megamoe {
namespace {

using cuda::cuda_check;
using cuda::DeviceArray;
using sm90::Counter;
using sm90::DeviceRows;
using sm90::to_device;
using sm90::to_host;

class HopperBackend : public Backend {
 public:
  std::string_view name() const override { return "hopper"; }
  std::string_view description() const override { return "4-bit weights decoded in wgmma's registers"; }
  std::string_view needs() const override { return "a Hopper GPU (compute capability 9.0)"; }
  bool supported() const override {
    if (cuda::device_count() == 0) return false;
    const cuda::DeviceInfo info = cuda::device_info(cuda::current_device());
    return info.major == 9 && info.minor == 0;
  }
  bool runs(ActivationFormat /*activations*/, WeightFormat weights) const override {
    return weights == WeightFormat::kNvfp4;
  }
  bool keeps_order() const override { return false; }  // the tensor cores' is their own

  std::unique_ptr<PreparedLayer> prepare(const LayerWeights& weights) const override {
    return std::make_unique<sm90::HopperLayer>(weights);
  }

  void route(const float* logits, std::int64_t tokens, const LayerConfig& config, const float* selection_bias,
             const std::int32_t* hash_ids, std::int32_t* ids, float* weights) const override {
    if (tokens == 0) return;
    const std::int64_t experts = config.num_experts, pairs = tokens * config.top_k;
    const DeviceArray<float> device_logits = to_device(logits, tokens * experts), result_weights(pairs);
    const DeviceArray<float> bias = to_device(selection_bias, selection_bias != nullptr ? experts : 0);
    const DeviceArray<std::int32_t> hash = to_device(hash_ids, hash_ids != nullptr ? pairs : 0),
                                    result_ids(pairs);
    cuda_check(cuda::route({.logits = device_logits.data(),
                            .selection_bias = bias.data(),
                            .hash_ids = hash.data(),
                            .tokens = tokens,
                            .experts = static_cast<int>(experts),
                            .top_k = config.top_k,
                            .router = config.router,
                            .ids = result_ids.data(),
                            .weights = result_weights.data()},
                           nullptr),
               "routing");
    to_host(result_ids, ids, pairs);
    to_host(result_weights, weights, pairs);
  }

  void sort(const std::int32_t* ids, const float* weights, const Routing& routing) const override {
    const std::int64_t pairs = routing.tokens * routing.top_k;
    const int experts = static_cast<int>(routing.num_experts);
    const DeviceArray<std::int32_t> device_ids = to_device(ids, pairs), tokens(pairs), slots(pairs),
                                    rows(pairs);
    const DeviceArray<float> device_weights = to_device(weights, pairs);
    const DeviceArray<std::int64_t> offsets(routing.num_experts + 1);
    const cuda::DeviceBuffer workspace(cuda::sort_workspace_bytes(routing.tokens, routing.top_k, experts));
    cuda_check(cuda::sort({.ids = device_ids.data(),
                           .weights = device_weights.data(),
                           .tokens = routing.tokens,
                           .top_k = routing.top_k,
                           .experts = experts,
                           .offsets = offsets.data(),
                           .row_to_token = tokens.data(),
                           .row_to_slot = slots.data(),
                           .slot_to_row = rows.data(),
                           .workspace = workspace.data()},
                          nullptr),
               "sorting");
    to_host(offsets, routing.offsets, routing.num_experts + 1);
    const std::int64_t used = routing.offsets[routing.num_experts];
    to_host(tokens, routing.row_to_token, used);
    to_host(slots, routing.row_to_slot, used);
  }

  std::int64_t quantize(const ActivationRows& x, const std::int32_t* row_map,
                        const ActivationRows& out) const override {
    if (out.rows == 0) return 0;
    const DeviceRows input = DeviceRows::input(x), result = DeviceRows::output(out);
    const DeviceArray<std::int32_t> map = to_device(row_map, row_map != nullptr ? out.rows : 0);
    const Counter saturated;
    cuda_check(cuda::quantize({cuda::ElementType::kBf16, input.rows.values, x.cols}, map.data(), out.rows,
                              out.cols, cuda::TensorScales::kGiven, target(result.rows, saturated), nullptr),
               "quantising");
    result.to_host(out);
    return saturated.read();
  }

  void quantize_fp8(const ActivationRows& x, const ActivationRows& out) const override {
    if (out.rows == 0) return;
    const DeviceRows input = DeviceRows::input(x), result = DeviceRows::output(out);
    cuda_check(sm90::quantize_fp8({.x = input.rows.values,
                                   .row_stride = x.cols,
                                   .tokens = out.rows,
                                   .cols = out.cols,
                                   .most_rows = out.rows,
                                   .codes = result.rows.codes,
                                   .scales = result.rows.scales},
                                  nullptr),
               "quantising");
    result.to_host(out);
  }

  std::int64_t deinterleave_quantize(const ActivationRows& x, const ActivationRows& out) const override {
    if (out.rows == 0) return 0;
    const DeviceRows input = DeviceRows::input(x), result = DeviceRows::output(out);
    const Counter saturated;
    cuda_check(
        cuda::deinterleave_quantize(input.rows.values, x.cols, out.rows, out.cols, cuda::TensorScales::kGiven,
                                    target(result.rows, saturated), nullptr),
        "quantising");
    result.to_host(out);
    return saturated.read();
  }

  void row_amax(const ActivationRows& x, float* amax) const override {
    if (x.rows == 0) return;
    const DeviceRows input = DeviceRows::input(x);
    const DeviceArray<float> result(x.rows);
    cuda_check(cuda::row_amax({cuda::ElementType::kBf16, input.rows.values, x.cols}, x.rows, x.cols,
                              result.data(), nullptr),
               "finding the largest magnitudes");
    to_host(result, amax, x.rows);
  }

  void deinterleave_row_amax(const ActivationRows& x, float* amax) const override {
    if (x.rows == 0) return;
    const DeviceRows input = DeviceRows::input(x);
    const DeviceArray<float> result(x.rows);
    cuda_check(
        cuda::deinterleave_row_amax(input.rows.values, x.cols, x.rows, x.cols / 2, result.data(), nullptr),
        "finding the largest magnitudes");
    to_host(result, amax, x.rows);
  }

  void combine(const float* expert_out, const Routing& routing, const float* weights, const float* shared,
               MatrixView<bf16> y) const override {
    if (y.rows == 0) return;
    const std::int64_t pairs = routing.tokens * routing.top_k, rows = routing.offsets[routing.num_experts];
    std::vector<std::int32_t> slot_to_row(static_cast<std::size_t>(pairs), -1);
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t pair =
          static_cast<std::int64_t>(routing.row_to_token[r]) * routing.top_k + routing.row_to_slot[r];
      slot_to_row[static_cast<std::size_t>(pair)] = static_cast<std::int32_t>(r);
    }
    const DeviceArray<std::int32_t> map(slot_to_row);
    const DeviceArray<float> device_out = to_device(expert_out, rows * y.cols),
                             device_weights = to_device(weights, pairs);
    const DeviceArray<float> device_shared = to_device(shared, shared != nullptr ? y.rows * y.cols : 0);
    const DeviceArray<bf16> result(y.rows * y.cols);
    cuda_check(cuda::combine({.expert_out = device_out.data(),
                              .slot_to_row = map.data(),
                              .weights = device_weights.data(),
                              .shared = device_shared.data(),
                              .y = result.data(),
                              .y_stride = y.cols,
                              .tokens = y.rows,
                              .top_k = routing.top_k,
                              .hidden = y.cols},
                             nullptr),
               "combining");
    const std::vector<bf16> host = result.download();
    for (std::int64_t t = 0; t < y.rows; ++t) std::copy_n(host.data() + t * y.cols, y.cols, y.row(t));
  }

 private:
  static cuda::Nvfp4Out target(const ActivationRows& out, const Counter& saturated) {
    return {.codes = out.codes,
            .scales = out.block_scales,
            .tensor_scales = out.scales,
            .saturated = saturated.data()};
  }
};

}  // namespace

const Backend& hopper_backend() {
  static const HopperBackend backend;
  return backend;
}

}  // namespace megamoe
