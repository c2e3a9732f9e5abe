// fp8_rows.h: rows of E4M3 activations as the GEMMs read them, one for each routed row.
//
//   codes   [rows, fp8_row_bytes]      the columns of each 64 in the order of fp8_column_place, 0 beyond the
//                                      last
//   scales  [ceil(cols / 128), pitch]  FP32, by group of 128 columns; pitch = fp8_scale_pitch(rows, experts)
//
// Within a group an expert's scales begin at a multiple of 4 (fp8_scale_place), for there the copy engine can
// begin.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/quantize.h"
#include "megamoe/types.h"
#include "numerics/fp8_tile.h"
#include "numerics/hd.h"

namespace megamoe::sm90 {

MEGAMOE_HD constexpr std::int64_t fp8_groups(std::int64_t cols) { return (cols + kFp8Tile - 1) / kFp8Tile; }
MEGAMOE_HD constexpr std::int64_t fp8_row_bytes(std::int64_t cols) { return fp8_groups(cols) * kFp8Tile; }
MEGAMOE_HD constexpr std::int64_t fp8_scale_pitch(std::int64_t rows, std::int64_t experts) {
  return (rows + 3) / 4 * 4 + 4 * experts;
}
// Where in a group's scales the first of an expert's rows lies, which is row `first_row` of all: far enough
// behind those of the experts before.
MEGAMOE_HD constexpr std::int64_t fp8_scale_place(std::int64_t first_row, std::int64_t expert) {
  return (first_row + 3) / 4 * 4 + 4 * expert;
}

// Quantises rows of x [tokens, cols] and puts each where the routed rows that read it lie: those of
// slot_to_row [tokens, copies] that are not negative; or, with null, row t itself and one copy. Rows of x lie
// at multiples of 16 bytes.
struct Fp8Quantize {
  const bf16* x = nullptr;
  std::int64_t row_stride = 0;  // elements
  cuda::RowCount tokens = 0;
  std::int64_t cols = 0;  // a multiple of 16
  const std::int32_t* slot_to_row = nullptr;
  int copies = 1;
  // With slot_to_row, or null: the expert of each pair that has a row, else found among the offsets.
  const std::int32_t* ids = nullptr;      // [tokens, copies]
  const std::int64_t* offsets = nullptr;  // [experts + 1]: rows of each expert; or null, and there is one
  int experts = 1;
  std::int64_t most_rows = 0;  // that the result has room for
  std::uint8_t* codes = nullptr;
  float* scales = nullptr;
};
cudaError_t quantize_fp8(const Fp8Quantize& call, cudaStream_t stream);

}  // namespace megamoe::sm90
