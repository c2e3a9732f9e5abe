// checkpoint.cc: what is in a checkpoint, and making another one of it.
#include "checkpoint/checkpoint.h"

#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>

#include "bindings/arrays.h"
#include "bindings/interpreter_lock.h"
#include "bindings/module.h"
#include "checkpoint/expert_matrix.h"
#include "checkpoint/model_index.h"
#include "engine/convert.h"
#include "engine/inspect.h"
#include "engine/quantize_checkpoint.h"
#include "engine/verify.h"
#include "layer/load_layer.h"
#include "megamoe/quantize.h"

namespace megamoe::python {
namespace {

using Model = std::shared_ptr<const ModelIndex>;

// Each of these keeps the model, and with it the files, alive.
struct Opened {
  Model model;
};
struct LayerEntry {
  Model model;
  const MoeLayerInfo* info;
};
struct ExpertEntry {
  LayerEntry layer;
  std::int64_t number;  // -1: the shared expert

  const std::optional<ExpertMatrix>& matrix(Projection projection) const {
    const MoeLayerInfo& info = *layer.info;
    return (number < 0
                ? info.shared
                : info.experts[static_cast<std::size_t>(number)])[static_cast<std::size_t>(projection)];
  }
};
struct MatrixEntry {
  Model model;
  const ExpertMatrix* matrix;
  std::string name;
};

Opened open_checkpoint(const std::filesystem::path& path, const std::string& fused_layout) {
  const Unlocked unlocked;
  return {std::make_shared<const ModelIndex>(index_model(Checkpoint::open(path), {fused_layout}))};
}

std::optional<MatrixEntry> matrix_entry(const ExpertEntry& expert, Projection projection) {
  const std::optional<ExpertMatrix>& matrix = expert.matrix(projection);
  if (!matrix) return std::nullopt;
  return MatrixEntry{expert.layer.model, &*matrix,
                     matrix_name(*expert.layer.info, expert.number, projection)};
}

ExpertEntry expert_entry(const LayerEntry& layer, std::int64_t number) {
  if (number < 0 || number >= layer.info->num_experts) {
    throw nb::index_error(
        fmt::format("{} has experts 0 to {}, got {}", layer.info->prefix, layer.info->num_experts - 1, number)
            .c_str());
  }
  return {layer, number};
}

std::optional<float> tensor_scale(const MatrixEntry& entry) {
  if (entry.matrix->encoding != Encoding::kNvfp4) return std::nullopt;
  const Unlocked unlocked;
  if (const auto view = view_nvfp4(*entry.matrix)) return view->tensor_scale;
  return read_nvfp4(*entry.matrix).tensor_scale;
}

std::optional<float> input_scale(const MatrixEntry& entry) {
  const float scale = read_input_scale(*entry.matrix);
  if (scale == 0.0f) return std::nullopt;
  return scale;
}

nb::ndarray<nb::numpy, float> matrix_values(const MatrixEntry& entry) {
  std::vector<float> values;
  {
    const Unlocked unlocked;
    values = read_f32(*entry.matrix);
  }
  return to_numpy(std::move(values), {entry.matrix->rows, entry.matrix->cols});
}

Nvfp4Tensor matrix_nvfp4(const MatrixEntry& entry) {
  const Encoding encoding = entry.matrix->encoding;
  if (encoding != Encoding::kNvfp4 && encoding != Encoding::kMxfp4) {
    fail(ErrorCode::kInvalidArgument,
         "{} must be nvfp4 or mxfp4 to be taken as NVFP4, got {}; quantize() makes it so", entry.name,
         to_string(encoding));
  }
  const Unlocked unlocked;
  Nvfp4Data data = read_nvfp4(*entry.matrix);
  return {.rows = entry.matrix->rows,
          .cols = entry.matrix->cols,
          .codes = std::move(data.codes),
          .scales = std::move(data.scales),
          .tensor_scales = {data.tensor_scale}};
}

nb::object vector_or_none(std::vector<float>&& values) {
  if (values.empty()) return nb::none();
  const auto size = static_cast<std::int64_t>(values.size());
  return nb::cast(to_numpy(std::move(values), {size}));
}

nb::object router_weight(const LayerEntry& layer) {
  const TensorRef* tensor = layer.info->router_weight;
  if (tensor == nullptr) return nb::none();
  return nb::cast(to_numpy(read_f32(*tensor), {tensor->info->shape.at(0), tensor->info->shape.at(1)}));
}

nb::list findings(const Opened& opened, bool values) {
  Inspection inspection;
  {
    const Unlocked unlocked;
    inspection = inspect(*opened.model, {.values = values, .layer = {}});
  }
  nb::list out;
  for (const Finding& finding : inspection.findings) {
    nb::dict row;
    row["severity"] = std::string(to_string(finding.severity));
    row["layer"] = finding.layer < 0 ? nb::object(nb::none()) : nb::object(nb::int_(finding.layer));
    row["text"] = finding.text;
    out.append(row);
  }
  return out;
}

// The value of `all` whose name is `name`.
template <class T>
T parse_choice(const char* what, const std::string& name, std::initializer_list<T> all) {
  std::string names;
  for (const T value : all) {
    if (to_string(value) == name) return value;
    names += (names.empty() ? "" : ", ") + std::string(to_string(value));
  }
  fail(ErrorCode::kInvalidArgument, "{} must be one of {}, got {}", what, names, name);
}

Family parse_family(const char* what, const std::string& name) {
  return parse_choice(what, name, {Family::kModelOpt, Family::kCompressedTensors});
}

// Calls progress(done_bytes, total_bytes, item), an object of Python's, and lets what it raises through.
ProgressFn progress_function(const nb::object& progress) {
  if (progress.is_none()) return {};
  if (PyCallable_Check(progress.ptr()) == 0) {
    throw nb::type_error(
        fmt::format("progress must be callable, got {}", nb::inst_name(progress).c_str()).c_str());
  }
  return [&progress](const Progress& state) {
    const Locked locked;
    never_unwound([&] {
      progress(state.done_bytes, state.total_bytes, nb::str(state.item.data(), state.item.size()));
    });
  };
}

nb::dict report_dict(const RewriteReport& report) {
  nb::dict out;
  out["quantized_linears"] = report.quantized_linears;
  out["consumed_tensors"] = report.consumed_tensors;
  out["carried_tensors"] = report.carried_tensors;
  out["written_tensors"] = report.written_tensors;
  out["resumed_tensors"] = report.resumed_tensors;
  out["source_bytes"] = report.source_bytes;
  out["output_bytes"] = report.output_bytes;
  out["inexact_blocks"] = report.inexact_blocks;
  out["saturated_blocks"] = report.saturated_blocks;
  out["seconds"] = report.seconds;
  out["notes"] = report.notes;
  return out;
}

// Runs `rewrite`, one of the verbs that make a checkpoint out of another, with `options` and those that all
// of them have.
template <class Options, class Rewrite>
nb::dict rewrite_model(const Rewrite& rewrite, const std::filesystem::path& source,
                       const std::filesystem::path& destination, Options options,
                       const std::string& gate_up_scale, bool overwrite, const std::string& fused_layout,
                       const nb::object& progress) {
  options.gate_up_scale =
      parse_choice("gate_up_scale", gate_up_scale, {GateUpScale::kShared, GateUpScale::kSeparate});
  options.overwrite = overwrite;
  options.fused_layout = fused_layout;
  const ProgressFn report_progress = progress_function(progress);
  RewriteReport report;
  {
    const Unlocked unlocked;
    report = rewrite(source, destination, options, report_progress);
  }
  return report_dict(report);
}

nb::dict quantize_model(const std::filesystem::path& source, const std::filesystem::path& destination,
                        const std::string& format, const std::string& activations,
                        std::optional<std::filesystem::path> scales, bool four_over_six,
                        std::optional<std::vector<int>> layers, bool shared_experts,
                        const std::string& gate_up_scale, bool overwrite, const std::string& fused_layout,
                        const nb::object& progress) {
  QuantizeCheckpointOptions options;
  options.format = parse_family("format", format);
  options.activations =
      parse_choice("activations", activations,
                   {ActivationScales::kNone, ActivationScales::kStatic, ActivationScales::kDynamic});
  if (scales) options.scales = std::move(*scales);
  options.four_over_six = four_over_six;
  options.layers = std::move(layers);
  options.shared_experts = shared_experts;
  return rewrite_model(quantize_checkpoint, source, destination, std::move(options), gate_up_scale, overwrite,
                       fused_layout, progress);
}

nb::dict convert_model(const std::filesystem::path& source, const std::filesystem::path& destination,
                       const std::string& to, const std::string& gate_up_scale, bool overwrite,
                       const std::string& fused_layout, const nb::object& progress) {
  ConvertOptions options;
  options.to = parse_family("to", to);
  return rewrite_model(convert_checkpoint, source, destination, std::move(options), gate_up_scale, overwrite,
                       fused_layout, progress);
}

nb::list verify_models(const Opened& quantized, const Opened& source) {
  Verification verification;
  {
    const Unlocked unlocked;
    verification = verify(*quantized.model, *source.model);
  }
  if (!verification.mismatches.empty()) {
    fail(ErrorCode::kInvalidArgument, "the checkpoints must have the same experts, but {}",
         verification.mismatches.front());
  }
  nb::list out;
  for (const LayerVerification& layer : verification.layers) {
    for (const MatrixVerification& matrix : layer.matrices) {
      nb::dict row;
      row["layer"] = layer.layer;
      row["mtp"] = layer.mtp;
      row["expert"] = matrix.expert < 0 ? nb::object(nb::none()) : nb::object(nb::int_(matrix.expert));
      row["projection"] = std::string(to_string(matrix.projection));
      row["relative_error"] = matrix.error.relative;
      row["snr_db"] = matrix.error.snr_db;
      row["cosine"] = matrix.error.cosine;
      row["worst"] = matrix.error.worst;
      out.append(row);
    }
  }
  return out;
}

// The end of two docstrings.
#define REWRITE_REPORT                                                                                      \
  "Nothing stands under `destination` before it is complete; the same call again continues an interrupted " \
  "one.\n"                                                                                                  \
  "`progress(done_bytes, total_bytes, item)` is called often. Returns the numbers of the report as a "      \
  "dict.\n\n"                                                                                               \
  "Raises FileNotFoundError, OSError, ValueError for a source that is broken or an option that does not "   \
  "fit."

}  // namespace

void bind_checkpoint(nb::module_& m) {
  nb::class_<MatrixEntry>(m, "Matrix", "A weight [rows, cols] of one expert, as stored; y = x * W^T.")
      .def_ro("name", &MatrixEntry::name,
              "Layer, expert and projection: \"model.layers.0.mlp.experts.3.gate\".")
      .def_prop_ro(
          "shape", [](const MatrixEntry& e) { return nb::make_tuple(e.matrix->rows, e.matrix->cols); },
          nb::sig("def shape(self) -> tuple[int, int]"))
      .def_prop_ro(
          "encoding", [](const MatrixEntry& e) { return std::string(to_string(e.matrix->encoding)); },
          "\"dense\", \"nvfp4\", \"mxfp4\", \"fp8-block\" or \"fp8\".")
      .def_prop_ro(
          "dtype", [](const MatrixEntry& e) { return std::string(to_string(e.matrix->weight->info->dtype)); },
          "The type of the stored weight by safetensors' name: \"BF16\", \"U8\", ...")
      .def_prop_ro("tensor_scale", &tensor_scale, "NVFP4's tensor scale as the multiplier, or None.")
      .def_prop_ro("input_scale", &input_scale, "The activations' tensor scale as the multiplier, or None.")
      .def_prop_ro(
          "bias", [](const MatrixEntry& e) { return vector_or_none(read_bias(*e.matrix)); },
          nb::sig("def bias(self) -> numpy.typing.NDArray[numpy.float32] | None"), "float32 [rows] or None.")
      .def("dequantize", &matrix_values,
           "The values, float32 [rows, cols], whatever the encoding.\n\nRaises ValueError for a scale that "
           "is NaN or "
           "negative.")
      .def("nvfp4", &matrix_nvfp4,
           "The codes and scales of an nvfp4 or mxfp4 matrix as an Nvfp4Tensor.\n\nRaises ValueError for "
           "others.")
      .def("__repr__", [](const MatrixEntry& e) {
        return nb::str(fmt::format("Matrix({}: {} {} x {})", e.name, to_string(e.matrix->encoding),
                                   e.matrix->rows, e.matrix->cols)
                           .c_str());
      });

  nb::class_<ExpertEntry>(m, "Expert", "The matrices of one expert.")
      .def_prop_ro(
          "number",
          [](const ExpertEntry& e) { return e.number < 0 ? std::nullopt : std::optional(e.number); },
          "None for the shared expert.")
      .def_prop_ro(
          "gate", [](const ExpertEntry& e) { return matrix_entry(e, Projection::kGate); },
          "[I, H], or None where the activation has no gate.")
      .def_prop_ro(
          "up", [](const ExpertEntry& e) { return matrix_entry(e, Projection::kUp); }, "[I, H].")
      .def_prop_ro(
          "down", [](const ExpertEntry& e) { return matrix_entry(e, Projection::kDown); }, "[H, I].");

  nb::class_<LayerEntry>(m, "LayerInfo", "A mixture-of-experts layer of a checkpoint.")
      .def_prop_ro(
          "number", [](const LayerEntry& l) { return l.info->layer; }, "What MoELayer.from_checkpoint takes.")
      .def_prop_ro(
          "mtp", [](const LayerEntry& l) { return l.info->mtp; }, "Whether it predicts further tokens.")
      .def_prop_ro(
          "prefix", [](const LayerEntry& l) { return l.info->prefix; }, "What its tensors' names begin with.")
      .def_prop_ro(
          "family", [](const LayerEntry& l) { return std::string(to_string(l.info->family)); },
          "\"plain\", \"modelopt\", \"compressed-tensors\", \"deepseek-v4\" or \"gpt-oss\".")
      .def_prop_ro(
          "hidden", [](const LayerEntry& l) { return l.info->hidden; }, "H")
      .def_prop_ro(
          "intermediate", [](const LayerEntry& l) { return l.info->intermediate; }, "I")
      .def_prop_ro(
          "num_experts", [](const LayerEntry& l) { return l.info->num_experts; }, "E")
      .def_prop_ro(
          "config", [](const LayerEntry& l) { return config_dict(layer_config(*l.model, *l.info)); },
          nb::sig("def config(self) -> dict[str, int | float | bool | str]"),
          "Sizes, activation and router as a dict.\n\nRaises ValueError or NotImplementedError where "
          "config.json is wrong or describes another kind of layer.")
      .def_prop_ro("router_weight", &router_weight,
                   nb::sig("def router_weight(self) -> numpy.typing.NDArray[numpy.float32] | None"),
                   "float32 [E, H] or None.")
      .def("expert", &expert_entry, nb::arg("number"), "Raises IndexError for a number there is not.")
      .def_prop_ro(
          "experts",
          [](const LayerEntry& l) {
            std::vector<ExpertEntry> out;
            for (std::int64_t e = 0; e < l.info->num_experts; ++e) out.push_back({l, e});
            return out;
          },
          "All of them, in order.")
      .def_prop_ro(
          "shared_expert",
          [](const LayerEntry& l) {
            return l.info->shared[static_cast<std::size_t>(Projection::kUp)]
                       ? std::optional(ExpertEntry{l, -1})
                       : std::nullopt;
          },
          "The expert every token passes, or None.")
      .def("__repr__", [](const LayerEntry& l) {
        return nb::str(fmt::format("LayerInfo({}: {} experts, hidden {}, intermediate {}, {})",
                                   l.info->prefix, l.info->num_experts, l.info->hidden, l.info->intermediate,
                                   to_string(l.info->family))
                           .c_str());
      });

  nb::class_<Opened>(m, "Checkpoint",
                     "A model's directory or one safetensors file, mapped; as megamoe.open gives it.")
      .def_prop_ro("path", [](const Opened& c) { return c.model->checkpoint->path(); })
      .def_prop_ro(
          "model_type", [](const Opened& c) { return c.model->model_type; }, "config.json's, or \"\".")
      .def_prop_ro(
          "notes", [](const Opened& c) { return c.model->notes; }, "What is suspicious but not wrong.")
      .def_prop_ro(
          "layers",
          [](const Opened& c) {
            std::vector<LayerEntry> out;
            for (const MoeLayerInfo& info : c.model->layers) out.push_back({c.model, &info});
            return out;
          },
          "Its mixture-of-experts layers, by number.")
      .def(
          "layer",
          [](const Opened& c, int number) {
            return LayerEntry{c.model, &find_layer(*c.model, number)};
          },
          nb::arg("number"), "Raises LookupError that lists the layers there are.")
      .def("findings", &findings, nb::arg("values") = false,
           nb::sig("def findings(self, values: bool = False) -> list[dict[str, str | int | None]]"),
           "What is suspicious about scales and formats, worst first: dicts of severity (\"note\", "
           "\"warning\",\n"
           "\"error\"), layer (None: all) and text. `values` also reads every dense weight for NaN and "
           "infinity.");

  m.def("open", &open_checkpoint, nb::arg("checkpoint"), nb::kw_only(), nb::arg("fused_layout") = "",
        nb::sig("def open(checkpoint: str | os.PathLike[str], *, fused_layout: str = \"\") -> Checkpoint"),
        "Opens a model's directory or one safetensors file, in any family of names and encodings.\n\n"
        "`fused_layout` (\"rows-first\" or \"cols-first\") is the order of fused expert tensors that shapes "
        "leave\n"
        "open. Raises FileNotFoundError; ValueError that names the tensor where the files contradict "
        "themselves.");

  m.def(
      "quantize_checkpoint", &quantize_model, nb::arg("source"), nb::arg("destination"), nb::kw_only(),
      nb::arg("format") = "modelopt", nb::arg("activations") = "none", nb::arg("scales") = nb::none(),
      nb::arg("four_over_six") = false, nb::arg("layers") = nb::none(), nb::arg("shared_experts") = false,
      nb::arg("gate_up_scale") = "shared", nb::arg("overwrite") = false, nb::arg("fused_layout") = "",
      nb::arg("progress") = nb::none(),
      nb::sig(
          "def quantize_checkpoint(source: str | os.PathLike[str], destination: str | os.PathLike[str], *, "
          "format: str = \"modelopt\", activations: str = \"none\", "
          "scales: str | os.PathLike[str] | None = None, four_over_six: bool = False, "
          "layers: list[int] | None = None, shared_experts: bool = False, gate_up_scale: str = \"shared\", "
          "overwrite: bool = False, fused_layout: str = \"\", "
          "progress: collections.abc.Callable[[int, int, str], object] | None = None) -> dict[str, object]"),
      "Writes `source` with its experts in NVFP4, as `megamoe quantize` does (docs/quantize.md).\n\n"
      "`format` is \"modelopt\" or \"compressed-tensors\"; `activations` \"none\", \"dynamic\", or "
      "\"static\" with\n"
      "`scales`, a file that `megamoe calibrate` wrote; `gate_up_scale` \"shared\" or \"separate\"; `layers` "
      "None for\n"
      "all but the multi-token-prediction ones.\n\n" REWRITE_REPORT);
  m.def(
      "convert_checkpoint", &convert_model, nb::arg("source"), nb::arg("destination"), nb::kw_only(),
      nb::arg("to"), nb::arg("gate_up_scale") = "shared", nb::arg("overwrite") = false,
      nb::arg("fused_layout") = "", nb::arg("progress") = nb::none(),
      nb::sig(
          "def convert_checkpoint(source: str | os.PathLike[str], destination: str | os.PathLike[str], *, "
          "to: str, gate_up_scale: str = \"shared\", overwrite: bool = False, fused_layout: str = \"\", "
          "progress: collections.abc.Callable[[int, int, str], object] | None = None) -> dict[str, object]"),
      "Writes an FP4 `source` in the NVFP4 of another family, `to`: \"modelopt\" or "
      "\"compressed-tensors\".\n\n" REWRITE_REPORT);
  m.def(
      "verify", &verify_models, nb::arg("quantized"), nb::arg("source"),
      nb::sig("def verify(quantized: Checkpoint, source: Checkpoint) -> list[dict[str, typing.Any]]"),
      "Holds each expert matrix against the one it was made from: dicts of layer, mtp, expert (None: "
      "shared),\n"
      "projection, relative_error, snr_db, cosine and worst.\n\nRaises ValueError where the experts differ.");
}

}  // namespace megamoe::python
