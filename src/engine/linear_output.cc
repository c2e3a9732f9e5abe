#include "engine/linear_output.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "megamoe/quantize.h"
#include "numerics/amax.h"
#include "numerics/four_over_six.h"

namespace megamoe {
namespace {

std::vector<std::uint8_t> bytes_of(float value) {
  std::vector<std::uint8_t> bytes(sizeof(float));
  std::memcpy(bytes.data(), &value, sizeof(float));
  return bytes;
}

// What a file of this family holds for the multiplier `scale`.
float stored_scale(float scale, Family family, const std::string& module) {
  if (family == Family::kModelOpt) return scale;
  const float inverse = 1.0f / scale;
  if (!std::isfinite(inverse)) {
    fail(ErrorCode::kUnsupported,
         "{}: the scale {} is too small for compressed-tensors, which stores the reciprocal", module, scale);
  }
  return inverse;
}

// The nearest multiplier that a file of this family brings back unchanged.
float representable_scale(float scale, Family family) {
  if (family == Family::kModelOpt) return scale;
  return 1.0f / (1.0f / std::max(scale, 0x1p-127f));
}

// Calls `body` with a view of the matrix: BF16 as it is, anything else as FP32.
template <class Body>
auto with_values(const ExpertMatrix& m, const Body& body) {
  if (const bf16* values = view_bf16(m); values != nullptr) {
    return body(MatrixView<const bf16>(values, m.rows, m.cols));
  }
  if (m.encoding == Encoding::kDense && m.weight->info->dtype == DType::kBF16) {
    const std::vector<bf16> values = read_bf16(m);
    return body(MatrixView<const bf16>(values.data(), m.rows, m.cols));
  }
  const std::vector<float> values = read_f32(m);
  return body(MatrixView<const float>(values.data(), m.rows, m.cols));
}

Nvfp4Data quantize_linear(const LinearOutput& linear, const LinearFormat& format, LinearBytes& out) {
  float partner_amax = 0.0f;
  if (linear.scale_partner != nullptr) {
    partner_amax = with_values(*linear.scale_partner, [](auto view) { return tensor_amax(view); });
  }
  const float range = format.four_over_six ? kFourOverSixRange : kNvfp4Range;
  Nvfp4Tensor result = with_values(*linear.matrix, [&](auto view) {
    const float amax = std::max(tensor_amax(view), partner_amax);
    QuantizeOptions options;
    options.mode = QuantizeOptions::TensorScale::kGiven;
    options.tensor_scale = representable_scale(nvfp4_tensor_scale(amax, range), format.family);
    options.four_over_six = format.four_over_six;
    return quantize(view, options);
  });
  if (result.nonfinite_blocks > 0) {
    fail(ErrorCode::kInvalidFile,
         "{}: {} blocks of 16 hold a NaN or an infinity, which no reader would accept quantised",
         linear.matrix->weight->info->name, result.nonfinite_blocks);
  }
  out.saturated_blocks = result.saturated_blocks;
  return {std::move(result.codes), std::move(result.scales), result.tensor_scales[0], 0};
}

Nvfp4Data nvfp4_of(const LinearOutput& linear, const LinearFormat& format, LinearBytes& out) {
  switch (linear.matrix->encoding) {
    case Encoding::kNvfp4:
    case Encoding::kMxfp4: return read_nvfp4(*linear.matrix, linear.scale_partner);
    case Encoding::kDense:
    case Encoding::kFp8Block:
    case Encoding::kFp8Tensor: break;
  }
  return quantize_linear(linear, format, out);
}

// The elements of a bias that lies in one tensor with those of other experts or projections, as they are.
std::vector<std::uint8_t> slice_bias(const ExpertMatrix& m) {
  const auto source = m.bias->bytes();
  const auto size = static_cast<std::int64_t>(bits_of(m.bias->info->dtype) / 8);
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(m.rows * size));
  for (std::int64_t r = 0; r < m.rows; ++r) {
    const std::int64_t element = m.expert * m.stored_rows + m.row_first + r * m.row_step;
    MEGAMOE_CHECK((element + 1) * size <= static_cast<std::int64_t>(source.size()));
    std::memcpy(bytes.data() + r * size, source.data() + element * size, static_cast<std::size_t>(size));
  }
  return bytes;
}

}  // namespace

std::vector<PlannedTensor> plan_tensors(const LinearOutput& linear, const LinearFormat& format) {
  const bool modelopt = format.family == Family::kModelOpt;
  const std::vector<std::int64_t> scalar =
      modelopt ? std::vector<std::int64_t>{} : std::vector<std::int64_t>{1};
  const ExpertMatrix& m = *linear.matrix;
  const auto name = [&](const char* modelopt_name, const char* other) {
    return linear.module + (modelopt ? modelopt_name : other);
  };
  std::vector<PlannedTensor> plan;
  plan.push_back({name(".weight_scale_2", ".weight_global_scale"), DType::kF32, scalar});
  if (linear.input_scale) plan.push_back({name(".input_scale", ".input_global_scale"), DType::kF32, scalar});
  plan.push_back({name(".weight", ".weight_packed"), DType::kU8, {m.rows, m.cols / 2}});
  plan.push_back({linear.module + ".weight_scale", DType::kE4M3, {m.rows, m.cols / kNvfp4Block}});
  if (linear.writes_bias) plan.push_back({linear.module + ".bias", m.bias->info->dtype, {m.rows}});
  return plan;
}

LinearBytes make_tensors(const LinearOutput& linear, const LinearFormat& format) {
  LinearBytes out;
  Nvfp4Data data = nvfp4_of(linear, format, out);
  out.inexact_blocks = data.inexact_blocks;
  out.tensors.push_back(bytes_of(stored_scale(data.tensor_scale, format.family, linear.module)));
  if (linear.input_scale) {
    out.tensors.push_back(bytes_of(stored_scale(*linear.input_scale, format.family, linear.module)));
  }
  out.tensors.push_back(std::move(data.codes));
  out.tensors.push_back(std::move(data.scales));
  if (linear.writes_bias) out.tensors.push_back(slice_bias(*linear.matrix));
  return out;
}

}  // namespace megamoe
