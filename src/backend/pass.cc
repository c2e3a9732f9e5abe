#include "backend/pass.h"

#include "base/check.h"
#include "numerics/fp8_tile.h"
#include "numerics/nvfp4.h"

namespace megamoe {
namespace {

ActivationRows take_rows(Arena& arena, ActivationFormat format, std::int64_t rows, std::int64_t cols,
                         std::int64_t experts, bool nvfp4_decoded) {
  ActivationRows result{.format = format, .rows = rows, .cols = cols, .row_stride = cols};
  switch (format) {
    case ActivationFormat::kBf16: result.values = arena.take<bf16>(rows, cols); break;
    case ActivationFormat::kFp8: {
      const std::int64_t groups = (cols + kFp8Tile - 1) / kFp8Tile;
      result.codes = arena.take<std::uint8_t>(rows, groups * kFp8Tile);
      result.scales = arena.take<float>(checked_add(rows, 4 * (experts + 1)), groups);
      break;
    }
    case ActivationFormat::kNvfp4:
      if (!nvfp4_decoded) {
        result.codes = arena.take<std::uint8_t>(rows, cols / 2);
        result.block_scales = arena.take<std::uint8_t>(rows, cols / kNvfp4Block);
      }
      result.scales = arena.take<float>(rows);
      break;
  }
  return result;
}

}  // namespace

std::byte* Arena::take_bytes(std::int64_t rows, std::int64_t cols, std::int64_t size) {
  const std::int64_t bytes = checked_mul(checked_mul(rows, cols), size);
  std::byte* piece = base_ != nullptr ? base_ + used_ : nullptr;
  used_ = checked_add(used_, checked_add(bytes, alignment_ - 1) / alignment_ * alignment_);
  return piece;
}

PassBuffers take_buffers(Arena& arena, const LayerConfig& config, const PassOptions& options,
                         std::int64_t tokens, const BufferNeeds& needs) {
  const std::int64_t rows = checked_mul(tokens, config.top_k);
  const auto take = [&](ActivationFormat format, std::int64_t count, std::int64_t cols) {
    return take_rows(arena, format, count, cols, config.num_experts, needs.nvfp4_decoded);
  };
  PassBuffers b;
  b.routing = {.tokens = tokens, .top_k = config.top_k, .num_experts = config.num_experts};
  b.routing.offsets = arena.take<std::int64_t>(config.num_experts + 1);
  b.routing.row_to_token = arena.take<std::int32_t>(rows);
  b.routing.row_to_slot = arena.take<std::int32_t>(rows);
  if (options.activations == ActivationFormat::kNvfp4) b.amax = arena.take<float>(rows);
  if (options.activations != ActivationFormat::kBf16) {
    b.x = take(options.activations, needs.x_per_row ? rows : tokens, config.hidden);
  }
  if (!options.h_fused()) {
    b.h_bf16 = take(ActivationFormat::kBf16, rows,
                    config.intermediate * (options.l1 == L1Output::kInterleavedBf16 ? 2 : 1));
  }
  b.h = take(options.activations, rows, config.intermediate);
  b.expert_out = arena.take<float>(rows, config.hidden);
  if (needs.shared) b.shared_out = arena.take<float>(tokens, config.hidden);
  return b;
}

}  // namespace megamoe
