// slab_loop.h: the loop around every kernel: decode a chunk of columns of all panels, then run all rows of x
// over it while it is in the cache.
//
// A Kernel has  kTile            rows of x that share a load of the weights
//               WeightChunk      kChunk columns of a panel, decoded;  XChunk: of a tile of rows of x
//               decode_weights(slab, matrix, panel, column, count, WeightChunk&)
//               decode_x(x, row, column, count, i, XChunk&)   as row i of the tile
//               multiply(rows, weights, x, count, sums)       sums [rows, 16] += the chunk's
#pragma once

#include <algorithm>

#include "base/aligned_buffer.h"
#include "cpu/gemm.h"

namespace megamoe::cpu {

template <class Kernel>
void multiply_slab(const Sums& sums) {
  thread_local AlignedBuffer<typename Kernel::WeightChunk> chunks(kMaxPanels);
  const Slab& slab = sums.slab;
  const std::int64_t cols = slab.x->cols;
  std::fill_n(sums.values, slab.num_matrices * slab.panels * slab.rows * kPanel, 0.0f);
  for (std::int64_t column = 0; column < cols; column += kChunk) {
    const std::int64_t count = std::min(kChunk, cols - column);
    for (int m = 0; m < slab.num_matrices; ++m) {
      for (std::int64_t p = 0; p < slab.panels; ++p) {
        Kernel::decode_weights(slab, *slab.matrices[m], slab.first_panel + p, column, count,
                               chunks[m * slab.panels + p]);
      }
    }
    typename Kernel::XChunk x;
    for (std::int64_t first = 0; first < slab.rows; first += Kernel::kTile) {
      const std::int64_t rows = std::min(Kernel::kTile, slab.rows - first);
      for (std::int64_t i = 0; i < rows; ++i) {
        Kernel::decode_x(*slab.x, slab.x_row(first + i), column, count, i, x);
      }
      for (int m = 0; m < slab.num_matrices; ++m) {
        for (std::int64_t p = 0; p < slab.panels; ++p) {
          Kernel::multiply(rows, chunks[m * slab.panels + p], x, count, sums.at(m, p, first));
        }
      }
    }
  }
}

}  // namespace megamoe::cpu
