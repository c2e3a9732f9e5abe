#include "engine/workspace.h"

#include "base/aligned_buffer.h"
#include "base/check.h"
#include "numerics/fp8_tile.h"
#include "numerics/nvfp4.h"

namespace megamoe {
namespace {

// Hands out aligned pieces of a block, or only counts them.
class Arena {
 public:
  explicit Arena(std::byte* base) : base_(base) {}

  template <class T>
  T* take(std::int64_t rows, std::int64_t cols = 1) {
    const std::int64_t bytes = checked_mul(checked_mul(rows, cols), sizeof(T));
    T* piece = base_ != nullptr ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ = checked_add(used_, checked_add(bytes, kCacheLine - 1) / kCacheLine * kCacheLine);
    return piece;
  }
  std::int64_t used() const { return used_; }

 private:
  std::byte* base_;
  std::int64_t used_ = 0;
};

ActivationRows take_rows(Arena& arena, ActivationFormat format, std::int64_t rows, std::int64_t cols) {
  ActivationRows result{.format = format, .rows = rows, .cols = cols, .row_stride = cols};
  switch (format) {
    case ActivationFormat::kBf16: result.values = arena.take<bf16>(rows, cols); break;
    case ActivationFormat::kFp8:
      result.codes = arena.take<std::uint8_t>(rows, cols);
      result.scales = arena.take<float>(rows, (cols + kFp8Tile - 1) / kFp8Tile);
      break;
    case ActivationFormat::kNvfp4:
      result.codes = arena.take<std::uint8_t>(rows, cols / 2);
      result.block_scales = arena.take<std::uint8_t>(rows, cols / kNvfp4Block);
      result.scales = arena.take<float>(rows);
      break;
  }
  return result;
}

}  // namespace

PassPlan plan_pass(const LayerConfig& config, const MoeLayerOptions& options, std::int64_t tokens) {
  const bool nvfp4 = options.activations == ActivationFormat::kNvfp4;
  const bool static_h =
      options.h_scale == ScaleSource::kStatic || options.h_scale == ScaleSource::kStaticLayerMax;
  return {
      .tokens = tokens,
      .rows = checked_mul(tokens, config.top_k),
      .x_per_row = nvfp4 && options.x_scale == ScaleSource::kStatic,
      .h_fused = options.activations == ActivationFormat::kBf16 ||
                 (options.l1 == MoeLayerOptions::L1::kFused && (!nvfp4 || static_h)),
      .h_interleaved = options.l1 == MoeLayerOptions::L1::kInterleaved,
  };
}

Workspace lay_out(const LayerConfig& config, const MoeLayerOptions& options, const PassPlan& plan,
                  bool shared, std::byte* base) {
  Arena arena(base);
  Workspace w;
  w.ids = arena.take<std::int32_t>(plan.tokens, config.top_k);
  w.weights = arena.take<float>(plan.tokens, config.top_k);
  w.routing = {.tokens = plan.tokens, .top_k = config.top_k, .num_experts = config.num_experts};
  w.routing.offsets = arena.take<std::int64_t>(config.num_experts + 1);
  w.routing.row_to_token = arena.take<std::int32_t>(plan.rows);
  w.routing.row_to_slot = arena.take<std::int32_t>(plan.rows);
  if (options.activations == ActivationFormat::kNvfp4) w.amax = arena.take<float>(plan.rows);
  if (options.activations != ActivationFormat::kBf16) {
    w.x = take_rows(arena, options.activations, plan.x_per_row ? plan.rows : plan.tokens, config.hidden);
  }
  if (!plan.h_fused) {
    w.h_bf16 = take_rows(arena, ActivationFormat::kBf16, plan.rows,
                         config.intermediate * (plan.h_interleaved ? 2 : 1));
  }
  w.h = take_rows(arena, options.activations, plan.rows, config.intermediate);
  w.expert_out = arena.take<float>(plan.rows, config.hidden);
  if (shared) w.shared_out = arena.take<float>(plan.tokens, config.hidden);
  w.bytes = arena.used();
  return w;
}

}  // namespace megamoe
