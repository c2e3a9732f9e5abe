#include "megamoe/moe_layer.h"

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <utility>

#include "backend/pass.h"
#include "base/aligned_buffer.h"
#include "base/check.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/model_index.h"
#include "engine/backends.h"
#include "layer/load_layer.h"
#include "layer/router_logits.h"
#include "numerics/fp8_tile.h"
#include "numerics/nvfp4.h"

namespace megamoe {
namespace {

bool is_static(ScaleSource source) {
  return source == ScaleSource::kStatic || source == ScaleSource::kStaticLayerMax;
}

// Makes the choice that was left open for one of the two activation scales, and refuses an impossible one.
ScaleSource choose_scale(std::optional<ScaleSource> wanted, const LayerWeights& weights,
                         float ExpertWeights::*scale, std::string_view what) {
  const bool all = std::all_of(weights.experts.begin(), weights.experts.end(),
                               [&](const ExpertWeights& expert) { return expert.*scale > 0.0f; });
  if (!wanted) return all ? ScaleSource::kStatic : ScaleSource::kDynamicRow;
  if (is_static(*wanted) && !all) {
    fail(ErrorCode::kInvalidArgument,
         "{} has no static scales for {}; expected an input scale for every expert (see `megamoe "
         "calibrate`), or ask "
         "for a dynamic scale",
         weights.name, what);
  }
  return *wanted;
}

template <class T>
void check_shape(const char* name, const MatrixView<T>& view, std::int64_t rows, std::int64_t cols) {
  if (rows < 0) fail(ErrorCode::kInvalidArgument, "{} must have 0 rows or more, got {}", name, rows);
  if (view.rows != rows || view.cols != cols) {
    fail(ErrorCode::kInvalidArgument, "{} must have shape [{}, {}], got [{}, {}]", name, rows, cols,
         view.rows, view.cols);
  }
  if (view.row_stride < view.cols && view.rows > 1) {
    fail(ErrorCode::kInvalidArgument, "{} has rows of {} elements, but a row stride of {}", name, view.cols,
         view.row_stride);
  }
  if (view.data == nullptr && rows > 0 && cols > 0) {
    fail(ErrorCode::kInvalidArgument, "{} must point to [{}, {}] elements, got a null pointer", name, rows,
         cols);
  }
}

// Every option of a pass but the static scales.
PassOptions pass_options(const MoeLayerOptions& options) {
  PassOptions pass;
  pass.activations = options.activations;
  pass.x_scale = options.x_scale.value_or(pass.x_scale);
  pass.h_scale = options.h_scale.value_or(pass.h_scale);
  switch (options.l1) {
    case MoeLayerOptions::L1::kCompact: break;
    case MoeLayerOptions::L1::kInterleaved: pass.l1 = L1Output::kInterleavedBf16; break;
    case MoeLayerOptions::L1::kFused:
      if (options.activations == ActivationFormat::kFp8) pass.l1 = L1Output::kFp8;
      // A dynamic scale of h is known only when all of h is.
      if (options.activations == ActivationFormat::kNvfp4 && is_static(pass.h_scale)) {
        pass.l1 = L1Output::kNvfp4;
      }
  }
  return pass;
}

// The static scales of all experts, or none where they are dynamic.
std::vector<float> static_scales(const LayerWeights& weights, ScaleSource source,
                                 float ExpertWeights::*scale) {
  std::vector<float> scales;
  if (!is_static(source)) return scales;
  for (const ExpertWeights& expert : weights.experts) scales.push_back(expert.*scale);
  if (source == ScaleSource::kStaticLayerMax) {
    std::fill(scales.begin(), scales.end(), *std::max_element(scales.begin(), scales.end()));
  }
  return scales;
}

// A matrix that a backend does not multiply by its activations.
struct Unfit {
  std::string expert;  // whose it is
  ActivationFormat activations;
  WeightFormat weights;
};
std::optional<Unfit> first_unfit(const Backend& backend, const LayerWeights& weights,
                                 ActivationFormat activations) {
  const auto unfit = [&](const ExpertWeights& expert, ActivationFormat format) -> const WeightMatrix* {
    for (const WeightMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
      if (matrix->rows > 0 && !backend.runs(format, matrix->format)) return matrix;
    }
    return nullptr;
  };
  for (std::size_t e = 0; e < weights.experts.size(); ++e) {
    if (const WeightMatrix* matrix = unfit(weights.experts[e], activations))
      return Unfit{fmt::format("expert {}", e), activations, matrix->format};
  }
  if (!weights.shared.present) return {};
  if (const WeightMatrix* matrix = unfit(weights.shared.weights, ActivationFormat::kBf16))
    return Unfit{"the shared expert", ActivationFormat::kBf16, matrix->format};
  return {};
}

void check_runs(const Backend& backend, const LayerWeights& weights, ActivationFormat activations) {
  const std::optional<Unfit> unfit = first_unfit(backend, weights, activations);
  if (!unfit) return;
  fail(ErrorCode::kUnsupported,
       "backend '{}' does not run {} activations with {} weights, as {} of {} has; use {}", backend.name(),
       to_string(unfit->activations), to_string(unfit->weights), unfit->expert, weights.name,
       backend.runs(ActivationFormat::kBf16, unfit->weights) ? "bf16 activations" : "another backend");
}

// Where a pass over host memory keeps everything.
struct Workspace : PassBuffers {
  std::int32_t* ids = nullptr;  // [tokens, top_k], checked
  float* weights = nullptr;     // [tokens, top_k]
  std::int64_t bytes = 0;       // of the whole block
};

// Lays the buffers out from `base` (64-byte aligned); with a null base only `bytes` is meaningful.
Workspace lay_out(const LayerWeights& weights, const PassOptions& options, std::int64_t tokens,
                  std::byte* base) {
  Arena arena(base, kCacheLine);
  Workspace w{take_buffers(arena, weights.config, options, tokens,
                           {.x_per_row = options.x_per_row(), .shared = weights.shared.present})};
  w.ids = arena.take<std::int32_t>(tokens, weights.config.top_k);
  w.weights = arena.take<float>(tokens, weights.config.top_k);
  w.bytes = arena.used();
  return w;
}

}  // namespace

struct MoeLayer::State {
  LayerWeights weights;
  MoeLayerOptions options;
  const Backend* backend = nullptr;
  std::unique_ptr<PreparedLayer> prepared;
  PassOptions pass;
  std::unique_ptr<DevicePass> device_pass;  // on a GPU alone
  std::function<void(const Stage&)> on_stage;

  void check_operands(MatrixView<const bf16> x, MatrixView<const std::int32_t> ids,
                      MatrixView<const float> routing_weights, MatrixView<bf16> y) const;
  void check_ids(MatrixView<const std::int32_t> ids) const;
  std::int64_t quantize_x(const ActivationRows& x, Workspace& w) const;
  std::int64_t make_h(const ActivationRows& x, Workspace& w) const;
  std::int64_t run_stages(MatrixView<const bf16> x, MatrixView<const std::int32_t> ids,
                          MatrixView<const float> routing_weights, MatrixView<bf16> y, Workspace& w) const;
  const DevicePass& gpu_pass(std::string_view what) const;

  // The shape is no vector before somebody listens: forward() must not allocate.
  void stage(const char* name, DType dtype, std::initializer_list<std::int64_t> shape,
             const void* data) const {
    if (on_stage) on_stage({name, dtype, shape, data});
  }
  void stage_rows(std::string_view name, const ActivationRows& rows) const;
};

void MoeLayer::State::check_operands(MatrixView<const bf16> x, MatrixView<const std::int32_t> ids,
                                     MatrixView<const float> routing_weights, MatrixView<bf16> y) const {
  const LayerConfig& config = weights.config;
  check_shape("x", x, x.rows, config.hidden);
  check_shape("ids", ids, x.rows, config.top_k);
  check_shape("weights", routing_weights, x.rows, config.top_k);
  check_shape("y", y, x.rows, config.hidden);
  if (x.rows > std::numeric_limits<std::int32_t>::max()) {
    fail(ErrorCode::kUnsupported, "one pass takes at most {} tokens, got {}",
         std::numeric_limits<std::int32_t>::max(), x.rows);
  }
}

void MoeLayer::State::check_ids(MatrixView<const std::int32_t> ids) const {
  for (std::int64_t t = 0; t < ids.rows; ++t) {
    for (std::int64_t slot = 0; slot < ids.cols; ++slot) {
      const std::int32_t id = ids.row(t)[slot];
      if (id >= -1 && id < weights.config.num_experts) continue;
      fail(ErrorCode::kInvalidArgument,
           "expert id {} of token {}, slot {} is out of range; expected -1 or 0 to {}", id, t, slot,
           weights.config.num_experts - 1);
    }
  }
}

const DevicePass& MoeLayer::State::gpu_pass(std::string_view what) const {
  if (device_pass == nullptr) {
    fail(ErrorCode::kUnsupported, "{} needs a backend that runs on a GPU, but {} is on '{}'", what,
         weights.name, backend->name());
  }
  return *device_pass;
}

// Fills w.x from the BF16 tokens; returns the saturated blocks.
std::int64_t MoeLayer::State::quantize_x(const ActivationRows& x, Workspace& w) const {
  const Routing& routing = w.routing;
  if (pass.activations == ActivationFormat::kFp8) {
    backend->quantize_fp8(x, w.x);
    return 0;
  }
  if (pass.x_per_row()) {
    w.x.rows = routing.offsets[routing.num_experts];
    for (std::int64_t e = 0; e < routing.num_experts; ++e) {
      std::fill(w.x.scales + routing.offsets[e], w.x.scales + routing.offsets[e + 1],
                pass.x_scales[static_cast<std::size_t>(e)]);
    }
    return backend->quantize(x, routing.row_to_token, w.x);
  }
  if (pass.x_scale == ScaleSource::kStaticLayerMax) {
    std::fill(w.x.scales, w.x.scales + x.rows, pass.x_scales[0]);
  } else {
    backend->row_amax(x, w.amax);
    const bool per_row = pass.x_scale == ScaleSource::kDynamicRow;
    const float largest = x.rows > 0 ? *std::max_element(w.amax, w.amax + x.rows) : 0.0f;
    for (std::int64_t t = 0; t < x.rows; ++t)
      w.x.scales[t] = nvfp4_tensor_scale(per_row ? w.amax[t] : largest);
  }
  return backend->quantize(x, nullptr, w.x);
}

// The first GEMM and whatever quantises its result into w.h; returns the saturated blocks.
std::int64_t MoeLayer::State::make_h(const ActivationRows& x, Workspace& w) const {
  const Routing& routing = w.routing;
  const std::int64_t rows = routing.offsets[routing.num_experts];
  const bool nvfp4 = pass.activations == ActivationFormat::kNvfp4;
  const bool interleaved = pass.l1 == L1Output::kInterleavedBf16;
  w.h.rows = w.h_bf16.rows = rows;
  if (!pass.h_scales.empty()) {
    for (std::int64_t e = 0; e < routing.num_experts; ++e) {
      std::fill(w.h.scales + routing.offsets[e], w.h.scales + routing.offsets[e + 1],
                pass.h_scales[static_cast<std::size_t>(e)]);
    }
  }
  const ActivationRows& first = pass.h_fused() ? w.h : w.h_bf16;
  const std::int64_t saturated = prepared->gemm1(x, pass.x_per_row(), routing, pass.l1, first);
  if (pass.h_fused()) return saturated;
  stage_rows("h_bf16", w.h_bf16);
  if (!nvfp4) {
    backend->quantize_fp8(w.h_bf16, w.h);
    return 0;
  }
  if (pass.h_scales.empty()) {
    if (interleaved) {
      backend->deinterleave_row_amax(w.h_bf16, w.amax);
    } else {
      backend->row_amax(w.h_bf16, w.amax);
    }
    for (std::int64_t e = 0; e < routing.num_experts; ++e) {
      const std::int64_t begin = routing.offsets[e], end = routing.offsets[e + 1];
      if (begin == end) continue;
      const float largest = *std::max_element(w.amax + begin, w.amax + end);
      const bool per_row = pass.h_scale == ScaleSource::kDynamicRow;
      for (std::int64_t r = begin; r < end; ++r)
        w.h.scales[r] = nvfp4_tensor_scale(per_row ? w.amax[r] : largest);
    }
  }
  return interleaved ? backend->deinterleave_quantize(w.h_bf16, w.h)
                     : backend->quantize(w.h_bf16, nullptr, w.h);
}

void MoeLayer::State::stage_rows(std::string_view stage_name, const ActivationRows& rows) const {
  if (!on_stage) return;
  const std::string name(stage_name);
  switch (rows.format) {
    case ActivationFormat::kBf16:
      stage(name.c_str(), DType::kBF16, {rows.rows, rows.cols}, rows.values);
      break;
    case ActivationFormat::kFp8:
      stage((name + "_codes").c_str(), DType::kE4M3, {rows.rows, rows.cols}, rows.codes);
      stage((name + "_scales").c_str(), DType::kF32, {rows.rows, (rows.cols + kFp8Tile - 1) / kFp8Tile},
            rows.scales);
      break;
    case ActivationFormat::kNvfp4:
      stage((name + "_codes").c_str(), DType::kU8, {rows.rows, rows.cols / 2}, rows.codes);
      stage((name + "_block_scales").c_str(), DType::kE4M3, {rows.rows, rows.cols / kNvfp4Block},
            rows.block_scales);
      stage((name + "_tensor_scales").c_str(), DType::kF32, {rows.rows}, rows.scales);
      break;
  }
}

MoeLayer MoeLayer::load(const std::filesystem::path& checkpoint, int layer, const MoeLayerOptions& options) {
  const ModelIndex model = index_model(Checkpoint::open(checkpoint), {options.fused_layout});
  return MoeLayer(load_layer(model, find_layer(model, layer)), options);
}

MoeLayer::MoeLayer(LayerWeights weights, const MoeLayerOptions& options) : state_(std::make_unique<State>()) {
  validate(weights);
  State& s = *state_;
  s.weights = std::move(weights);
  s.options = options;
  if ((options.x_scale || options.h_scale) && options.activations != ActivationFormat::kNvfp4) {
    fail(ErrorCode::kInvalidArgument, "a scale of x or h goes with nvfp4 activations, got {} activations",
         to_string(options.activations));
  }
  s.backend = &find_backend(options.backend, [&](const Backend& backend) {
    return !first_unfit(backend, s.weights, options.activations);
  });
  s.options.backend = s.backend->name();
  check_runs(*s.backend, s.weights, options.activations);
  if (options.l1 == MoeLayerOptions::L1::kInterleaved &&
      (options.activations != ActivationFormat::kNvfp4 || !s.weights.config.activation.gated())) {
    fail(ErrorCode::kUnsupported,
         "the interleaved output of the first GEMM goes with nvfp4 activations and a gated activation, got "
         "{} and {}",
         to_string(options.activations), to_string(s.weights.config.activation.kind));
  }
  if (options.activations == ActivationFormat::kNvfp4) {
    s.options.x_scale = choose_scale(options.x_scale, s.weights, &ExpertWeights::input_scale, "x");
    s.options.h_scale = choose_scale(options.h_scale, s.weights, &ExpertWeights::down_input_scale, "h");
  }
  s.pass = pass_options(s.options);
  if (options.activations == ActivationFormat::kNvfp4) {
    s.pass.x_scales = static_scales(s.weights, s.pass.x_scale, &ExpertWeights::input_scale);
    s.pass.h_scales = static_scales(s.weights, s.pass.h_scale, &ExpertWeights::down_input_scale);
  }
  s.prepared = s.backend->prepare(s.weights);
  s.device_pass = s.prepared->device_pass(s.pass);
}

MoeLayer::~MoeLayer() = default;
MoeLayer::MoeLayer(MoeLayer&&) noexcept = default;
MoeLayer& MoeLayer::operator=(MoeLayer&&) noexcept = default;

const LayerConfig& MoeLayer::config() const { return state_->weights.config; }
const MoeLayerOptions& MoeLayer::options() const { return state_->options; }
std::string_view MoeLayer::backend() const { return state_->backend->name(); }
const std::vector<std::string>& MoeLayer::notes() const { return state_->weights.notes; }
void MoeLayer::on_stage(std::function<void(const Stage&)> callback) {
  state_->on_stage = std::move(callback);
}

void MoeLayer::router_logits(MatrixView<const bf16> x, MatrixView<float> logits) const {
  check_shape("x", x, x.rows, config().hidden);
  check_shape("logits", logits, x.rows, config().num_experts);
  megamoe::router_logits(state_->weights, x, logits);
}

void MoeLayer::route(MatrixView<const float> logits, MatrixView<std::int32_t> ids, MatrixView<float> weights,
                     std::span<const std::int32_t> token_ids) const {
  const State& s = *state_;
  const std::int64_t tokens = logits.rows, experts = config().num_experts, top_k = config().top_k;
  check_shape("logits", logits, tokens, experts);
  check_shape("ids", ids, tokens, top_k);
  check_shape("weights", weights, tokens, top_k);
  const std::int64_t pairs = checked_mul(tokens, top_k);
  AlignedBuffer<float> packed_logits(checked_mul(tokens, experts)), packed_weights(pairs);
  AlignedBuffer<std::int32_t> packed_ids(pairs), hash_ids(config().router.hash_routed ? pairs : 0);
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::copy_n(logits.row(t), experts, packed_logits.data() + t * experts);
  }
  if (config().router.hash_routed) {
    if (static_cast<std::int64_t>(token_ids.size()) != tokens) {
      fail(ErrorCode::kInvalidArgument, "{} is routed by token id; expected {} token ids, got {}",
           s.weights.name, tokens, token_ids.size());
    }
    for (std::int64_t t = 0; t < tokens; ++t) {
      const std::int32_t id = token_ids[static_cast<std::size_t>(t)];
      if (id < 0 || id >= s.weights.hash_rows) {
        fail(ErrorCode::kInvalidArgument, "token id {} at position {} is out of range; expected 0 to {}", id,
             t, s.weights.hash_rows - 1);
      }
      std::copy_n(s.weights.hash_table + id * top_k, top_k, hash_ids.data() + t * top_k);
    }
  }
  s.backend->route(packed_logits.data(), tokens, config(), s.weights.selection_bias,
                   config().router.hash_routed ? hash_ids.data() : nullptr, packed_ids.data(),
                   packed_weights.data());
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::copy_n(packed_ids.data() + t * top_k, top_k, ids.row(t));
    std::copy_n(packed_weights.data() + t * top_k, top_k, weights.row(t));
  }
}

std::int64_t MoeLayer::workspace_bytes(std::int64_t tokens) const {
  if (tokens < 0) fail(ErrorCode::kInvalidArgument, "the number of tokens must be 0 or more, got {}", tokens);
  return lay_out(state_->weights, state_->pass, tokens, nullptr).bytes;
}

std::int64_t MoeLayer::State::run_stages(MatrixView<const bf16> x, MatrixView<const std::int32_t> ids,
                                         MatrixView<const float> routing_weights, MatrixView<bf16> y,
                                         Workspace& w) const {
  const LayerConfig& config = weights.config;
  for (std::int64_t t = 0; t < x.rows; ++t) {  // made contiguous
    std::copy_n(ids.row(t), config.top_k, w.ids + t * config.top_k);
    std::copy_n(routing_weights.row(t), config.top_k, w.weights + t * config.top_k);
  }
  backend->sort(w.ids, w.weights, w.routing);
  const ActivationRows tokens{.format = ActivationFormat::kBf16,
                              .rows = x.rows,
                              .cols = x.cols,
                              .row_stride = x.row_stride,
                              .values = const_cast<bf16*>(x.data)};  // operations read x, never write it
  const bool quantized = pass.activations != ActivationFormat::kBf16;
  std::int64_t saturated = quantized ? quantize_x(tokens, w) : 0;
  const std::int64_t rows = w.routing.offsets[config.num_experts];
  stage("expert_ids", DType::kI32, {x.rows, config.top_k}, w.ids);
  stage("expert_weights", DType::kF32, {x.rows, config.top_k}, w.weights);
  stage("offsets", DType::kI64, {config.num_experts + 1}, w.routing.offsets);
  stage("row_to_token", DType::kI32, {rows}, w.routing.row_to_token);
  stage("row_to_slot", DType::kI32, {rows}, w.routing.row_to_slot);
  if (quantized) stage_rows("x", w.x);

  saturated += make_h(quantized ? w.x : tokens, w);
  stage_rows("h", w.h);
  prepared->gemm2(w.h, w.routing, w.expert_out);
  stage("expert_out", DType::kF32, {rows, x.cols}, w.expert_out);
  if (w.shared_out != nullptr) {
    prepared->shared_expert(tokens, w.shared_out);
    stage("shared_out", DType::kF32, {x.rows, x.cols}, w.shared_out);
  }
  backend->combine(w.expert_out, w.routing, w.weights, w.shared_out, y);
  if (y.row_stride == y.cols) stage("y", DType::kBF16, {y.rows, y.cols}, y.data);
  return saturated;
}

std::int64_t MoeLayer::forward(MatrixView<const bf16> x, MatrixView<const std::int32_t> ids,
                               MatrixView<const float> weights, MatrixView<bf16> y,
                               std::span<std::byte> workspace) const {
  const State& s = *state_;
  s.check_operands(x, ids, weights, y);
  Workspace w = lay_out(s.weights, s.pass, x.rows, workspace.data());
  if (static_cast<std::int64_t>(workspace.size()) < w.bytes) {
    fail(ErrorCode::kInvalidArgument, "the workspace for {} tokens must have {} bytes, got {}", x.rows,
         w.bytes, workspace.size());
  }
  if (reinterpret_cast<std::uintptr_t>(workspace.data()) % kCacheLine != 0) {
    fail(ErrorCode::kInvalidArgument, "the workspace must start at a multiple of {} bytes", kCacheLine);
  }
  s.check_ids(ids);
  if (x.rows == 0) return 0;
  if (s.device_pass != nullptr && !s.on_stage) return s.device_pass->run_from_host(x, ids, weights, y);
  return s.run_stages(x, ids, weights, y, w);
}

std::int64_t MoeLayer::forward(MatrixView<const bf16> x, MatrixView<const std::int32_t> ids,
                               MatrixView<const float> weights, MatrixView<bf16> y) const {
  const AlignedBuffer<std::byte> workspace(workspace_bytes(x.rows));
  return forward(x, ids, weights, y, workspace);
}

bool MoeLayer::on_gpu() const { return state_->device_pass != nullptr; }

std::int64_t MoeLayer::stream_workspace_bytes(std::int64_t tokens) const {
  if (tokens < 0) fail(ErrorCode::kInvalidArgument, "the number of tokens must be 0 or more, got {}", tokens);
  return state_->gpu_pass("a workspace for a stream").workspace_bytes(tokens);
}

void MoeLayer::forward_on_stream(MatrixView<const bf16> x, MatrixView<const std::int32_t> ids,
                                 MatrixView<const float> weights, MatrixView<bf16> y,
                                 std::span<std::byte> workspace, void* stream, StreamStatus* status) const {
  const State& s = *state_;
  const DevicePass& pass = s.gpu_pass("a pass on a stream");
  s.check_operands(x, ids, weights, y);
  const auto check_contiguous = [&](const char* name, const auto& view) {
    if (view.rows <= 1 || view.row_stride == view.cols) return;
    fail(ErrorCode::kInvalidArgument, "on a stream {} must be contiguous, with a row stride of {}, got {}",
         name, view.cols, view.row_stride);
  };
  check_contiguous("ids", ids);
  check_contiguous("weights", weights);
  const auto misaligned = [](const void* pointer, std::int64_t bytes) {
    return reinterpret_cast<std::uintptr_t>(pointer) % static_cast<std::uintptr_t>(bytes) != 0;
  };
  constexpr std::int64_t kRowBytes = 16, kElement = sizeof(bf16);
  if (misaligned(x.data, kRowBytes) || (x.rows > 1 && x.row_stride * kElement % kRowBytes != 0)) {
    fail(ErrorCode::kInvalidArgument,
         "on a stream rows of x must start at multiples of {} bytes, got address {} and rows {} bytes apart",
         kRowBytes, fmt::ptr(x.data), x.row_stride * kElement);
  }
  const std::int64_t bytes = pass.workspace_bytes(x.rows);
  if (static_cast<std::int64_t>(workspace.size()) < bytes) {
    fail(ErrorCode::kInvalidArgument, "the workspace for {} tokens on a stream must have {} bytes, got {}",
         x.rows, bytes, workspace.size());
  }
  if (misaligned(workspace.data(), kDeviceAlignment)) {
    fail(ErrorCode::kInvalidArgument,
         "a workspace on a GPU must start at a multiple of {} bytes, got address {}", kDeviceAlignment,
         fmt::ptr(workspace.data()));
  }
  if (x.rows == 0) return;
  pass.enqueue({.x = x,
                .ids = ids.data,
                .weights = weights.data,
                .y = y,
                .workspace = workspace.data(),
                .stream = stream,
                .saturated = status != nullptr ? &status->saturated : nullptr,
                .bad_pair = status != nullptr ? &status->bad_id : nullptr});
}

}  // namespace megamoe
