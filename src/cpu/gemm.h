// gemm.h: sums of products for a slab: some panels of output rows times some rows of x. This is where other
// instruction sets come in (kernels.h); what stands around it (work items, epilogue) is the same for all.
//
// Every output is summed in one order that depends on nothing but the number of columns:
//   nvfp4  one FP32 accumulator; for each block, ascending, acc += dot * (s_w * s_x), dot an exact integer
//          and the products exact, so that each block costs one rounding
//   fp8    for each 128 columns an FP32 sum of exact products, times the token's scale, added in FP32
//   bf16   for each 128 columns an FP32 sum of products with x, added in FP32; with NVFP4 weights on AVX2 for
//          each block a sum of codes times x, times the block's scale, added
#pragma once

#include <cstdint>

#include "backend/backend.h"
#include "cpu/packed_matrix.h"

namespace megamoe::cpu {

inline constexpr std::int64_t kChunk = 128;      // columns decoded at once, and those of a sum as above
inline constexpr std::int64_t kMaxPanels = 128;  // of all matrices of a slab
// Likewise, where decoded weights are to stay in the first-level cache.
inline constexpr std::int64_t kUsualPanels = 4;
inline constexpr std::int64_t kMaxRows = 128;  // rows of x of a slab
// Sums of a slab, few enough for the second-level cache.
inline constexpr std::int64_t kMaxSums = 64 * kMaxRows * kPanel;

struct Slab {
  const PackedMatrix* matrices[2] = {};  // gate and up, or one alone
  int num_matrices = 0;
  std::int64_t first_panel = 0;  // the same of each matrix
  std::int64_t panels = 0;       // num_matrices * panels <= kMaxPanels
  const ActivationRows* x = nullptr;
  const std::int32_t* row_map = nullptr;  // or null: row i of the slab is row row_map[first_row + i] of x
  std::int64_t first_row = 0;
  std::int64_t rows = 0;  // <= kMaxRows; with all panels of all matrices at most kMaxSums sums

  std::int64_t x_row(std::int64_t i) const {
    return row_map == nullptr ? first_row + i : row_map[first_row + i];
  }
};

// The unscaled sums of a slab: at(m, p, i) are the 16 outputs of panel first_panel + p of matrix m for row i.
struct Sums {
  const Slab& slab;
  float* values;  // [num_matrices * panels, rows, 16]

  float* at(int matrix, std::int64_t panel, std::int64_t i) const {
    return values + ((matrix * slab.panels + panel) * slab.rows + i) * kPanel;
  }
};

void multiply_nvfp4(const Sums& sums);  // x in kNvfp4; the portable kernel
void multiply_f32(const Sums& sums);    // x in kBf16 or kFp8; likewise

// What the sums still have to be multiplied by, in this order, each with a rounding: for FP8 the 8 that
// folding took off, for NVFP4 the tensor scale of the row of x; then the weight's tensor scale.
inline float row_factor(const Slab& slab, std::int64_t i) {
  switch (slab.x->format) {
    case ActivationFormat::kBf16: break;
    case ActivationFormat::kFp8: return 8.0f;
    case ActivationFormat::kNvfp4: return slab.x->scales[slab.x_row(i)];
  }
  return 1.0f;
}

}  // namespace megamoe::cpu
