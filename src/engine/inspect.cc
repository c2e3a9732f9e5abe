#include "engine/inspect.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "base/parallel.h"
#include "checkpoint/expert_matrix.h"
#include "engine/stored_part.h"

namespace megamoe {
namespace {

// More saturated blocks than both of these are suspicious: a tensor scale made from the matrix's own maximum
// leaves a few, those whose maximum is within rounding of it.
constexpr double kSuspiciousShare = 0.01, kSuspiciousCount = 4.0;

bool is_zero_element(Encoding encoding, DType dtype, const std::byte* element) {
  const auto byte = std::to_integer<std::uint8_t>(*element);
  if (encoding == Encoding::kNvfp4 || encoding == Encoding::kMxfp4) return (byte & 0x77) == 0;
  return stored_value(dtype, element) == 0.0f;
}

// The multiplier held by a scale tensor of one element, or of one for each expert.
std::optional<double> multiplier(const TensorRef* tensor, const ExpertMatrix& matrix) {
  if (tensor == nullptr || tensor->info->elements() == 0) return {};
  const std::int64_t at = tensor->info->elements() == 1 ? 0 : matrix.expert;
  if (at >= tensor->info->elements()) return {};
  const double stored =
      stored_value(tensor->info->dtype, tensor->bytes().data() + at * (bits_of(tensor->info->dtype) / 8));
  return matrix.reciprocal ? 1.0 / stored : stored;
}

MatrixInspection inspect_matrix(const ExpertMatrix& matrix, bool values) {
  MatrixInspection out{.encoding = matrix.encoding,
                       .dtype = matrix.weight->info->dtype,
                       .rows = matrix.rows,
                       .cols = matrix.cols};
  const auto share = [&](const TensorRef& tensor) {
    const std::int64_t experts = holds_all_experts(tensor, matrix) ? tensor.info->shape[0] : 1;
    return static_cast<double>(tensor.info->bytes()) / static_cast<double>(experts) *
           static_cast<double>(matrix.rows) / static_cast<double>(std::max(matrix.stored_rows, matrix.rows));
  };
  double bytes = share(*matrix.weight);
  out.all_zero = true;
  StoredPart(*matrix.weight, matrix).for_each([&](const std::byte* element) {
    if (out.all_zero && !is_zero_element(matrix.encoding, out.dtype, element)) out.all_zero = false;
    if (values && matrix.encoding == Encoding::kDense && !is_finite(stored_value(out.dtype, element))) {
      ++out.nonfinite_values;
    }
    return out.all_zero || (values && matrix.encoding == Encoding::kDense);
  });
  for (const float value : read_bias(matrix)) out.nonfinite_values += !is_finite(value);
  if (matrix.block_scale != nullptr) {
    const DType dtype = matrix.block_scale->info->dtype;
    bytes += share(*matrix.block_scale);
    StoredPart(*matrix.block_scale, matrix, matrix.encoding == Encoding::kFp8Block ? 128 : 1)
        .for_each([&](const std::byte* element) {
          const float scale = stored_value(dtype, element);
          ++out.scales;
          out.nan_scales += !is_finite(scale);
          out.negative_scales += is_finite(scale) && scale < 0.0f;  // -0 is 0
          out.zero_scales += scale == 0.0f;
          out.saturated_scales += dtype == DType::kE4M3 && scale == kE4M3Max;
          return true;
        });
  }
  out.bytes = std::llround(bytes);
  out.tensor_scale = multiplier(matrix.tensor_scale, matrix);
  out.input_scale = multiplier(matrix.input_scale, matrix);
  return out;
}

ExpertInspection inspect_expert(std::int64_t expert,
                                const std::array<std::optional<ExpertMatrix>, 3>& matrices, bool values) {
  ExpertInspection out{.expert = expert};
  for (std::size_t p = 0; p < matrices.size(); ++p) {
    if (matrices[p]) out.projections[p] = inspect_matrix(*matrices[p], values);
  }
  return out;
}

bool is_bad_scale(const std::optional<double>& scale) {
  // What computes has it in FP32, where the reciprocal of a denormal is infinite.
  const float value = static_cast<float>(scale.value_or(1));
  return !(std::isfinite(value) && value > 0);
}

// Counts of one kind of fault in a layer, with the first matrix that has it.
struct Tally {
  std::int64_t count = 0;
  std::int64_t matrices = 0;
  std::string first;
  void add(std::int64_t more, const std::string& name) {
    if (more == 0) return;
    if (matrices++ == 0) first = name;
    count += more;
  }
  std::string where() const {
    return matrices == 1 ? fmt::format("in {}", first)
                         : fmt::format("in {} matrices, the first {}", matrices, first);
  }
};

std::string short_name(std::int64_t expert, std::size_t projection) {
  const std::string_view name = to_string(kProjections[projection]);
  return expert < 0 ? fmt::format("the shared expert's {}", name) : fmt::format("expert {} {}", expert, name);
}

void find_faults(const LayerInspection& layer, std::vector<Finding>& findings) {
  Tally nan, negative, saturated, zero_scales, nonfinite, all_zero, bad_tensor, bad_input;
  for (const ExpertInspection& expert : layer.experts) {
    for (std::size_t p = 0; p < 3; ++p) {
      if (!expert.projections[p]) continue;
      const MatrixInspection& matrix = *expert.projections[p];
      const std::string name = short_name(expert.expert, p);
      nan.add(matrix.nan_scales, name);
      negative.add(matrix.negative_scales, name);
      zero_scales.add(matrix.zero_scales, name);
      nonfinite.add(matrix.nonfinite_values, name);
      all_zero.add(matrix.all_zero, name);
      bad_tensor.add(is_bad_scale(matrix.tensor_scale), name);
      bad_input.add(is_bad_scale(matrix.input_scale), name);
      const bool many = static_cast<double>(matrix.saturated_scales) >
                        std::max(kSuspiciousCount, kSuspiciousShare * static_cast<double>(matrix.scales));
      saturated.add(many ? matrix.saturated_scales : 0, name);
    }
  }
  const auto add = [&](Severity severity, const Tally& tally, std::string_view what) {
    if (tally.count > 0)
      findings.push_back({severity, layer.layer, fmt::format("{} {} {}", tally.count, what, tally.where())});
  };
  add(Severity::kError, nan, "block scales that are not finite");
  add(Severity::kError, negative, "negative block scales");
  add(Severity::kError, bad_tensor, "tensor scales that are not finite and positive");
  add(Severity::kError, bad_input, "input scales that are not finite and positive");
  add(Severity::kError, nonfinite, "weights or biases that are not finite");
  add(Severity::kWarning, saturated, "saturated block scales (more than 1 in 100)");
  add(Severity::kWarning, all_zero, "matrices of nothing but zeros:");
  add(Severity::kWarning, zero_scales, "block scales of zero");
  if (layer.unequal_gate_up > 0) {
    findings.push_back(
        {Severity::kNote, layer.layer,
         fmt::format("gate and up have different tensor scales in {} of {} experts, by up to {:.3g} times",
                     layer.unequal_gate_up, layer.num_experts, layer.max_gate_up_ratio)});
  }
  if (layer.encodings.size() > 1) {
    findings.push_back({Severity::kNote, layer.layer,
                        fmt::format("experts are encoded in {} ways: {}", layer.encodings.size(),
                                    fmt::join(layer.encodings, ", "))});
  }
  if (!layer.has_router) {
    findings.push_back(
        {Severity::kNote, layer.layer, "no router weights: expert ids must come from elsewhere"});
  }
}

void summarize(LayerInspection& layer) {
  std::set<std::string> encodings;
  for (const ExpertInspection& expert : layer.experts) {
    for (const auto& matrix : expert.projections) {
      if (!matrix) continue;
      layer.bytes += matrix->bytes;
      layer.elements += matrix->rows * matrix->cols;
      if (expert.expert < 0) continue;
      ++layer.matrices;
      layer.input_scales += matrix->input_scale.has_value();
      encodings.insert(matrix->encoding == Encoding::kDense ? std::string(to_string(matrix->dtype))
                                                            : std::string(to_string(matrix->encoding)));
      if (matrix->tensor_scale && !is_bad_scale(matrix->tensor_scale)) {
        const double scale = *matrix->tensor_scale;
        layer.min_tensor_scale =
            layer.min_tensor_scale == 0 ? scale : std::min(layer.min_tensor_scale, scale);
        layer.max_tensor_scale = std::max(layer.max_tensor_scale, scale);
      }
    }
    const auto& gate = expert.projections[0];
    const auto& up = expert.projections[1];
    if (expert.expert < 0 || !gate || !up || !gate->tensor_scale || !up->tensor_scale ||
        is_bad_scale(gate->tensor_scale) || is_bad_scale(up->tensor_scale)) {
      continue;
    }
    const double ratio = *gate->tensor_scale / *up->tensor_scale;
    layer.unequal_gate_up += ratio != 1;
    layer.max_gate_up_ratio = std::max(layer.max_gate_up_ratio, std::max(ratio, 1 / ratio));
  }
  layer.encodings.assign(encodings.begin(), encodings.end());
}

LayerInspection inspect_layer(const MoeLayerInfo& info, bool values) {
  LayerInspection layer{.layer = info.layer,
                        .mtp = info.mtp,
                        .prefix = info.prefix,
                        .family = info.family,
                        .num_experts = info.num_experts,
                        .hidden = info.hidden,
                        .intermediate = info.intermediate,
                        .has_router = info.router_weight != nullptr};
  layer.has_shared =
      std::any_of(info.shared.begin(), info.shared.end(), [](const auto& m) { return m.has_value(); });
  layer.experts.resize(info.experts.size());
  parallel_for(static_cast<std::int64_t>(info.experts.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t e = begin; e < end; ++e) {
      const auto at = static_cast<std::size_t>(e);
      layer.experts[at] = inspect_expert(e, info.experts[at], values);
    }
  });
  if (layer.has_shared) layer.experts.push_back(inspect_expert(-1, info.shared, values));
  summarize(layer);
  return layer;
}

}  // namespace

std::string_view to_string(Severity severity) {
  switch (severity) {
    case Severity::kNote: return "note";
    case Severity::kWarning: return "warning";
    case Severity::kError: return "error";
  }
  return "unknown";
}

Inspection inspect(const ModelIndex& model, const InspectOptions& options) {
  Inspection out;
  out.model_type = model.model_type;
  out.files = static_cast<std::int64_t>(model.checkpoint->files().size());
  out.tensors = static_cast<std::int64_t>(model.checkpoint->tensors().size());
  for (const TensorRef& tensor : model.checkpoint->tensors()) out.bytes += tensor.info->bytes();
  const MoeLayerInfo* only = options.layer ? &find_layer(model, *options.layer) : nullptr;
  for (const MoeLayerInfo& info : model.layers) {
    if (only != nullptr && &info != only) continue;
    out.layers.push_back(inspect_layer(info, options.values));
    out.expert_bytes += out.layers.back().bytes;
    find_faults(out.layers.back(), out.findings);
    for (const TensorRef* tensor : router_tensors(info)) {
      if (const std::int64_t nans = count_nans(read_f32(*tensor)); nans > 0) {
        out.findings.push_back(
            {Severity::kError, info.layer, fmt::format("{} NaN in {}", nans, tensor->info->name)});
      }
    }
  }
  for (const std::string& note : model.notes) out.findings.push_back({Severity::kNote, -1, note});
  std::stable_sort(out.findings.begin(), out.findings.end(),
                   [](const Finding& a, const Finding& b) { return a.severity > b.severity; });
  return out;
}

}  // namespace megamoe
