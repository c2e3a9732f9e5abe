#include "engine/calibrate.h"

#include <algorithm>

#include "base/check.h"
#include "numerics/bf16.h"
#include "numerics/nvfp4.h"

namespace megamoe {
namespace {

float largest_of_row(const bf16* row, std::int64_t cols, const char* what, std::int64_t token,
                     std::int64_t expert) {
  float largest = 0;
  for (std::int64_t c = 0; c < cols; ++c) {
    const float value = to_float(row[c]);
    if (!is_finite(value)) {
      fail(ErrorCode::kInvalidArgument,
           "cannot calibrate: {} of token {} in expert {} is not finite at column {}", what, token, expert,
           c);
    }
    largest = std::max(largest, magnitude(value));
  }
  return largest;
}

// Makes the scales of x or of h from what was seen.
void finish(std::vector<ExpertInputScales>& experts, InputScale ExpertInputScales::*side,
            std::vector<std::int64_t>& borrowed) {
  float largest = 0;
  for (const ExpertInputScales& expert : experts) largest = std::max(largest, (expert.*side).amax);
  for (std::size_t e = 0; e < experts.size(); ++e) {
    InputScale& scale = experts[e].*side;
    if (scale.amax == 0) borrowed.push_back(static_cast<std::int64_t>(e));
    scale.scale = nvfp4_tensor_scale(scale.amax == 0 ? largest : scale.amax);
  }
}

}  // namespace

Calibration::Calibration(MoeLayer& layer) : layer_(layer) {
  if (layer.options().activations != ActivationFormat::kBf16) {
    fail(ErrorCode::kInvalidArgument, "calibration needs a layer with bf16 activations, got {}",
         to_string(layer.options().activations));
  }
  seen_.resize(static_cast<std::size_t>(layer.config().num_experts));
}

void Calibration::add(MatrixView<const bf16> x, MatrixView<const std::int32_t> ids,
                      MatrixView<const float> weights) {
  // Of a token whose logits hold a NaN every weight is one, and the experts say nothing.
  for (std::int64_t t = 0; t < weights.rows; ++t) {
    for (std::int64_t slot = 0; slot < weights.cols; ++slot) {
      if (ids.row(t)[slot] < 0 || is_finite(weights.row(t)[slot])) continue;
      fail(ErrorCode::kInvalidArgument, "cannot calibrate: the weight of token {}, slot {} is not finite", t,
           slot);
    }
  }
  x_ = x;
  std::vector<bf16> y(static_cast<std::size_t>(x.rows * layer_.config().hidden));
  layer_.on_stage([this](const Stage& stage) { on_stage(stage); });
  try {
    layer_.forward(x, ids, weights, {y.data(), x.rows, layer_.config().hidden});
  } catch (...) {
    layer_.on_stage({});
    throw;
  }
  layer_.on_stage({});
}

void Calibration::on_stage(const Stage& stage) {
  if (stage.name == "offsets") {
    const auto* offsets = static_cast<const std::int64_t*>(stage.data);
    offsets_.assign(offsets, offsets + stage.shape[0]);
  } else if (stage.name == "row_to_token") {
    const auto* tokens = static_cast<const std::int32_t*>(stage.data);
    row_to_token_.assign(tokens, tokens + stage.shape[0]);
  } else if (stage.name == "h") {
    const auto* h = static_cast<const bf16*>(stage.data);
    const std::int64_t cols = stage.shape[1];
    for (std::size_t e = 0; e < seen_.size(); ++e) {
      const auto expert = static_cast<std::int64_t>(e);
      for (std::int64_t r = offsets_[e]; r < offsets_[e + 1]; ++r) {
        const std::int32_t token = row_to_token_[static_cast<std::size_t>(r)];
        seen_[e].x.amax =
            std::max(seen_[e].x.amax, largest_of_row(x_.row(token), x_.cols, "x", token, expert));
        seen_[e].h.amax = std::max(seen_[e].h.amax, largest_of_row(h + r * cols, cols, "h", token, expert));
      }
      seen_[e].rows += offsets_[e + 1] - offsets_[e];
    }
  }
}

Calibration::Result Calibration::result() const {
  Result out{.experts = seen_, .borrowed = {}};
  if (std::all_of(seen_.begin(), seen_.end(), [](const auto& expert) { return expert.rows == 0; })) {
    fail(ErrorCode::kInvalidArgument, "cannot calibrate: no expert of the layer saw a token");
  }
  finish(out.experts, &ExpertInputScales::x, out.borrowed);
  finish(out.experts, &ExpertInputScales::h, out.borrowed);
  std::sort(out.borrowed.begin(), out.borrowed.end());
  out.borrowed.erase(std::unique(out.borrowed.begin(), out.borrowed.end()), out.borrowed.end());
  return out;
}

}  // namespace megamoe
