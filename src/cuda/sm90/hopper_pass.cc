// hopper_pass.cc: five launches where every tensor scale is static or x's are dynamic by row, six where there
// are so many pairs that sorting takes two; a dynamic scale of h takes one or three more, for it is known
// only when all of h is; one of all of x two more; a shared expert takes three. Few rows take two or, where x
// is quantised, three; and one more, to combine, where there are more pairs than a warp has lanes or a shared
// expert.
#include "cuda/sm90/hopper_pass.h"

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "cuda/combine.h"
#include "cuda/quantize.h"
#include "cuda/shared_expert.h"
#include "cuda/sm90/fp8_rows.h"
#include "cuda/sort.h"

namespace megamoe::sm90 {

using cuda::cuda_check;

struct HopperPass::Buffers : PassBuffers {
  std::int32_t* slot_to_row = nullptr;  // [tokens, top_k]
  std::byte* sort_workspace = nullptr;
  bool few = false;  // both GEMMs run in one launch, which has these
  cuda::RowTile* row_tiles = nullptr;
  std::int32_t* num_row_tiles = nullptr;
  std::uint32_t* counters = nullptr;
  Routing shared_routing = {};      // where there is a shared expert: every token goes to it
  ActivationRows shared_h = {};     // [tokens, its I]
  float* shared_factors = nullptr;  // [tokens], or null where it has no gate
  std::int64_t bytes = 0;           // of all

  std::int64_t most_rows() const { return routing.tokens * routing.top_k; }
  // The rows that a routing really has are known on the GPU alone.
  cuda::RowCount rows() const { return {most_rows(), routing.offsets + routing.num_experts}; }
};

namespace {

cuda::Nvfp4Out quantized(const ActivationRows& rows, unsigned long long* saturated) {
  return {.tensor_scales = rows.scales, .saturated = saturated, .values = rows.values};
}

cuda::ElementRows elements(const bf16* data, std::int64_t row_stride) {
  return {cuda::ElementType::kBf16, data, row_stride};
}

}  // namespace

HopperPass::HopperPass(const HopperLayer& layer, const PassOptions& options)
    : layer_(layer), options_(options), host_(layer.device()) {
  const cuda::DeviceScope device(layer.device());
  x_scales_ = cuda::DeviceArray<float>(options.x_scales);
  h_scales_ = cuda::DeviceArray<float>(options.h_scales);
}

HopperPass::Buffers HopperPass::lay_out(std::int64_t tokens, std::byte* base) const {
  const LayerConfig& config = layer_.config();
  const std::int64_t pairs = checked_mul(tokens, config.top_k);
  if (pairs > std::numeric_limits<std::int32_t>::max()) {
    fail(ErrorCode::kUnsupported, "one pass takes at most {} (token, slot) pairs, got {} tokens of {}",
         std::numeric_limits<std::int32_t>::max(), tokens, config.top_k);
  }
  Arena arena(base, kDeviceAlignment);
  const bool fp8 = options_.activations == ActivationFormat::kFp8;
  Buffers b{take_buffers(arena, config, options_, tokens,
                         {.x_per_row = fp8 || options_.x_per_row(),
                          .shared = layer_.shared() != nullptr,
                          .nvfp4_decoded = true})};
  b.slot_to_row = arena.take<std::int32_t>(pairs);
  b.sort_workspace = arena.take<std::byte>(
      cuda::sort_workspace_bytes(tokens, config.top_k, static_cast<int>(config.num_experts)));
  b.few = options_.h_fused() && layer_.few(options_.activations, b.routing);
  b.row_tiles = arena.take<cuda::RowTile>(std::min<std::int64_t>(pairs, kFewRows));
  b.num_row_tiles = arena.take<std::int32_t>(1);
  b.counters = arena.take<std::uint32_t>(few_counters(kFewRows));
  if (options_.activations == ActivationFormat::kNvfp4) {
    // The tensor cores take BF16: NVFP4 rows are written decoded. The second GEMM's result is not there when
    // x is, half its size, but where both GEMMs run in one launch. Room for many tokens must do for few.
    b.h.values = arena.take<bf16>(pairs, config.intermediate);
    b.x.values = reinterpret_cast<bf16*>(b.expert_out);
    if (options_.h_fused()) {
      auto* few_x = arena.take<bf16>(std::min<std::int64_t>(pairs, kFewRows), config.hidden);
      if (b.few) b.x.values = few_x;
    }
  }
  if (layer_.shared() != nullptr) {
    const std::int64_t cols = layer_.shared()->config().intermediate;
    b.shared_routing = {
        .tokens = tokens, .top_k = 1, .num_experts = 1, .offsets = arena.take<std::int64_t>(2)};
    b.shared_h = {.rows = tokens, .cols = cols, .row_stride = cols, .values = arena.take<bf16>(tokens, cols)};
    if (layer_.shared_gate() != nullptr) b.shared_factors = arena.take<float>(tokens);
  }
  b.bytes = arena.used();
  return b;
}

std::int64_t HopperPass::workspace_bytes(std::int64_t tokens) const { return lay_out(tokens, nullptr).bytes; }

void HopperPass::enqueue(const DeviceCall& call) const {
  const cuda::DeviceScope device(layer_.device());
  const cuda::RelaxedCapture relaxed;
  auto* stream = static_cast<cudaStream_t>(call.stream);
  const Buffers b = lay_out(call.x.rows, call.workspace);
  // Nothing is said of where a second row would be: it may not be where the copy engine could read it.
  ActivationRows x{.rows = call.x.rows,
                   .cols = call.x.cols,
                   .row_stride = call.x.rows > 1 ? call.x.row_stride : call.x.cols};
  x.values = const_cast<bf16*>(call.x.data);  // read, never written
  const bool shared = layer_.shared() != nullptr;
  const bool quantizes = options_.activations != ActivationFormat::kBf16;
  if (shared) prepare_shared(call, b, stream);
  if (quantizes) look_at_x(call, b, stream);
  sort(call, b, stream);
  if (shared) shared_expert(x, b, stream);
  if (quantizes) quantize_x(call, b, stream);
  if (quantizes) x = b.x;
  if (b.few) {
    const bool combines = !shared && b.most_rows() <= kWarpPairs;
    cuda_check(layer_.few_gemms_on_gpu({call.ids, call.weights, b.row_tiles, b.num_row_tiles, b.counters}, x,
                                       options_.x_per_row(), b.routing, options_.l1, b.h, call.saturated,
                                       b.expert_out,
                                       combines ? combine_params(call, b) : cuda::CombineParams{}, stream),
               "starting both GEMMs");
    if (!combines) cuda_check(cuda::combine(combine_params(call, b), stream), "starting to combine");
    return;
  }
  // Offsets are settled for all GEMMs: a launch lies between the sort and each (quantising, or the first
  // GEMM's own gathering). The second GEMM's result is not there yet: the first one's tokens, half its
  // size, lie in its place.
  cuda_check(
      layer_.gemm1_on_gpu(x, options_.x_per_row(), b.routing, options_.l1,
                          options_.h_fused() ? b.h : b.h_bf16, call.saturated, b.expert_out, true, stream),
      "starting the first GEMM");
  if (!options_.h_fused()) quantize_h(call, b, stream);
  cuda_check(layer_.gemm2_on_gpu(b.h, b.routing, b.expert_out, nullptr, true, stream),
             "starting the second GEMM");
  cuda_check(cuda::combine(combine_params(call, b), stream), "starting to combine");
}

void HopperPass::sort(const DeviceCall& call, const Buffers& b, cudaStream_t stream) const {
  cuda::SortParams params;
  params.ids = call.ids;
  params.weights = call.weights;
  params.tokens = b.routing.tokens;
  params.top_k = b.routing.top_k;
  params.experts = static_cast<int>(b.routing.num_experts);
  params.offsets = b.routing.offsets;
  params.row_to_token = b.routing.row_to_token;
  params.row_to_slot = b.routing.row_to_slot;
  params.slot_to_row = b.slot_to_row;
  if (options_.x_per_row()) params.of_expert[0] = x_scales_.data(), params.of_row[0] = b.x.scales;
  if (h_scales_.count() > 0) params.of_expert[1] = h_scales_.data(), params.of_row[1] = b.h.scales;
  params.bad_id = call.bad_pair;
  if (b.few) {
    params.counters = b.counters, params.num_counters = few_counters(b.most_rows());
    if (b.most_rows() > kWarpPairs) {
      params.row_tiles = b.row_tiles, params.num_row_tiles = b.num_row_tiles;
      params.tile_rows = kFewTile.tokens;
    }
  }
  params.workspace = b.sort_workspace;
  cuda_check(cuda::sort(params, stream), "starting to sort");
}

void HopperPass::prepare_shared(const DeviceCall& call, const Buffers& b, cudaStream_t stream) const {
  cuda_check(cuda::prepare_shared_expert({.x = call.x.data,
                                          .row_stride = call.x.row_stride,
                                          .tokens = call.x.rows,
                                          .hidden = call.x.cols,
                                          .gate = layer_.shared_gate(),
                                          .factors = b.shared_factors,
                                          .offsets = b.shared_routing.offsets},
                                         stream),
             "starting to prepare the shared expert");
}

// After the sort, which lies between its offsets and its GEMMs.
void HopperPass::shared_expert(const ActivationRows& x, const Buffers& b, cudaStream_t stream) const {
  const HopperLayer& shared = *layer_.shared();
  cuda_check(shared.gemm1_on_gpu(x, true, b.shared_routing, L1Output::kCompactBf16, b.shared_h, nullptr,
                                 nullptr, true, stream),
             "starting the shared expert's first GEMM");
  cuda_check(shared.gemm2_on_gpu(b.shared_h, b.shared_routing, b.shared_out, nullptr, true, stream),
             "starting the shared expert's second GEMM");
}

// Before the sort, beside which x may be quantised.
void HopperPass::look_at_x(const DeviceCall& call, const Buffers& b, cudaStream_t stream) const {
  if (options_.activations != ActivationFormat::kNvfp4 || options_.x_scale != ScaleSource::kDynamicTensor)
    return;
  const std::int64_t tokens = call.x.rows;
  cuda_check(cuda::row_amax(elements(call.x.data, call.x.row_stride), tokens, call.x.cols, b.amax, stream),
             "starting to look for x's largest magnitude");
  cuda_check(cuda::group_tensor_scales(b.amax, nullptr, 1, tokens, b.x.scales, stream),
             "starting to make x's tensor scale");
}

void HopperPass::quantize_x(const DeviceCall& call, const Buffers& b, cudaStream_t stream) const {
  if (options_.activations == ActivationFormat::kFp8) {
    cuda_check(quantize_fp8({.x = call.x.data,
                             .row_stride = call.x.row_stride,
                             .tokens = call.x.rows,
                             .cols = call.x.cols,
                             .slot_to_row = b.slot_to_row,
                             .copies = b.routing.top_k,
                             .ids = call.ids,
                             .offsets = b.routing.offsets,
                             .experts = static_cast<int>(b.routing.num_experts),
                             .most_rows = b.most_rows(),
                             .codes = b.x.codes,
                             .scales = b.x.scales},
                            stream),
               "starting to quantise x");
    return;
  }
  const cuda::ElementRows x = elements(call.x.data, call.x.row_stride);
  const std::int64_t tokens = call.x.rows, cols = call.x.cols;
  cuda::Nvfp4Out out = quantized(b.x, call.saturated);
  const std::int32_t* row_map = nullptr;
  cuda::RowCount rows = tokens;
  if (!options_.x_per_row() && !b.few) out.slot_to_row = b.slot_to_row, out.copies = b.routing.top_k;
  auto mode = cuda::TensorScales::kGiven;
  switch (options_.x_scale) {
    case ScaleSource::kStatic:
      if (b.few) {  // beside the sort
        mode = cuda::TensorScales::kOfExpert;
        out.pairs = {.ids = call.ids,
                     .weights = call.weights,
                     .top_k = b.routing.top_k,
                     .experts = static_cast<int>(b.routing.num_experts),
                     .tensor_scales = x_scales_.data()};
        rows = b.most_rows();
      } else {  // the sort has put each row's there
        row_map = b.routing.row_to_token;
        rows = b.rows();
      }
      break;
    case ScaleSource::kStaticLayerMax:
      mode = cuda::TensorScales::kConstant;
      out.constant = options_.x_scales[0];
      break;
    case ScaleSource::kDynamicRow: mode = cuda::TensorScales::kDynamicRow; break;
    case ScaleSource::kDynamicTensor: break;  // as look_at_x() left it
  }
  if (b.few) out.rows_done = b.counters + kFewTokensDone;
  cuda_check(cuda::quantize(x, row_map, rows, cols, mode, out, stream), "starting to quantise x");
}

void HopperPass::quantize_h(const DeviceCall& call, const Buffers& b, cudaStream_t stream) const {
  if (options_.activations == ActivationFormat::kFp8) {
    cuda_check(quantize_fp8({.x = b.h_bf16.values,
                             .row_stride = b.h_bf16.cols,
                             .tokens = b.rows(),
                             .cols = b.h.cols,
                             .offsets = b.routing.offsets,
                             .experts = static_cast<int>(b.routing.num_experts),
                             .most_rows = b.most_rows(),
                             .codes = b.h.codes,
                             .scales = b.h.scales},
                            stream),
               "starting to quantise h");
    return;
  }
  const bool interleaved = options_.l1 == L1Output::kInterleavedBf16;
  const std::int64_t cols = b.h.cols;
  const cuda::ElementRows h = elements(b.h_bf16.values, b.h_bf16.cols);
  if (options_.h_scale == ScaleSource::kDynamicTensor) {
    cuda_check(interleaved ? cuda::deinterleave_row_amax(b.h_bf16.values, b.h_bf16.cols, b.rows(), cols,
                                                         b.amax, stream)
                           : cuda::row_amax(h, b.rows(), cols, b.amax, stream),
               "starting to look for h's largest magnitudes");
    cuda_check(cuda::group_tensor_scales(b.amax, b.routing.offsets, static_cast<int>(b.routing.num_experts),
                                         b.most_rows(), b.h.scales, stream),
               "starting to make h's tensor scales");
  }
  const auto mode = options_.h_scale == ScaleSource::kDynamicRow ? cuda::TensorScales::kDynamicRow
                                                                 : cuda::TensorScales::kGiven;
  const cuda::Nvfp4Out out = quantized(b.h, call.saturated);
  cuda_check(interleaved ? cuda::deinterleave_quantize(b.h_bf16.values, b.h_bf16.cols, b.rows(), cols, mode,
                                                       out, stream)
                         : cuda::quantize(h, nullptr, b.rows(), cols, mode, out, stream),
             "starting to quantise h");
}

cuda::CombineParams HopperPass::combine_params(const DeviceCall& call, const Buffers& b) const {
  return {.expert_out = b.expert_out,
          .slot_to_row = b.slot_to_row,
          .weights = call.weights,
          .shared = b.shared_out,
          .shared_factors = b.shared_factors,
          .y = call.y.data,
          .y_stride = call.y.row_stride,
          .tokens = call.y.rows,
          .top_k = b.routing.top_k,
          .hidden = call.y.cols};
}

std::int64_t HopperPass::run_from_host(MatrixView<const bf16> x, MatrixView<const std::int32_t> ids,
                                       MatrixView<const float> weights, MatrixView<bf16> y) const {
  return host_.run(*this, x, ids, weights, y);
}

}  // namespace megamoe::sm90
