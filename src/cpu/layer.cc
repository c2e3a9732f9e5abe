// layer.cc: the two GEMMs and the shared expert: work items, scaling, bias, activation, output format.
//
// A work item is some columns of one expert's output for up to 128 of its rows, so that one busy expert
// still keeps every thread at work, and no two items write the same line of memory for long.
#include <algorithm>
#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/check.h"
#include "base/parallel.h"
#include "cpu/codecs.h"
#include "cpu/gemm.h"
#include "cpu/kernels.h"
#include "cpu/operations.h"
#include "numerics/bf16.h"
#include "numerics/exp.h"

namespace megamoe::cpu {
namespace {

struct PackedExpert {
  PackedMatrix gate, up, down;

  // Into bytes_of(w) bytes at `memory`.
  PackedExpert(const ExpertWeights& w, std::uint8_t* memory) {
    if (w.gate.rows != 0) gate = PackedMatrix(w.gate, w.gate_bias, memory);
    memory += lines_of(w.gate);
    up = PackedMatrix(w.up, w.up_bias, memory);
    down = PackedMatrix(w.down, w.down_bias, memory + lines_of(w.up));
  }
  static std::int64_t bytes_of(const ExpertWeights& w) {
    return checked_add(checked_add(lines_of(w.gate), lines_of(w.up)), lines_of(w.down));
  }

 private:
  // In whole cache lines.
  static std::int64_t lines_of(const WeightMatrix& matrix) {
    return (PackedMatrix::bytes_of(matrix) + kCacheLine - 1) / kCacheLine * kCacheLine;
  }
};

// Rows of one expert, few enough for a slab.
struct RowBatch {
  const PackedExpert* expert;
  std::int64_t first;
  std::int64_t count;
};

void append_batches(const PackedExpert& expert, std::int64_t begin, std::int64_t end,
                    std::vector<RowBatch>& batches) {
  for (std::int64_t first = begin; first < end; first += kMaxRows) {
    batches.push_back({&expert, first, std::min(kMaxRows, end - first)});
  }
}

// Calls body(batch, first panel, panels) for every batch and every `width` panels of `panels`. A panel's row
// costs `depth` multiply-adds.
template <class Body>
void for_each_item(const std::vector<RowBatch>& batches, std::int64_t panels, std::int64_t width,
                   std::int64_t depth, const Body& body) {
  constexpr std::int64_t kLeastWork = 1 << 17;  // multiply-adds worth handing to another thread, some 5 us
  const std::int64_t across = (panels + width - 1) / width;
  const auto piece = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t first = i % across * width;
      body(batches[static_cast<std::size_t>(i / across)], first, std::min(width, panels - first));
    }
  };
  const auto count = static_cast<std::int64_t>(batches.size());
  const std::int64_t rows = batches.back().first + batches.back().count - batches.front().first;
  const std::int64_t work = std::max<std::int64_t>(1, rows / count * width * kPanel * depth);  // of an item
  parallel_for(count * across, kLeastWork / work, std::ref(piece));
}

// The panels of an item, of all its matrices: many, as x is expanded anew for each item and reading on is
// faster than starting, but no more than leave every thread several items.
std::int64_t panels_of_item(const Kernel& kernel, const std::vector<RowBatch>& batches,
                            std::int64_t panels_of_batch) {
  constexpr std::int64_t kItemsOfThread = 8;
  std::int64_t rows = 0, panels = 0;
  for (const RowBatch& batch : batches) rows = std::max(rows, batch.count), panels += panels_of_batch;
  return std::clamp(panels / (kItemsOfThread * num_threads()), std::min(kUsualPanels, kernel.panels),
                    std::min(kernel.panels, kMaxSums / (rows * kPanel)));
}

// The sums of a slab in this thread's scratch memory.
Sums multiply(const Kernel& kernel, const Slab& slab) {
  thread_local AlignedBuffer<float> values(kMaxSums);
  const Sums sums{slab, values.data()};
  (slab.x->format == ActivationFormat::kNvfp4 ? kernel.multiply_nvfp4 : kernel.multiply_f32)(sums);
  return sums;
}

// out [panels * 16]: row i of matrix `m`, scaled, bias added.
void finish_row(const Kernel& kernel, const Sums& sums, int m, std::int64_t i, float* out) {
  const Slab& slab = sums.slab;
  const PackedMatrix& matrix = *slab.matrices[m];
  kernel.rows->finish(sums.at(m, 0, i), slab.rows * kPanel, slab.panels, row_factor(slab, i),
                      matrix.tensor_scale(),
                      matrix.bias() == nullptr ? nullptr : matrix.bias() + slab.first_panel * kPanel, out);
}

constexpr std::int64_t kFp8Panels = kFp8Tile / kPanel;         // of h, where it is quantised in groups of 128
constexpr std::int64_t kMaxColumns = kMaxPanels / 2 * kPanel;  // of h in an item
static_assert(2 * kFp8Panels * kMaxRows * kPanel <= kMaxSums);

// Columns column .. column + count of row r of the first GEMM's output; returns the saturated blocks.
std::int64_t store_h(const Kernel& kernel, const float* gate, const float* h, std::int64_t r,
                     std::int64_t column, std::int64_t count, L1Output mode, const ActivationRows& out) {
  bf16 rounded[kMaxColumns];
  kernel.rows->to_bf16(h, count, rounded);
  switch (mode) {
    case L1Output::kInterleavedBf16: {
      bf16 rounded_gate[kMaxColumns];
      kernel.rows->to_bf16(gate, count, rounded_gate);
      bf16* row = out.values + r * out.row_stride + 2 * column;
      for (std::int64_t i = 0; i < count; i += 8) {
        std::copy_n(rounded_gate + i, 8, row + 2 * i);
        std::copy_n(rounded + i, 8, row + 2 * i + 8);
      }
      return 0;
    }
    case L1Output::kCompactBf16:
      std::copy_n(rounded, count, out.values + r * out.row_stride + column);
      return 0;
    case L1Output::kFp8: {
      const std::int64_t tiles = (out.cols + kFp8Tile - 1) / kFp8Tile;
      out.scales[r * tiles + column / kFp8Tile] =
          quantize_fp8_tile(rounded, count, out.codes + r * out.cols + column);
      return 0;
    }
    case L1Output::kNvfp4: break;
  }
  const std::int64_t first = r * out.cols + column;
  return kernel.quantize_row(rounded, out.scales[r], count / kNvfp4Block, out.codes + first / 2,
                             out.block_scales + first / kNvfp4Block);
}

// First GEMM and activation of some batches. `row_map` (or null) leads from a batch's rows to those of x.
std::int64_t up_and_gate(const Kernel& kernel, const std::vector<RowBatch>& batches,
                         const ActivationConfig& activation, const ActivationRows& x,
                         const std::int32_t* row_map, L1Output mode, const ActivationRows& out) {
  if (batches.empty()) return 0;
  const int matrices = activation.gated() ? 2 : 1;
  const std::int64_t panels_of_h = batches.front().expert->up.rows() / kPanel;
  const std::int64_t width =
      mode == L1Output::kFp8
          ? kFp8Panels
          : std::min(kMaxPanels / 2, panels_of_item(kernel, batches, panels_of_h * matrices) / matrices);
  std::atomic<std::int64_t> saturated = 0;
  for_each_item(batches, panels_of_h, width, x.cols * matrices,
                [&](const RowBatch& batch, std::int64_t first_panel, std::int64_t panels) {
                  const PackedExpert& expert = *batch.expert;
                  const Slab slab{.matrices = {matrices == 2 ? &expert.gate : &expert.up, &expert.up},
                                  .num_matrices = matrices,
                                  .first_panel = first_panel,
                                  .panels = panels,
                                  .x = &x,
                                  .row_map = row_map,
                                  .first_row = batch.first,
                                  .rows = batch.count};
                  const Sums sums = multiply(kernel, slab);
                  std::int64_t count = 0;
                  for (std::int64_t i = 0; i < batch.count; ++i) {
                    float gate[kMaxColumns], up[kMaxColumns], h[kMaxColumns];
                    if (matrices == 2) finish_row(kernel, sums, 0, i, gate);
                    finish_row(kernel, sums, matrices - 1, i, up);
                    kernel.rows->activate(activation, gate, up, panels * kPanel, h);
                    count += store_h(kernel, gate, h, batch.first + i, first_panel * kPanel, panels * kPanel,
                                     mode, out);
                  }
                  if (count != 0) saturated += count;
                });
  return saturated;
}

// Second GEMM of some batches; out [rows, H].
void down(const Kernel& kernel, const std::vector<RowBatch>& batches, const ActivationRows& h, float* out) {
  if (batches.empty()) return;
  const std::int64_t hidden = batches.front().expert->down.rows(), panels = hidden / kPanel;
  const std::int64_t width = panels_of_item(kernel, batches, panels);
  for_each_item(batches, panels, width, h.cols,
                [&](const RowBatch& batch, std::int64_t first_panel, std::int64_t count) {
                  const Slab slab{.matrices = {&batch.expert->down, nullptr},
                                  .num_matrices = 1,
                                  .first_panel = first_panel,
                                  .panels = count,
                                  .x = &h,
                                  .row_map = nullptr,
                                  .first_row = batch.first,
                                  .rows = batch.count};
                  const Sums sums = multiply(kernel, slab);
                  for (std::int64_t i = 0; i < batch.count; ++i) {
                    finish_row(kernel, sums, 0, i, out + (batch.first + i) * hidden + first_panel * kPanel);
                  }
                });
}

class CpuLayer final : public PreparedLayer {
 public:
  explicit CpuLayer(const LayerWeights& weights)
      : kernel_(chosen_kernel()),
        config_(weights.config),
        name_(weights.name),
        shared_activation_(weights.shared.activation) {
    // All in one piece of memory, which then is in huge pages.
    std::vector<std::int64_t> offsets = {0};
    for (const ExpertWeights& w : weights.experts) {
      offsets.push_back(checked_add(offsets.back(), PackedExpert::bytes_of(w)));
    }
    const bool shared = weights.shared.present;
    memory_ = AlignedBuffer<std::uint8_t>(
        checked_add(offsets.back(), shared ? PackedExpert::bytes_of(weights.shared.weights) : 0));
    experts_.resize(weights.experts.size());
    const auto pack = [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t e = begin; e < end; ++e) {
        const auto i = static_cast<std::size_t>(e);
        experts_[i] = std::make_unique<const PackedExpert>(weights.experts[i], memory_.data() + offsets[i]);
      }
    };
    parallel_for(static_cast<std::int64_t>(experts_.size()), 1, pack);
    if (!shared) return;
    shared_ = std::make_unique<const PackedExpert>(weights.shared.weights, memory_.data() + offsets.back());
    if (weights.shared.gate != nullptr) {
      shared_gate_.assign(weights.shared.gate, weights.shared.gate + config_.hidden);
    }
  }

  const LayerConfig& config() const override { return config_; }

  std::int64_t gemm1(const ActivationRows& x, bool x_is_gathered, const Routing& routing, L1Output mode,
                     const ActivationRows& out) const override {
    if (mode == L1Output::kInterleavedBf16 && !config_.activation.gated()) {
      fail(ErrorCode::kUnsupported, "interleaved output needs an activation with a gate, got {}",
           to_string(config_.activation.kind));
    }
    if (config_.activation.gated()) check_format(x.format, routing, &PackedExpert::gate, "gate");
    check_format(x.format, routing, &PackedExpert::up, "up");
    return up_and_gate(kernel_, batches_of(routing), config_.activation, x,
                       x_is_gathered ? nullptr : routing.row_to_token, mode, out);
  }

  void gemm2(const ActivationRows& h, const Routing& routing, float* out) const override {
    check_format(h.format, routing, &PackedExpert::down, "down");
    down(kernel_, batches_of(routing), h, out);
  }

  void shared_expert(const ActivationRows& x, float* out) const override {
    constexpr std::int64_t kRows = 4 * kMaxRows;  // at a time, to bound the memory for h
    const std::int64_t intermediate = shared_->up.rows();
    thread_local std::vector<bf16> h_values;
    thread_local std::vector<RowBatch> batches;
    h_values.resize(static_cast<std::size_t>(std::min(kRows, x.rows) * intermediate));
    for (std::int64_t first = 0; first < x.rows; first += kRows) {
      ActivationRows rows = x;
      rows.rows = std::min(kRows, x.rows - first);
      rows.values = x.values + first * x.row_stride;
      const ActivationRows h{
          .rows = rows.rows, .cols = intermediate, .row_stride = intermediate, .values = h_values.data()};
      batches.clear();
      append_batches(*shared_, 0, rows.rows, batches);
      up_and_gate(kernel_, batches, shared_activation_, rows, nullptr, L1Output::kCompactBf16, h);
      down(kernel_, batches, h, out + first * config_.hidden);
    }
    if (!shared_gate_.empty()) apply_shared_gate(x, out);
  }

 private:
  // The caller's list, used by all threads until the operation ends.
  const std::vector<RowBatch>& batches_of(const Routing& routing) const {
    thread_local std::vector<RowBatch> batches;
    batches.clear();
    for (std::size_t e = 0; e < experts_.size(); ++e) {
      append_batches(*experts_[e], routing.offsets[e], routing.offsets[e + 1], batches);
    }
    return batches;
  }

  void check_format(ActivationFormat format, const Routing& routing, PackedMatrix PackedExpert::*matrix,
                    std::string_view what) const {
    if (format == ActivationFormat::kBf16) return;
    for (std::size_t e = 0; e < experts_.size(); ++e) {
      const WeightFormat weights = ((*experts_[e]).*matrix).format();
      if (weights == WeightFormat::kNvfp4 || routing.offsets[e] == routing.offsets[e + 1]) continue;
      fail(ErrorCode::kUnsupported,
           "activations in {} need NVFP4 weights, but {}, expert {}, {} is {}; use bf16 activations",
           to_string(format), name_, e, what, to_string(weights));
    }
  }

  // out[t] *= sigmoid(x[t] . gate), the dot product in FP64.
  void apply_shared_gate(const ActivationRows& x, float* out) const {
    const std::int64_t hidden = config_.hidden;
    const auto piece = [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t) {
        const bf16* row = x.values + t * x.row_stride;
        double sum = 0.0;
        for (std::int64_t k = 0; k < hidden; ++k) {
          sum += static_cast<double>(to_float(row[k])) *
                 static_cast<double>(shared_gate_[static_cast<std::size_t>(k)]);
        }
        const float factor = megamoe::sigmoid_f32(static_cast<float>(sum));
        for (std::int64_t c = 0; c < hidden; ++c) out[t * hidden + c] *= factor;
      }
    };
    parallel_for(x.rows, 8, std::ref(piece));
  }

  const Kernel& kernel_;
  LayerConfig config_;
  std::string name_;
  AlignedBuffer<std::uint8_t> memory_;  // of all packed weights
  std::vector<std::unique_ptr<const PackedExpert>> experts_;
  std::unique_ptr<const PackedExpert> shared_;  // null where there is none
  ActivationConfig shared_activation_;
  std::vector<float> shared_gate_;  // [H], or empty
};

}  // namespace

std::unique_ptr<PreparedLayer> prepare(const LayerWeights& weights) {
  return std::make_unique<CpuLayer>(weights);
}

}  // namespace megamoe::cpu
