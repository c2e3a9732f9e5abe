#include "cuda/sm90/hopper_layer.h"

#include <numeric>
#include <vector>

#include "base/check.h"
#include "cuda/shared_expert.h"
#include "cuda/sm90/hopper_pass.h"
#include "cuda/sm90/host_operands.h"
#include "cuda/sort.h"

namespace megamoe::sm90 {

using cuda::cuda_check;

namespace {

// A routing's arrays that the GEMMs read, copied to the GPU.
struct DeviceRouting {
  explicit DeviceRouting(const Routing& host)
      : offsets(to_device(host.offsets, host.num_experts + 1)),
        row_to_token(to_device(host.row_to_token, host.offsets[host.num_experts])),
        routing(host) {
    routing.offsets = offsets.data();
    routing.row_to_token = row_to_token.data();
    routing.row_to_slot = nullptr;
  }

  cuda::DeviceArray<std::int64_t> offsets;
  cuda::DeviceArray<std::int32_t> row_to_token;
  Routing routing;
};

std::int64_t most_rows(const Routing& routing) { return routing.tokens * routing.top_k; }

LayerWeights shared_layer(const LayerWeights& of) {
  LayerWeights layer;
  layer.config = {.hidden = of.config.hidden,
                  .intermediate = of.shared.weights.up.rows,
                  .num_experts = 1,
                  .top_k = 1,
                  .activation = of.shared.activation,
                  .router = {}};
  layer.name = of.name + ", shared experts";
  layer.experts = {of.shared.weights};
  layer.storage = of.storage;
  return layer;
}

}  // namespace

HopperLayer::HopperLayer(const LayerWeights& weights) : weights_(weights), config_(weights.config) {
  if (config_.num_experts > cuda::kMaxSortedExperts) {
    fail(ErrorCode::kUnsupported, "the hopper backend takes at most {} experts, got {}",
         cuda::kMaxSortedExperts, config_.num_experts);
  }
  for (std::size_t e = 0; e < weights.experts.size(); ++e) {
    const ExpertWeights& expert = weights.experts[e];
    for (const WeightMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
      if (matrix->rows > 0 && matrix->format != WeightFormat::kNvfp4) {
        fail(ErrorCode::kUnsupported, "the hopper backend runs nvfp4 weights, but expert {} of {} is {}", e,
             weights.name, to_string(matrix->format));
      }
    }
  }
  gate_bias_ = load_bias(weights.experts, &ExpertWeights::gate_bias, config_.intermediate);
  up_bias_ = load_bias(weights.experts, &ExpertWeights::up_bias, config_.intermediate);
  down_bias_ = load_bias(weights.experts, &ExpertWeights::down_bias, config_.hidden);
  if (!weights.shared.present) return;
  shared_ = std::make_unique<HopperLayer>(shared_layer(weights));
  if (weights.shared.gate != nullptr) shared_gate_ = to_device(weights.shared.gate, config_.hidden);
}

void HopperLayer::prepare(ActivationFormat activations) const {
  if (shared_) shared_->prepare(ActivationFormat::kBf16);
  Packed& to = packed(activations);
  std::call_once(to.once, [&] {
    const cuda::DeviceScope device(device_);
    const OperandType type = operand_type(activations);
    const bool gated = config_.activation.gated();
    std::vector<const WeightMatrix*> first, second;
    for (const ExpertWeights& expert : weights_.experts) {
      if (gated) first.push_back(&expert.gate);
      first.push_back(&expert.up);
      second.push_back(&expert.down);
    }
    to.first = load_weights(type, gated ? WeightRole::kGateUp : WeightRole::kPlain, first);
    to.second = load_weights(type, WeightRole::kPlain, second);
  });
}

TileChoice HopperLayer::tile(LayerGemm gemm, ActivationFormat activations, std::int64_t max_rows) const {
  const TileChoice* forced = ForcedTiles::of(gemm);
  return forced != nullptr ? *forced
                           : tile_times_.choose(GemmProblem::of(config_, activations, gemm, max_rows));
}

GroupedInput HopperLayer::input(LayerGemm gemm, const ActivationRows& tokens, const Routing& routing,
                                void* workspace) const {
  const bool first = gemm == LayerGemm::kFirst;
  const Packed& both = packed(tokens.format);
  GroupedInput in;
  in.weights = (first ? both.first : both.second).packed.data();
  in.experts = static_cast<int>(config_.num_experts);
  in.weight_rows = first ? config_.intermediate : config_.hidden;
  in.cols = first ? config_.hidden : config_.intermediate;
  in.offsets = routing.offsets;
  in.max_rows = most_rows(routing);
  in.tokens = tokens;
  in.workspace = workspace;
  in.tile = tile(gemm, tokens.format, in.max_rows);
  return in;
}

Gemm1 HopperLayer::first_gemm(const ActivationRows& x, bool x_is_gathered, const Routing& routing,
                              L1Output mode, const ActivationRows& out, unsigned long long* saturated,
                              void* workspace, bool in_pass) const {
  Gemm1 call;
  call.in = input(LayerGemm::kFirst, x, routing, workspace);
  call.in.offsets_settled = call.in.decoded = in_pass;
  call.in.gather = x_is_gathered || x.format == ActivationFormat::kFp8 ? nullptr : routing.row_to_token;
  call.activation = config_.activation;
  call.weight_scales = packed(x.format).first.scales.data();
  call.gate_bias = gate_bias_.data();
  call.up_bias = up_bias_.data();
  call.mode = mode;
  call.decode_out = in_pass;
  call.out = out;
  call.saturated = saturated;
  return call;
}

Gemm2 HopperLayer::second_gemm(const ActivationRows& h, const Routing& routing, float* out, void* workspace,
                               bool in_pass) const {
  Gemm2 call;
  call.in = input(LayerGemm::kSecond, h, routing, workspace);
  call.in.offsets_settled = call.in.decoded = in_pass;
  call.weight_scales = packed(h.format).second.scales.data();
  call.bias = down_bias_.data();
  call.out = out;
  return call;
}

cudaError_t HopperLayer::gemm1_on_gpu(const ActivationRows& x, bool x_is_gathered, const Routing& routing,
                                      L1Output mode, const ActivationRows& out, unsigned long long* saturated,
                                      void* workspace, bool in_pass, cudaStream_t stream) const {
  return sm90::gemm1(first_gemm(x, x_is_gathered, routing, mode, out, saturated, workspace, in_pass), stream);
}

cudaError_t HopperLayer::gemm2_on_gpu(const ActivationRows& h, const Routing& routing, float* out,
                                      void* workspace, bool in_pass, cudaStream_t stream) const {
  return sm90::gemm2(second_gemm(h, routing, out, workspace, in_pass), stream);
}

bool HopperLayer::few(ActivationFormat activations, const Routing& routing) const {
  const std::int64_t rows = most_rows(routing);
  const auto is_few = [&](LayerGemm gemm) { return tile(gemm, activations, rows) == kFewTile; };
  return operand_type(activations) == OperandType::kBf16 && rows <= kFewRows && is_few(LayerGemm::kFirst) &&
         is_few(LayerGemm::kSecond);
}

cudaError_t HopperLayer::few_gemms_on_gpu(const Pairs& pairs, const ActivationRows& x, bool x_by_pair,
                                          const Routing& routing, L1Output mode, const ActivationRows& h,
                                          unsigned long long* saturated, float* out,
                                          const cuda::CombineParams& combine, cudaStream_t stream) const {
  // Scales of pairs are in expert order.
  return sm90::few_gemms({.first = first_gemm(x, x_by_pair, routing, mode, h, saturated, nullptr, true),
                          .by_pair = x_by_pair,
                          .second = second_gemm(h, routing, out, nullptr, true),
                          .ids = pairs.ids,
                          .routing_weights = pairs.weights,
                          .top_k = routing.top_k,
                          .row_tiles = pairs.row_tiles,
                          .num_row_tiles = pairs.num_row_tiles,
                          .row_to_token = routing.row_to_token,
                          .row_to_slot = routing.row_to_slot,
                          .counters = pairs.counters,
                          .combine = combine},
                         stream);
}

std::int64_t HopperLayer::gemm1_workspace_bytes(ActivationFormat format, bool x_is_gathered,
                                                std::int64_t max_rows) const {
  return gemm_workspace_bytes(format, !x_is_gathered, max_rows, config_.hidden);
}

std::int64_t HopperLayer::gemm2_workspace_bytes(ActivationFormat format, std::int64_t max_rows) const {
  return gemm_workspace_bytes(format, false, max_rows, config_.intermediate);
}

std::int64_t HopperLayer::gemm1(const ActivationRows& x, bool x_is_gathered, const Routing& routing,
                                L1Output mode, const ActivationRows& out) const {
  if (mode == L1Output::kInterleavedBf16 && !config_.activation.gated()) {
    fail(ErrorCode::kUnsupported, "interleaved output needs a gated activation, got {}",
         to_string(config_.activation.kind));
  }
  if (routing.offsets[routing.num_experts] == 0) return 0;
  const cuda::DeviceScope device(device_);
  prepare(x.format);
  const DeviceRows tokens = DeviceRows::input(x, &routing, x_is_gathered);
  const DeviceRows result = DeviceRows::output(out, &routing);
  const DeviceRouting on_gpu(routing);
  const cuda::DeviceBuffer workspace(gemm1_workspace_bytes(x.format, x_is_gathered, most_rows(routing)));
  const Counter saturated;
  cuda_check(gemm1_on_gpu(tokens.rows, x_is_gathered, on_gpu.routing, mode, result.rows, saturated.data(),
                          workspace.data(), false, nullptr),
             "running the first GEMM");
  cuda_check(cudaDeviceSynchronize(), "running the first GEMM");
  result.to_host(out);
  return saturated.read();
}

void HopperLayer::gemm2(const ActivationRows& h, const Routing& routing, float* out) const {
  const std::int64_t rows = routing.offsets[routing.num_experts];
  if (rows == 0) return;
  const cuda::DeviceScope device(device_);
  prepare(h.format);
  const DeviceRows tokens = DeviceRows::input(h, &routing);
  const DeviceRouting on_gpu(routing);
  const cuda::DeviceBuffer workspace(gemm2_workspace_bytes(h.format, most_rows(routing)));
  const cuda::DeviceArray<float> result(rows * config_.hidden);
  cuda_check(gemm2_on_gpu(tokens.rows, on_gpu.routing, result.data(), workspace.data(), false, nullptr),
             "running the second GEMM");
  cuda_check(cudaDeviceSynchronize(), "running the second GEMM");
  to_host(result, out, result.count());
}

void HopperLayer::shared_expert(const ActivationRows& x, float* out) const {
  if (x.rows == 0) return;
  const cuda::DeviceScope device(device_);
  std::vector<std::int64_t> offsets = {0, x.rows};
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(x.rows));
  std::iota(tokens.begin(), tokens.end(), 0);
  const Routing all{.tokens = x.rows,
                    .top_k = 1,
                    .num_experts = 1,
                    .offsets = offsets.data(),
                    .row_to_token = tokens.data()};
  const std::int64_t intermediate = shared_->config().intermediate;
  std::vector<bf16> values(static_cast<std::size_t>(x.rows * intermediate));
  const ActivationRows h{
      .rows = x.rows, .cols = intermediate, .row_stride = intermediate, .values = values.data()};
  shared_->gemm1(x, true, all, L1Output::kCompactBf16, h);
  shared_->gemm2(h, all, out);
  if (shared_gate() == nullptr) return;
  const DeviceRows on_gpu = DeviceRows::input(x);
  const cuda::DeviceArray<float> factors(x.rows);
  cuda_check(cuda::prepare_shared_expert({.x = on_gpu.rows.values,
                                          .row_stride = on_gpu.rows.row_stride,
                                          .tokens = x.rows,
                                          .hidden = x.cols,
                                          .gate = shared_gate(),
                                          .factors = factors.data()},
                                         nullptr),
             "preparing the shared expert");
  const std::vector<float> factor = factors.download();
  for (std::int64_t i = 0; i < x.rows * x.cols; ++i) out[i] *= factor[static_cast<std::size_t>(i / x.cols)];
}

std::unique_ptr<DevicePass> HopperLayer::device_pass(const PassOptions& options) const {
  prepare(options.activations);
  return std::make_unique<HopperPass>(*this, options);
}

}  // namespace megamoe::sm90
