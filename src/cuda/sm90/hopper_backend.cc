#include "cuda/sm90/hopper_backend.h"

#include <algorithm>

#include "base/check.h"
#include "cuda/combine.h"
#include "cuda/device.h"
#include "cuda/quantize.h"
#include "cuda/route.h"
#include "cuda/sm90/gemm.h"
#include "cuda/sm90/pack.h"
#include "cuda/sort.h"

namespace megamoe {
namespace {

using cuda::cuda_check;
using cuda::DeviceArray;

template <class T>
DeviceArray<T> to_device(const T* from, std::int64_t count) {
  DeviceArray<T> array(count);
  array.upload(from);
  return array;
}
template <class T>
void to_host(const DeviceArray<T>& from, T* to, std::int64_t count) {
  if (count == 0) return;
  cuda_check(cudaMemcpy(to, from.data(), static_cast<std::size_t>(count) * sizeof(T), cudaMemcpyDeviceToHost),
             "copying from the GPU");
}

[[noreturn]] void no_fp8() {
  fail(ErrorCode::kUnsupported, "the hopper backend runs bf16 and nvfp4 activations, got fp8");
}

// Rows of activations on the GPU, contiguous.
class DeviceRows {
 public:
  // Room for rows of this format; an input is copied.
  DeviceRows(const ActivationRows& host, bool input) {
    rows = host;
    rows.row_stride = host.cols;
    switch (host.format) {
      case ActivationFormat::kBf16:
        values_ = DeviceArray<bf16>(host.rows * host.cols);
        if (input && host.rows > 0) {
          cuda_check(cudaMemcpy2D(values_.data(), row_bytes(), host.values,
                                  static_cast<std::size_t>(host.row_stride) * sizeof(bf16), row_bytes(),
                                  static_cast<std::size_t>(host.rows), cudaMemcpyHostToDevice),
                     "copying to the GPU");
        }
        rows.values = values_.data();
        break;
      case ActivationFormat::kNvfp4:
        codes_ = DeviceArray<std::uint8_t>(host.rows * host.cols / 2);
        block_scales_ = DeviceArray<std::uint8_t>(host.rows * host.cols / 16);
        scales_ = to_device(host.scales, host.rows);  // given, of an output too
        if (input) codes_.upload(host.codes), block_scales_.upload(host.block_scales);
        rows.codes = codes_.data(), rows.block_scales = block_scales_.data(), rows.scales = scales_.data();
        break;
      case ActivationFormat::kFp8: no_fp8();
    }
  }
  void to_host(const ActivationRows& host) const {
    if (host.rows == 0) return;
    if (host.format == ActivationFormat::kBf16) {
      cuda_check(
          cudaMemcpy2D(host.values, static_cast<std::size_t>(host.row_stride) * sizeof(bf16), values_.data(),
                       row_bytes(), row_bytes(), static_cast<std::size_t>(host.rows), cudaMemcpyDeviceToHost),
          "copying from the GPU");
    } else {
      megamoe::to_host(codes_, host.codes, codes_.count());
      megamoe::to_host(block_scales_, host.block_scales, block_scales_.count());
    }
  }

  ActivationRows rows;

 private:
  std::size_t row_bytes() const { return static_cast<std::size_t>(rows.cols) * sizeof(bf16); }

  DeviceArray<bf16> values_;
  DeviceArray<std::uint8_t> codes_, block_scales_;
  DeviceArray<float> scales_;
};

class Counter {
 public:
  Counter() : value_(std::vector<unsigned long long>{0}) {}
  unsigned long long* data() const { return value_.data(); }
  std::int64_t read() const { return static_cast<std::int64_t>(value_.download()[0]); }

 private:
  DeviceArray<unsigned long long> value_;
};

// One role's weights of all experts, packed.
struct PackedWeights {
  DeviceArray<std::uint8_t> packed;
  DeviceArray<float> scales;   // tensor scales [experts] or [experts][2]
  DeviceArray<float> bias[2];  // [experts, rows], empty where there is none
};

using Matrices = std::vector<const WeightMatrix*>;

// `matrices` has one or two (gate, up) for each expert.
PackedWeights pack(sm90::WeightRole role, const Matrices& matrices, int experts) {
  const int per_expert = role == sm90::WeightRole::kGateUp ? 2 : 1;
  const std::int64_t rows = matrices[0]->rows, cols = matrices[0]->cols;
  std::vector<DeviceArray<std::uint8_t>> on_device;
  std::vector<sm90::RawWeights> raw;
  std::vector<float> scales;
  for (int e = 0; e < experts; ++e) {
    raw.push_back({{nullptr, nullptr}, {nullptr, nullptr}, rows, cols});
    for (int m = 0; m < per_expert; ++m) {
      const WeightMatrix& matrix = *matrices[static_cast<std::size_t>(e * per_expert + m)];
      on_device.push_back(to_device(matrix.codes, rows * cols / 2));
      raw.back().codes[m] = on_device.back().data();
      on_device.push_back(to_device(matrix.scales, rows * cols / 16));
      raw.back().scales[m] = on_device.back().data();
      scales.push_back(matrix.tensor_scale);
    }
  }
  PackedWeights result;
  const DeviceArray<sm90::RawWeights> table(raw);
  result.packed = DeviceArray<std::uint8_t>(checked_mul(experts, sm90::packed_bytes(role, rows, cols)));
  cuda_check(sm90::pack_layer(role, table.data(), experts, rows, cols, result.packed.data(), nullptr),
             "packing weights");
  cuda_check(cudaDeviceSynchronize(), "packing weights");
  result.scales = DeviceArray<float>(scales);
  return result;
}

DeviceArray<float> pack_bias(const std::vector<ExpertWeights>& experts, const float* ExpertWeights::*bias,
                             std::int64_t rows) {
  if (experts[0].*bias == nullptr) return {};
  std::vector<float> all;
  for (const ExpertWeights& expert : experts) all.insert(all.end(), expert.*bias, expert.*bias + rows);
  return DeviceArray<float>(all);
}

class HopperLayer : public PreparedLayer {
 public:
  explicit HopperLayer(const LayerWeights& weights) : config_(weights.config) {
    if (config_.num_experts > cuda::kMaxSortedExperts) {
      fail(ErrorCode::kUnsupported, "the hopper backend takes at most {} experts, got {}",
           cuda::kMaxSortedExperts, config_.num_experts);
    }
    if (weights.shared.present) {
      fail(ErrorCode::kUnsupported, "the hopper backend has no shared experts yet, but {} has one",
           weights.name);
    }
    Matrices first, second;
    for (std::size_t e = 0; e < weights.experts.size(); ++e) {
      const ExpertWeights& expert = weights.experts[e];
      for (const WeightMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
        if (matrix->rows > 0 && matrix->format != WeightFormat::kNvfp4) {
          fail(ErrorCode::kUnsupported, "the hopper backend runs nvfp4 weights, but expert {} of {} is {}", e,
               weights.name, to_string(matrix->format));
        }
      }
      if (config_.activation.gated()) first.push_back(&expert.gate);
      first.push_back(&expert.up);
      second.push_back(&expert.down);
    }
    const int experts = static_cast<int>(config_.num_experts);
    first_ = pack(config_.activation.gated() ? sm90::WeightRole::kGateUp : sm90::WeightRole::kPlain, first,
                  experts);
    second_ = pack(sm90::WeightRole::kPlain, second, experts);
    first_.bias[0] = pack_bias(weights.experts, &ExpertWeights::gate_bias, config_.intermediate);
    first_.bias[1] = pack_bias(weights.experts, &ExpertWeights::up_bias, config_.intermediate);
    second_.bias[0] = pack_bias(weights.experts, &ExpertWeights::down_bias, config_.hidden);
  }

  const LayerConfig& config() const override { return config_; }

  std::int64_t gemm1(const ActivationRows& x, bool x_is_gathered, const Routing& routing, L1Output mode,
                     const ActivationRows& out) const override {
    if (mode == L1Output::kFp8) no_fp8();
    if (mode == L1Output::kInterleavedBf16 && !config_.activation.gated()) {
      fail(ErrorCode::kUnsupported, "interleaved output needs a gated activation, got {}",
           to_string(config_.activation.kind));
    }
    const std::int64_t rows = routing.offsets[routing.num_experts];
    if (rows == 0) return 0;
    const DeviceRows tokens(x, true), result(out, false);
    const DeviceArray<std::int64_t> offsets = to_device(routing.offsets, routing.num_experts + 1);
    const DeviceArray<std::int32_t> gather = to_device(routing.row_to_token, rows);
    const Counter saturated;
    sm90::Gemm1 call;
    call.in = input(first_, config_.intermediate, config_.hidden, offsets, rows, tokens.rows);
    call.in.gather = x_is_gathered ? nullptr : gather.data();
    call.activation = config_.activation;
    call.weight_scales = first_.scales.data();
    call.gate_bias = first_.bias[0].data();
    call.up_bias = first_.bias[1].data();
    call.mode = mode;
    call.out = result.rows;
    call.saturated = saturated.data();
    cuda_check(sm90::gemm1(call, nullptr), "running the first GEMM");
    cuda_check(cudaDeviceSynchronize(), "running the first GEMM");
    result.to_host(out);
    return saturated.read();
  }

  void gemm2(const ActivationRows& h, const Routing& routing, float* out) const override {
    const std::int64_t rows = routing.offsets[routing.num_experts];
    if (rows == 0) return;
    const DeviceRows tokens(h, true);
    const DeviceArray<std::int64_t> offsets = to_device(routing.offsets, routing.num_experts + 1);
    const DeviceArray<float> result(rows * config_.hidden);
    sm90::Gemm2 call;
    call.in = input(second_, config_.hidden, config_.intermediate, offsets, rows, tokens.rows);
    call.weight_scales = second_.scales.data();
    call.bias = second_.bias[0].data();
    call.out = result.data();
    cuda_check(sm90::gemm2(call, nullptr), "running the second GEMM");
    cuda_check(cudaDeviceSynchronize(), "running the second GEMM");
    to_host(result, out, result.count());
  }

  void shared_expert(const ActivationRows&, float*) const override { MEGAMOE_CHECK(false); }

 private:
  sm90::GroupedInput input(const PackedWeights& weights, std::int64_t weight_rows, std::int64_t cols,
                           const DeviceArray<std::int64_t>& offsets, std::int64_t rows,
                           const ActivationRows& tokens) const {
    sm90::GroupedInput in;
    in.weights = weights.packed.data();
    in.experts = static_cast<int>(config_.num_experts);
    in.weight_rows = weight_rows;
    in.cols = cols;
    in.offsets = offsets.data();
    in.max_rows = rows;
    in.tokens = tokens;
    return in;
  }

  LayerConfig config_;
  PackedWeights first_, second_;
};

class HopperBackend : public Backend {
 public:
  std::string_view name() const override { return "hopper"; }
  std::string_view description() const override { return "4-bit weights decoded in wgmma's registers"; }
  std::string_view needs() const override { return "a Hopper GPU (compute capability 9.0)"; }
  bool supported() const override {
    if (cuda::device_count() == 0) return false;
    const cuda::DeviceInfo info = cuda::device_info(0);
    return info.major == 9 && info.minor == 0;
  }

  std::unique_ptr<PreparedLayer> prepare(const LayerWeights& weights) const override {
    return std::make_unique<HopperLayer>(weights);
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
    const DeviceRows input(x, true), result(out, false);
    const DeviceArray<std::int32_t> map = to_device(row_map, row_map != nullptr ? out.rows : 0);
    const Counter saturated;
    cuda_check(cuda::quantize({cuda::ElementType::kBf16, input.rows.values, x.cols}, map.data(), out.rows,
                              out.cols, cuda::TensorScales::kGiven, target(result.rows, saturated), nullptr),
               "quantising");
    result.to_host(out);
    return saturated.read();
  }

  void quantize_fp8(const ActivationRows&, const ActivationRows&) const override { no_fp8(); }

  std::int64_t deinterleave_quantize(const ActivationRows& x, const ActivationRows& out) const override {
    if (out.rows == 0) return 0;
    const DeviceRows input(x, true), result(out, false);
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
    const DeviceRows input(x, true);
    const DeviceArray<float> result(x.rows);
    cuda_check(cuda::row_amax({cuda::ElementType::kBf16, input.rows.values, x.cols}, x.rows, x.cols,
                              result.data(), nullptr),
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
