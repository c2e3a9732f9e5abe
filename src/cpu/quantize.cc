// quantize.cc: rows of BF16 into NVFP4 and FP8.
#include <algorithm>
#include <atomic>
#include <functional>

#include "base/parallel.h"
#include "cpu/codecs.h"
#include "cpu/kernels.h"
#include "cpu/operations.h"

namespace megamoe::cpu {
namespace {

// The rows worth a piece of work of their own.
std::int64_t row_grain(std::int64_t cols) {
  return std::max<std::int64_t>(1, (32 << 10) / std::max<std::int64_t>(cols, 1));
}

// Adds up body(row). std::ref: a std::function of the body itself would allocate.
template <class Body>
std::int64_t sum_over_rows(std::int64_t rows, std::int64_t cols, const Body& body) {
  std::atomic<std::int64_t> total = 0;
  const auto piece = [&](std::int64_t begin, std::int64_t end) {
    std::int64_t sum = 0;
    for (std::int64_t r = begin; r < end; ++r) sum += body(r);
    total += sum;
  };
  parallel_for(rows, row_grain(cols), std::ref(piece));
  return total;
}

}  // namespace

std::int64_t quantize(const ActivationRows& x, const std::int32_t* row_map, const ActivationRows& out) {
  const std::int64_t blocks = out.cols / kNvfp4Block;
  const Kernel& kernel = chosen_kernel();
  return sum_over_rows(out.rows, out.cols, [&](std::int64_t r) {
    const bf16* row = x.values + (row_map == nullptr ? r : row_map[r]) * x.row_stride;
    return kernel.quantize_row(row, out.scales[r], blocks, out.codes + r * (out.cols / 2),
                               out.block_scales + r * blocks);
  });
}

void quantize_fp8(const ActivationRows& x, const ActivationRows& out) {
  const std::int64_t tiles = (x.cols + kFp8Tile - 1) / kFp8Tile;
  sum_over_rows(x.rows, x.cols, [&](std::int64_t r) {
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      const std::int64_t first = tile * kFp8Tile;
      out.scales[r * tiles + tile] =
          quantize_fp8_tile(x.values + r * x.row_stride + first,
                            std::min<std::int64_t>(kFp8Tile, x.cols - first), out.codes + r * x.cols + first);
    }
    return std::int64_t{0};
  });
}

std::int64_t deinterleave_quantize(const ActivationRows& x, const ActivationRows& out) {
  const std::int64_t blocks = out.cols / kNvfp4Block;
  const Kernel& kernel = chosen_kernel();
  return sum_over_rows(out.rows, out.cols, [&](std::int64_t r) {
    std::int64_t saturated = 0;
    for (std::int64_t b = 0; b < blocks; ++b) {
      // A block of h is the up columns of two groups: 8 of gate, 8 of up, 8 of gate, 8 of up.
      const bf16* groups = x.values + r * x.row_stride + 2 * b * kNvfp4Block;
      bf16 up[kNvfp4Block];
      std::copy_n(groups + 8, 8, up);
      std::copy_n(groups + 24, 8, up + 8);
      saturated +=
          kernel.quantize_row(up, out.scales[r], 1, out.codes + r * (out.cols / 2) + b * (kNvfp4Block / 2),
                              out.block_scales + r * blocks + b);
    }
    return saturated;
  });
}

void row_amax(const ActivationRows& x, float* amax) {
  sum_over_rows(x.rows, x.cols, [&](std::int64_t r) {
    amax[r] = finite_amax(x.values + r * x.row_stride, x.cols);
    return std::int64_t{0};
  });
}

void deinterleave_row_amax(const ActivationRows& x, float* amax) {
  sum_over_rows(x.rows, x.cols, [&](std::int64_t r) {
    amax[r] = 0.0f;
    for (std::int64_t group = 0; group < x.cols; group += 16) {  // 8 of gate, 8 of up
      amax[r] = std::max(amax[r], finite_amax(x.values + r * x.row_stride + group + 8, 8));
    }
    return std::int64_t{0};
  });
}

}  // namespace megamoe::cpu
