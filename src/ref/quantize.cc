// quantize.cc: BF16 rows into NVFP4 and FP8 rows.
#include <algorithm>
#include <array>
#include <atomic>
#include <vector>

#include "base/parallel.h"
#include "numerics/bf16.h"
#include "numerics/fp8_tile.h"
#include "numerics/nvfp4.h"
#include "ref/operations.h"

namespace megamoe::ref {
namespace {

std::int64_t store_nvfp4(const bf16* x, std::int64_t r, const ActivationRows& out) {
  std::int64_t saturated = 0;
  for (std::int64_t block = 0; block < out.cols / kNvfp4Block; ++block) {
    std::array<float, kNvfp4Block> values;
    for (int i = 0; i < kNvfp4Block; ++i) {
      values[static_cast<std::size_t>(i)] = to_float(x[block * kNvfp4Block + i]);
    }
    const Nvfp4Scale scale = nvfp4_quantize_block(values.data(), out.scales[r],
                                                  out.codes + r * (out.cols / 2) + block * (kNvfp4Block / 2));
    out.block_scales[r * (out.cols / kNvfp4Block) + block] = scale.code;
    saturated += scale.saturated ? 1 : 0;
  }
  return saturated;
}

float finite_magnitude(bf16 x) {
  const float value = to_float(x);
  return is_finite(value) ? magnitude(value) : 0.0f;
}

// The columns of interleaved row r that hold h.
std::vector<bf16> up_columns(const ActivationRows& x, std::int64_t r) {
  std::vector<bf16> up(static_cast<std::size_t>(x.cols / 2));
  for (std::int64_t i = 0; i < x.cols / 2; ++i) {
    up[static_cast<std::size_t>(i)] = x.values[r * x.row_stride + i / 8 * 16 + 8 + i % 8];
  }
  return up;
}

void store_fp8(const bf16* x, std::int64_t r, const ActivationRows& out) {
  const std::int64_t tiles = (out.cols + kFp8Tile - 1) / kFp8Tile;
  for (std::int64_t tile = 0; tile < tiles; ++tile) {
    const std::int64_t first = tile * kFp8Tile, last = std::min(first + kFp8Tile, out.cols);
    float amax = 0.0f;
    for (std::int64_t k = first; k < last; ++k) amax = std::max(amax, finite_magnitude(x[k]));
    const float d = fp8_tile_scale(amax);
    out.scales[r * tiles + tile] = d;
    for (std::int64_t k = first; k < last; ++k) out.codes[r * out.cols + k] = fp8_code(to_float(x[k]), d);
  }
}

// Adds up body(row) over all rows, of `cols` elements each.
template <class Body>
std::int64_t sum_over_rows(std::int64_t rows, std::int64_t cols, const Body& body) {
  std::atomic<std::int64_t> total = 0;
  parallel_for(rows, grain(cols), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) total += body(r);
  });
  return total;
}

}  // namespace

std::int64_t store_row(const bf16* x, std::int64_t r, const ActivationRows& out) {
  switch (out.format) {
    case ActivationFormat::kBf16: std::copy_n(x, out.cols, out.values + r * out.row_stride); return 0;
    case ActivationFormat::kFp8: store_fp8(x, r, out); return 0;
    case ActivationFormat::kNvfp4: return store_nvfp4(x, r, out);
  }
  return 0;
}

std::int64_t quantize(const ActivationRows& x, const std::int32_t* row_map, const ActivationRows& out) {
  return sum_over_rows(out.rows, out.cols, [&](std::int64_t r) {
    const std::int64_t from = row_map == nullptr ? r : row_map[r];
    return store_row(x.values + from * x.row_stride, r, out);
  });
}

void quantize_fp8(const ActivationRows& x, const ActivationRows& out) {
  sum_over_rows(x.rows, x.cols,
                [&](std::int64_t r) { return store_row(x.values + r * x.row_stride, r, out); });
}

std::int64_t deinterleave_quantize(const ActivationRows& x, const ActivationRows& out) {
  return sum_over_rows(x.rows, x.cols,
                       [&](std::int64_t r) { return store_row(up_columns(x, r).data(), r, out); });
}

void row_amax(const ActivationRows& x, float* amax) {
  for (std::int64_t r = 0; r < x.rows; ++r) {
    amax[r] = 0.0f;
    for (std::int64_t k = 0; k < x.cols; ++k) {
      amax[r] = std::max(amax[r], finite_magnitude(x.values[r * x.row_stride + k]));
    }
  }
}

void deinterleave_row_amax(const ActivationRows& x, float* amax) {
  for (std::int64_t r = 0; r < x.rows; ++r) {
    amax[r] = 0.0f;
    for (const bf16 value : up_columns(x, r)) amax[r] = std::max(amax[r], finite_magnitude(value));
  }
}

}  // namespace megamoe::ref
