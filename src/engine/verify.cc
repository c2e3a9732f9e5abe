#include "engine/verify.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <string_view>

#include "base/check.h"
#include "base/parallel.h"
#include "checkpoint/expert_matrix.h"
#include "numerics/fp8_tile.h"
#include "numerics/nvfp4.h"

namespace megamoe {
namespace {

std::string layer_name(const MoeLayerInfo& layer) {
  return fmt::format("{}layer {}", layer.mtp ? "multi-token-prediction " : "", layer.layer);
}

std::string expert_name(std::int64_t expert) {
  return expert < 0 ? "the shared expert" : fmt::format("expert {}", expert);
}

const MoeLayerInfo* find(const ModelIndex& model, const MoeLayerInfo& like) {
  for (const MoeLayerInfo& layer : model.layers) {
    if (layer.layer == like.layer && layer.mtp == like.mtp) return &layer;
  }
  return nullptr;
}

// How far e4m3(e2m1 * s / 8) * 8 is from e2m1 * s over the matrix, RMS over RMS.
double fold_error(const Nvfp4Data& data) {
  double difference = 0, total = 0;
  for (std::size_t block = 0; block < data.scales.size(); ++block) {
    const std::uint8_t scale = data.scales[block];
    for (std::int64_t i = 0; i < kNvfp4Block; ++i) {
      const std::uint8_t code = nibble(data.codes.data() + block * (kNvfp4Block / 2), i);
      const double exact = decode_e2m1(code) * decode_e4m3(scale);
      const double folded = decode_e4m3(fp8_fold(code, scale)) / kFp8FoldShift;
      difference += (folded - exact) * (folded - exact);
      total += exact * exact;
    }
  }
  return total == 0 ? 0 : std::sqrt(difference / total);
}

// A matrix of both checkpoints.
struct Pair {
  std::int64_t expert = 0;
  Projection projection = Projection::kGate;
  const ExpertMatrix* quantized = nullptr;
  const ExpertMatrix* source = nullptr;
};

MatrixVerification verify_matrix(const Pair& pair) {
  MatrixVerification out{.expert = pair.expert,
                         .projection = pair.projection,
                         .cols = pair.source->cols,
                         .error = {},
                         .fold_error = {}};
  out.error = compare(read_f32(*pair.quantized), read_f32(*pair.source));
  if (pair.quantized->encoding == Encoding::kNvfp4) out.fold_error = fold_error(read_nvfp4(*pair.quantized));
  return out;
}

// Pairs the projections of one expert; what cannot be paired becomes a mismatch.
void pair_up(const MoeLayerInfo& layer, std::int64_t expert,
             const std::array<std::optional<ExpertMatrix>, 3>& quantized,
             const std::array<std::optional<ExpertMatrix>, 3>& source, std::vector<Pair>& pairs,
             std::vector<std::string>& mismatches) {
  for (std::size_t p = 0; p < 3; ++p) {
    const auto name = [&] {
      return fmt::format("{}, {}, {}", layer_name(layer), expert_name(expert), to_string(kProjections[p]));
    };
    const auto &q = quantized[p], &s = source[p];
    if (q.has_value() != s.has_value()) {
      mismatches.push_back(fmt::format("{}: only in the {}", name(), q ? "quantised checkpoint" : "source"));
    } else if (q && (q->rows != s->rows || q->cols != s->cols)) {
      mismatches.push_back(fmt::format("{}: expected shape [{}, {}] as in the source, got [{}, {}]", name(),
                                       s->rows, s->cols, q->rows, q->cols));
    } else if (q) {
      const std::vector<float> bias = read_bias(*q);
      if (count_nans(bias) > 0) {
        mismatches.push_back(fmt::format("{}: the bias holds a NaN", name()));
      } else if (bias != read_bias(*s)) {
        mismatches.push_back(fmt::format("{}: the biases differ", name()));
      }
      pairs.push_back({expert, kProjections[p], &*q, &*s});
    }
  }
}

// The tensors of the source's shared experts: among `others`, but compared as matrices.
std::set<std::string_view> shared_tensors(const ModelIndex& model) {
  std::set<std::string_view> names;
  for (const MoeLayerInfo& layer : model.layers) {
    for (const auto& matrix : layer.shared) {
      if (!matrix) continue;
      for (const TensorRef* tensor : {matrix->weight, matrix->block_scale, matrix->tensor_scale,
                                      matrix->input_scale, matrix->unused_input_scale, matrix->bias}) {
        if (tensor != nullptr) names.insert(tensor->info->name);
      }
    }
  }
  return names;
}

void compare_others(const ModelIndex& quantized, const ModelIndex& source, Verification& out) {
  const std::set<std::string_view> shared = shared_tensors(source);
  for (const TensorRef* tensor : source.others) {
    if (shared.contains(tensor->info->name)) continue;
    const TensorRef* twin = quantized.checkpoint->find(tensor->info->name);
    if (twin == nullptr) {
      out.mismatches.push_back(fmt::format("{}: only in the source", tensor->info->name));
    } else if (twin->info->dtype != tensor->info->dtype || twin->info->shape != tensor->info->shape) {
      out.mismatches.push_back(fmt::format("{}: expected {} as in the source, got {}", tensor->info->name,
                                           describe(*tensor->info), describe(*twin->info)));
    } else if (const auto a = tensor->bytes(), b = twin->bytes();
               !a.empty() && std::memcmp(a.data(), b.data(), a.size()) != 0) {
      out.mismatches.push_back(fmt::format("{}: other bytes than in the source", tensor->info->name));
    } else {
      ++out.others_equal;
    }
  }
  for (const MoeLayerInfo& layer : quantized.layers) {
    std::vector<const TensorRef*> routers = router_tensors(layer);
    for (const TensorRef* tensor : routers) {
      if (const std::int64_t nans = count_nans(read_f32(*tensor)); nans > 0)
        out.mismatches.push_back(fmt::format("{}: {} NaN", tensor->info->name, nans));
    }
    // What decides where tokens go, and was not there.
    if (layer.hash_table != nullptr) routers.push_back(layer.hash_table);
    for (const TensorRef* tensor : routers) {
      if (source.checkpoint->find(tensor->info->name) == nullptr)
        out.mismatches.push_back(fmt::format("{}: not in the source", tensor->info->name));
    }
  }
}

}  // namespace

std::string layer_label(const LayerVerification& layer) {
  return fmt::format("{}{}", layer.mtp ? "mtp " : "", layer.layer);
}

std::vector<LayerSummary> summarize(const Verification& verification) {
  std::vector<LayerSummary> out;
  for (const LayerVerification& layer : verification.layers) {
    LayerSummary row;
    row.label = layer_label(layer);
    row.matrices = static_cast<std::int64_t>(layer.matrices.size());
    std::vector<const MatrixVerification*> order;
    double fold_sum = 0;
    std::int64_t folded = 0;
    for (const MatrixVerification& matrix : layer.matrices) {
      order.push_back(&matrix);
      if (matrix.fold_error) fold_sum += *matrix.fold_error * *matrix.fold_error, ++folded;
    }
    if (folded > 0) row.fold_error = std::sqrt(fold_sum / static_cast<double>(folded));
    if (!order.empty()) {
      // What is not a number is worse than every number.
      std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
        const double x = a->error.snr_db, y = b->error.snr_db;
        return std::isnan(x) ? !std::isnan(y) : x < y;
      });
      const MatrixVerification& worst = *order.front();
      row.least_snr_db = worst.error.snr_db;
      row.median_snr_db = order[order.size() / 2]->error.snr_db;
      row.most_snr_db = order.back()->error.snr_db;
      row.worst_name =
          fmt::format("{} {}", worst.expert < 0 ? "shared expert" : fmt::format("expert {}", worst.expert),
                      to_string(worst.projection));
      row.most_relative = worst.error.relative;
      row.least_cosine = worst.error.cosine;
    }
    out.push_back(row);
  }
  return out;
}

Verification verify(const ModelIndex& quantized, const ModelIndex& source, const ProgressFn& progress) {
  Verification out;
  std::int64_t total = 0, done = 0;
  std::vector<std::vector<Pair>> pairs;
  for (const MoeLayerInfo& layer : source.layers) {
    const MoeLayerInfo* twin = find(quantized, layer);
    if (twin == nullptr) {
      out.mismatches.push_back(fmt::format("{}: only in the source", layer_name(layer)));
      continue;
    }
    if (twin->num_experts != layer.num_experts) {
      out.mismatches.push_back(fmt::format("{}: expected {} experts as in the source, got {}",
                                           layer_name(layer), layer.num_experts, twin->num_experts));
    }
    pairs.emplace_back();
    for (std::size_t e = 0; e < std::min(layer.experts.size(), twin->experts.size()); ++e) {
      pair_up(layer, static_cast<std::int64_t>(e), twin->experts[e], layer.experts[e], pairs.back(),
              out.mismatches);
    }
    pair_up(layer, -1, twin->shared, layer.shared, pairs.back(), out.mismatches);
    out.layers.push_back({.layer = layer.layer,
                          .mtp = layer.mtp,
                          .num_experts = layer.num_experts,
                          .gated = layer.gated,
                          .matrices = {}});
    for (const Pair& pair : pairs.back()) total += pair.source->rows * pair.source->cols;
  }
  for (const MoeLayerInfo& layer : quantized.layers) {
    if (find(source, layer) == nullptr) {
      out.mismatches.push_back(fmt::format("{}: only in the quantised checkpoint", layer_name(layer)));
    }
  }
  compare_others(quantized, source, out);
  // Progress counts the source's weights as the two bytes most of them have.
  for (std::size_t l = 0; l < pairs.size(); ++l) {
    std::vector<MatrixVerification>& matrices = out.layers[l].matrices;
    matrices.resize(pairs[l].size());
    const std::string item = fmt::format("layer {}", out.layers[l].layer);
    const auto count = static_cast<std::int64_t>(pairs[l].size());
    const std::int64_t batch = std::int64_t{4} * std::max(num_threads(), 1);
    for (std::int64_t first = 0; first < count; first += batch) {
      const std::int64_t last = std::min(count, first + batch);
      parallel_for(last - first, 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = first + begin; i < first + end; ++i) {
          const auto at = static_cast<std::size_t>(i);
          matrices[at] = verify_matrix(pairs[l][at]);
        }
      });
      for (std::int64_t i = first; i < last; ++i) {
        const ExpertMatrix& matrix = *pairs[l][static_cast<std::size_t>(i)].source;
        done += matrix.rows * matrix.cols;
      }
      if (progress) progress({2 * done, 2 * total, item});
    }
  }
  return out;
}

}  // namespace megamoe
