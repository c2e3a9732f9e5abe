// layer.cc: a layer that is loaded once and run many times, from arrays in host memory or on a GPU.
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>

#include "bindings/arrays.h"
#include "bindings/interpreter_lock.h"
#include "bindings/module.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/model_index.h"
#include "layer/load_layer.h"
#include "megamoe/moe_layer.h"
#include "megamoe/quantize.h"
#include "numerics/bf16.h"
#include "numerics/fp16.h"
#ifdef MEGAMOE_CUDA
#include "cuda/device.h"
#endif

namespace megamoe::python {
namespace {

// The types of tokens and results; a wider one would be rounded twice.
constexpr DTypes kTokens = {DType::kBF16, DType::kF32, DType::kF16};

// What a layer is made with, as Python says it.
struct Options {
  std::string backend, activations, x_scale, h_scale, l1;
  std::optional<int> device;

  MoeLayerOptions layer_options() const {
    MoeLayerOptions options;
    options.backend = backend;
    options.activations = parse_activation_format(activations);
    if (!x_scale.empty()) options.x_scale = parse_scale_source(x_scale);
    if (!h_scale.empty()) options.h_scale = parse_scale_source(h_scale);
    using L1 = MoeLayerOptions::L1;
    if (l1 == "compact") {
      options.l1 = L1::kCompact;
    } else if (l1 == "interleaved") {
      options.l1 = L1::kInterleaved;
    } else if (l1 != "fused") {
      fail(ErrorCode::kInvalidArgument, "l1 must be fused, compact or interleaved, got {}", l1);
    }
    return options;
  }
};

// Destroyed with the interpreter's lock held, whoever lets go of it last.
template <class T>
std::shared_ptr<const void> keep_python(T&& object) {
  using Kept = std::decay_t<T>;
  return {new Kept(std::forward<T>(object)), [](const void* p) {
            const Locked locked;
            delete static_cast<const Kept*>(p);
          }};
}

WeightMatrix array_weights(Array&& array, LayerWeights& layer) {
  WeightMatrix out{.rows = array.rows(), .cols = array.cols()};
  const auto take = [&]<class T>(WeightFormat format, const T* WeightMatrix::*data) {
    auto matrix = std::make_unique<HostMatrix<T>>(std::move(array));
    out.format = format;
    if (matrix->view().row_stride == matrix->view().cols) {
      out.*data = matrix->view().data;
      layer.storage.push_back(keep_python(std::move(matrix)));
    } else {
      auto packed = std::make_shared<std::vector<T>>(matrix->packed());
      out.*data = packed->data();
      layer.storage.push_back(std::move(packed));
    }
  };
  if (array.dtype() == DType::kBF16) {
    take(WeightFormat::kBf16, &WeightMatrix::b16);
  } else {
    take(WeightFormat::kF32, &WeightMatrix::f32);
  }
  return out;
}

// An Nvfp4Tensor or an array [rows, cols] of floats. The layer keeps it alive and does not copy it, unless it
// has to be converted.
WeightMatrix weights_of(nb::object object, const char* name, LayerWeights& layer) {
  if (!nb::isinstance<Nvfp4Tensor>(object)) return array_weights(Array(object, name, 2, kFloats), layer);
  const auto& tensor = nb::cast<const Nvfp4Tensor&>(object);
  if (tensor.tensor_scales.size() != 1) {
    fail(ErrorCode::kInvalidArgument, "{} must have one tensor scale, got one for each row", name);
  }
  layer.storage.push_back(keep_python(std::move(object)));
  return {.format = WeightFormat::kNvfp4,
          .rows = tensor.rows,
          .cols = tensor.cols,
          .codes = tensor.codes.data(),
          .scales = tensor.scales.data(),
          .tensor_scale = tensor.tensor_scales[0]};
}

Activation parse_activation(const std::string& name) {
  constexpr Activation kAll[] = {Activation::kSwiGlu, Activation::kSwiGluClamped, Activation::kGptOss,
                                 Activation::kRelu2};
  for (const Activation kind : kAll) {
    if (to_string(kind) == name) return kind;
  }
  fail(ErrorCode::kInvalidArgument, "activation must be swiglu, swiglu-clamped, gpt-oss or relu2, got {}",
       name);
}

// What an expert has beside its matrices, by the expert: None or an array [E, n] (scales: [E]).
struct PerExpert {
  nb::object values;
  const char* name;
  const float* ExpertWeights::*pointer;
};

void add_biases(const PerExpert& biases, std::int64_t cols, LayerWeights& layer) {
  if (biases.values.is_none()) return;
  const HostMatrix<float> matrix(biases.values, biases.name, 2, kFloats);
  const auto experts = static_cast<std::int64_t>(layer.experts.size());
  if (matrix.view().rows != experts || matrix.view().cols != cols) {
    fail(ErrorCode::kInvalidArgument, "{} must have shape [{}, {}], got [{}, {}]", biases.name, experts, cols,
         matrix.view().rows, matrix.view().cols);
  }
  auto packed = std::make_shared<std::vector<float>>(matrix.packed());
  for (std::int64_t e = 0; e < experts; ++e) {
    layer.experts[static_cast<std::size_t>(e)].*biases.pointer = packed->data() + e * cols;
  }
  layer.storage.push_back(std::move(packed));
}

void add_input_scales(nb::handle values, const char* name, float ExpertWeights::*scale, LayerWeights& layer) {
  if (values.is_none()) return;
  const HostMatrix<float> vector(values, name, 1, kFloats);
  if (vector.view().cols != static_cast<std::int64_t>(layer.experts.size())) {
    fail(ErrorCode::kInvalidArgument, "{} must hold {} numbers, got {}", name, layer.experts.size(),
         vector.view().cols);
  }
  const std::vector<float> packed = vector.packed();
  for (std::size_t e = 0; e < packed.size(); ++e) layer.experts[e].*scale = packed[e];
}

class Layer {
 public:
  Layer(LayerWeights&& weights, const Options& options) {
    const Unlocked unlocked;
#ifdef MEGAMOE_CUDA
    std::optional<cuda::DeviceScope> scope;
    if (options.device) scope.emplace(*options.device);
    layer_.emplace(std::move(weights), options.layer_options());
    if (layer_->on_gpu()) {
      gpu_ = cuda::current_device();
      status_ = cuda::DeviceArray<StreamStatus>(std::vector<StreamStatus>(1));
    }
#else
    if (options.device) {
      fail(ErrorCode::kUnsupported, "this build has no GPU backend, so device must be None, got {}",
           *options.device);
    }
    layer_.emplace(std::move(weights), options.layer_options());
#endif
  }

  const MoeLayer& get() const { return *layer_; }
  int gpu() const { return gpu_; }

  std::int64_t forward(nb::handle x, nb::handle ids, nb::handle weights, nb::handle out) const {
    const HostMatrix<bf16> tokens(x, "x", 2, kTokens);
    const HostMatrix<std::int32_t> experts(ids, "topk_ids", 2, kIntegers);
    const HostMatrix<float> factors(weights, "topk_weights", 2, kFloats);
    const std::int64_t rows = tokens.view().rows, cols = tokens.view().cols;
    const OutputMatrix y(out, "out", rows, cols, kTokens);
    if (y.gpu() >= 0)
      fail(ErrorCode::kInvalidArgument, "out must be on the CPU, as x is, got GPU {}", y.gpu());
    const Unlocked unlocked;
    if (y.dtype() == DType::kBF16) {
      return get().forward(tokens.view(), experts.view(), factors.view(), y.view<bf16>());
    }
    std::vector<bf16> rounded(static_cast<std::size_t>(checked_mul(rows, cols)));
    const MatrixView<bf16> view(rounded.data(), rows, cols);
    const std::int64_t saturated = get().forward(tokens.view(), experts.view(), factors.view(), view);
    if (y.dtype() == DType::kF32) {
      widen(view, y.view<float>(), [](bf16 v) { return to_float(v); });
    } else {
      widen(view, y.view<fp16>(), [](bf16 v) { return to_fp16(to_float(v)); });
    }
    return saturated;
  }

  void forward_on_stream(nb::handle x, nb::handle ids, nb::handle weights, nb::handle out,
                         nb::handle workspace, std::uintptr_t stream) {
    const Array tokens(x, "x", 2, {DType::kBF16});
    const Array experts(ids, "topk_ids", 2, {DType::kI32});
    const Array factors(weights, "topk_weights", 2, {DType::kF32});
    const OutputMatrix y(out, "out", tokens.rows(), tokens.cols(), {DType::kBF16});
    const OutputMatrix memory(workspace, "workspace", 1, get().stream_workspace_bytes(tokens.rows()),
                              {DType::kU8});
    for (const Array* array : {&tokens, &experts, &factors}) {
      check_gpu(array->name(), array->gpu());
      if (!array->is_matrix()) {
        fail(ErrorCode::kInvalidArgument, "{} must have rows of adjacent elements, got strides [{}, {}]",
             array->name(), array->row_stride(), array->col_stride());
      }
    }
    check_gpu("out", y.gpu());
    check_gpu("workspace", memory.gpu());
    const auto matrix = [](const Array& array, auto* data) {
      return MatrixView(data, array.rows(), array.cols(), array.row_stride());
    };
    const MatrixView<std::uint8_t> bytes = memory.view<std::uint8_t>();
    const Unlocked unlocked;
    get().forward_on_stream(matrix(tokens, reinterpret_cast<const bf16*>(tokens.data())),
                            matrix(experts, reinterpret_cast<const std::int32_t*>(experts.data())),
                            matrix(factors, reinterpret_cast<const float*>(factors.data())), y.view<bf16>(),
                            {reinterpret_cast<std::byte*>(bytes.data), static_cast<std::size_t>(bytes.cols)},
                            reinterpret_cast<void*>(stream), status());
  }

  // What passes on streams have counted: saturated blocks, and the first pair whose id was out of range.
  std::tuple<unsigned long long, std::optional<unsigned long long>> stream_status() const {
    StreamStatus counted;
#ifdef MEGAMOE_CUDA
    const Unlocked unlocked;
    if (gpu_ >= 0) {
      const cuda::DeviceScope scope(gpu_);
      // Passes may be on streams that no copy waits for by itself.
      cuda::cuda_check(cudaDeviceSynchronize(), "waiting for passes on streams");
      counted = status_.download().at(0);
    }
#endif
    if (counted.bad_id == ~0ull) return {counted.saturated, std::nullopt};
    return {counted.saturated, counted.bad_id};
  }

 private:
  template <class T, class Convert>
  static void widen(MatrixView<const bf16> from, MatrixView<T> to, const Convert& convert) {
    for (std::int64_t r = 0; r < from.rows; ++r)
      std::transform(from.row(r), from.row(r) + from.cols, to.row(r), convert);
  }

  void check_gpu(const char* name, int gpu) const {
    if (gpu == gpu_) return;
    fail(ErrorCode::kInvalidArgument, "{} must be on GPU {}, where the layer is, got {}", name, gpu_,
         gpu < 0 ? std::string("an array on the CPU") : fmt::format("GPU {}", gpu));
  }

  StreamStatus* status() const {
#ifdef MEGAMOE_CUDA
    return status_.data();
#else
    return nullptr;
#endif
  }

  std::optional<MoeLayer> layer_;
  int gpu_ = -1;
#ifdef MEGAMOE_CUDA
  cuda::DeviceArray<StreamStatus> status_;
#endif
};

Layer* from_checkpoint(const std::filesystem::path& checkpoint, int number, bool routed_only,
                       const std::string& fused_layout, const Options& options) {
  LayerWeights weights;
  {
    const Unlocked unlocked;
    const ModelIndex model = index_model(Checkpoint::open(checkpoint), {fused_layout});
    weights = load_layer(model, find_layer(model, number));
  }
  if (routed_only) weights.shared = {};
  return new Layer(std::move(weights), options);
}

Layer* from_weights(nb::object gate, nb::sequence up, nb::sequence down, int top_k,
                    const ActivationConfig& activation, nb::object gate_bias, nb::object up_bias,
                    nb::object down_bias, nb::object input_scales, nb::object down_input_scales,
                    const std::string& name, const Options& options) {
  LayerWeights weights;
  weights.name = name;
  const std::size_t experts = nb::len(down);
  for (const auto& [matrices, what] : {std::pair<nb::handle, const char*>(gate, "gate"), {up, "up"}}) {
    if (matrices.is_none() || nb::len(matrices) == experts) continue;
    fail(ErrorCode::kInvalidArgument, "{} must hold {} experts, as down does, got {}", what, experts,
         nb::len(matrices));
  }
  for (std::size_t e = 0; e < experts; ++e) {
    ExpertWeights& expert = weights.experts.emplace_back();
    if (!gate.is_none()) expert.gate = weights_of(gate[e], "gate", weights);
    expert.up = weights_of(up[e], "up", weights);
    expert.down = weights_of(down[e], "down", weights);
  }
  LayerConfig& config = weights.config;
  config.num_experts = static_cast<std::int64_t>(experts);
  config.top_k = top_k;
  config.activation = activation;
  if (experts > 0) {
    config.hidden = weights.experts[0].down.rows;
    config.intermediate = weights.experts[0].down.cols;
  }
  add_biases({gate_bias, "gate_bias", &ExpertWeights::gate_bias}, config.intermediate, weights);
  add_biases({up_bias, "up_bias", &ExpertWeights::up_bias}, config.intermediate, weights);
  add_biases({down_bias, "down_bias", &ExpertWeights::down_bias}, config.hidden, weights);
  add_input_scales(input_scales, "input_scales", &ExpertWeights::input_scale, weights);
  add_input_scales(down_input_scales, "down_input_scales", &ExpertWeights::down_input_scale, weights);
  return new Layer(std::move(weights), options);
}

nb::tuple route(const Layer& layer, nb::handle logits, nb::handle token_ids) {
  const HostMatrix<float> scores(logits, "logits", 2, kFloats);
  std::vector<std::int32_t> tokens;
  if (!token_ids.is_none()) tokens = HostMatrix<std::int32_t>(token_ids, "token_ids", 1, kIntegers).packed();
  const std::int64_t rows = scores.view().rows;
  const int top_k = layer.get().config().top_k;
  std::vector<std::int32_t> ids(static_cast<std::size_t>(checked_mul(rows, top_k)));
  std::vector<float> weights(ids.size());
  {
    const Unlocked unlocked;
    layer.get().route(scores.view(), {ids.data(), rows, top_k}, {weights.data(), rows, top_k}, tokens);
  }
  return nb::make_tuple(to_numpy(std::move(ids), {rows, top_k}), to_numpy(std::move(weights), {rows, top_k}));
}

nb::ndarray<nb::numpy, float> router_logits(const Layer& layer, nb::handle x) {
  const HostMatrix<bf16> tokens(x, "x", 2, kTokens);
  const std::int64_t rows = tokens.view().rows, experts = layer.get().config().num_experts;
  std::vector<float> logits(static_cast<std::size_t>(checked_mul(rows, experts)));
  {
    const Unlocked unlocked;
    layer.get().router_logits(tokens.view(), {logits.data(), rows, experts});
  }
  return to_numpy(std::move(logits), {rows, experts});
}

std::string scale_name(const std::optional<ScaleSource>& source) {
  return source ? std::string(to_string(*source)) : std::string();
}

nb::list backends() {
  nb::list out;
  for (const BackendInfo& backend : list_backends()) {
    nb::dict row;
    row["name"] = backend.name;
    row["description"] = backend.description;
    row["needs"] = backend.needs;
    row["supported"] = backend.supported;
    out.append(row);
  }
  return out;
}

}  // namespace

nb::dict config_dict(const LayerConfig& config) {
  nb::dict out;
  out["hidden"] = config.hidden;
  out["intermediate"] = config.intermediate;
  out["num_experts"] = config.num_experts;
  out["top_k"] = config.top_k;
  out["activation"] = std::string(to_string(config.activation.kind));
  out["limit"] = config.activation.limit;
  out["alpha"] = config.activation.alpha;
  out["scoring"] = std::string(to_string(config.router.scoring));
  out["renormalize"] = config.router.renormalize;
  out["scaling_factor"] = config.router.scaling_factor;
  out["num_groups"] = config.router.num_groups;
  out["topk_groups"] = config.router.topk_groups;
  out["hash_routed"] = config.router.hash_routed;
  return out;
}

void bind_layer(nb::module_& m) {
  nb::class_<Options>(m, "LayerOptions", "How a layer is run.");
  m.def(
      "layer_options",
      [](const std::string& backend, const std::string& activations, const std::string& x_scale,
         const std::string& h_scale, const std::string& l1,
         std::optional<int> device) { return Options{backend, activations, x_scale, h_scale, l1, device}; },
      nb::arg("backend"), nb::arg("activations"), nb::arg("x_scale"), nb::arg("h_scale"), nb::arg("l1"),
      nb::arg("device").none());
  nb::class_<ActivationConfig>(m, "Activation", "h = act(gate, up).");
  m.def(
      "activation",
      [](const std::string& activation, float limit, float alpha) {
        return ActivationConfig{parse_activation(activation), limit, alpha};
      },
      nb::arg("activation"), nb::arg("limit"), nb::arg("alpha"));

  nb::class_<Layer>(m, "Layer", "What megamoe.MoELayer wraps.")
      .def_static("from_checkpoint", &from_checkpoint, nb::arg("checkpoint"), nb::arg("layer"),
                  nb::arg("routed_only"), nb::arg("fused_layout"), nb::arg("options"))
      .def_static("from_weights", &from_weights, nb::arg("gate").none(), nb::arg("up"), nb::arg("down"),
                  nb::arg("top_k"), nb::arg("activation"), nb::arg("gate_bias").none(),
                  nb::arg("up_bias").none(), nb::arg("down_bias").none(), nb::arg("input_scales").none(),
                  nb::arg("down_input_scales").none(), nb::arg("name"), nb::arg("options"))
      .def("forward", &Layer::forward, nb::arg("x").none(), nb::arg("topk_ids").none(),
           nb::arg("topk_weights").none(), nb::arg("out").none(),
           "Runs the layer on host memory into `out`; returns how many activation blocks saturated.")
      .def("forward_on_stream", &Layer::forward_on_stream, nb::arg("x"), nb::arg("topk_ids"),
           nb::arg("topk_weights"), nb::arg("out"), nb::arg("workspace"), nb::arg("stream"),
           "Puts a pass over GPU memory on `stream`, a cudaStream_t as a number.")
      .def(
          "stream_workspace_bytes",
          [](const Layer& layer, std::int64_t tokens) { return layer.get().stream_workspace_bytes(tokens); },
          nb::arg("tokens"), "Bytes of the workspace of forward_on_stream, uint8 [1, bytes].")
      .def("stream_status", &Layer::stream_status,
           "(saturated blocks, token * top_k + slot of a bad id or None).")
      .def("route", &route, nb::arg("logits").none(), nb::arg("token_ids").none())
      .def("router_logits", &router_logits, nb::arg("x").none())
      .def_prop_ro("backend", [](const Layer& layer) { return std::string(layer.get().backend()); })
      .def_prop_ro("gpu", &Layer::gpu, "The number of the layer's GPU; -1: it runs on the CPU.")
      .def_prop_ro(
          "activations",
          [](const Layer& layer) { return std::string(to_string(layer.get().options().activations)); })
      .def_prop_ro("x_scale", [](const Layer& layer) { return scale_name(layer.get().options().x_scale); })
      .def_prop_ro("h_scale", [](const Layer& layer) { return scale_name(layer.get().options().h_scale); })
      .def_prop_ro("config", [](const Layer& layer) { return config_dict(layer.get().config()); })
      .def_prop_ro("notes", [](const Layer& layer) { return layer.get().notes(); });

  m.def("backends", &backends, nb::sig("def backends() -> list[dict[str, str | bool]]"),
        "The backends of this build, best first: dicts of name, description, needs and supported.");
}

}  // namespace megamoe::python
