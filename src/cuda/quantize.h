// quantize.h: rows to NVFP4 and back on the GPU, bit for bit what numerics/nvfp4.h defines.
//
// Launchers: raw device pointers, sizes, a stream; nothing is allocated or waited for. Columns are multiples
// of 16. Rows of an input may lie any distance apart and at any element; multiples of 16 bytes are fastest.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "megamoe/layer.h"
#include "megamoe/types.h"
#include "numerics/hd.h"

namespace megamoe::cuda {

// How many rows there are: a number, or a bound of one that is only known on the GPU. The grid covers the
// bound.
struct RowCount {
  RowCount(std::int64_t rows) : most(rows) {}
  RowCount(std::int64_t bound, const std::int64_t* on_gpu) : most(bound), actual(on_gpu) {}

  // On the GPU: how many there are.
  MEGAMOE_HD std::int64_t count() const { return actual != nullptr ? *actual : most; }

  std::int64_t most;
  const std::int64_t* actual = nullptr;  // [1] at most `most`, or null: `most`
};

enum class ElementType { kBf16, kFp16, kF32 };

// An input matrix.
struct ElementRows {
  ElementType type = ElementType::kBf16;
  const void* data = nullptr;
  std::int64_t row_stride = 0;  // elements from row to row
};

// Rows that are (token, slot) pairs: row r is token r / top_k of the input, under its expert's tensor scale.
struct PairRows {
  const std::int32_t* ids = nullptr;  // [rows], and the next; a pair of no expert or of weight 0 has no row
  const float* weights = nullptr;
  int top_k = 1;
  int experts = 0;
  const float* tensor_scales = nullptr;  // [experts]
};

// An NVFP4 result: codes and scales, or what they stand for.
struct Nvfp4Out {
  std::uint8_t* codes = nullptr;            // [rows, cols / 2], 8-byte aligned
  std::uint8_t* scales = nullptr;           // [rows, cols / 16]
  float* tensor_scales = nullptr;           // [rows]: read where they are given, else written
  unsigned long long* saturated = nullptr;  // blocks cut to 448 are added here; may be null
  float constant = 0.0f;                    // kConstant: the tensor scale of every row
  PairRows pairs = {};                      // kOfExpert
  // Not null: instead of codes and scales their products, without the tensor scale exact in BF16 [*, cols],
  // 16-byte aligned; of each row as many copies as slot_to_row [rows, copies] has rows that are not negative,
  // there; or, with null, one at the row itself.
  bf16* values = nullptr;
  const std::int32_t* slot_to_row = nullptr;
  int copies = 1;
  // Not null: grows by one for each row once that is there, and the next kernel may begin at once. The kernel
  // ahead waits for the one before it (await_previous_kernel) and touches nothing that this one reads or
  // writes but this counter, before it lets this one begin, which waits for it at its end alone.
  std::uint32_t* rows_done = nullptr;
};

enum class TensorScales {
  kGiven,       // out.tensor_scales are read
  kConstant,    // out.constant is used for every row and written
  kOfExpert,    // as out.pairs says; out.tensor_scales may be null
  kDynamicRow,  // each row's amax / 2688 is used and written
};

// `row_map` (or null): row r of the result is row row_map[r] of x.
cudaError_t quantize(const ElementRows& x, const std::int32_t* row_map, const RowCount& rows,
                     std::int64_t cols, TensorScales mode, const Nvfp4Out& out, cudaStream_t stream);

// x: BF16 [rows, 2 cols], gate and up alternating every 8 columns. Quantises the up columns.
cudaError_t deinterleave_quantize(const bf16* x, std::int64_t row_stride, const RowCount& rows,
                                  std::int64_t cols, TensorScales mode, const Nvfp4Out& out,
                                  cudaStream_t stream);

// h = act(gate, up), rounded to BF16, then quantised. gate is not read by relu2.
cudaError_t swiglu_quantize(const ActivationConfig& activation, const bf16* gate, std::int64_t gate_stride,
                            const bf16* up, std::int64_t up_stride, std::int64_t rows, std::int64_t cols,
                            TensorScales mode, const Nvfp4Out& out, cudaStream_t stream);

// An NVFP4 matrix to read.
struct Nvfp4In {
  const std::uint8_t* codes = nullptr;   // [rows, cols / 2], 8-byte aligned
  const std::uint8_t* scales = nullptr;  // [rows, cols / 16]
  const float* tensor_scales = nullptr;  // [rows], or [1]; null: 1, and a BF16 result is exact
  bool one_tensor_scale = false;
  const std::int32_t* row_map = nullptr;  // row r of the result is row row_map[r] of this one; null: r itself
};

// Values [rows, cols], contiguous, 16-byte aligned; kFp16 is not made.
cudaError_t dequantize(const Nvfp4In& x, const RowCount& rows, std::int64_t cols, ElementType type, void* out,
                       cudaStream_t stream);

// Largest finite magnitude of each row -> amax [rows].
cudaError_t row_amax(const ElementRows& x, const RowCount& rows, std::int64_t cols, float* amax,
                     cudaStream_t stream);
// The same of the up columns that deinterleave_quantize takes.
cudaError_t deinterleave_row_amax(const bf16* x, std::int64_t row_stride, const RowCount& rows,
                                  std::int64_t cols, float* amax, cudaStream_t stream);
// One tensor scale for each group of rows, from the largest of its rows' amax [*], into tensor_scales [*] of
// all its rows. Group g is rows offsets[g] .. offsets[g + 1]; with null offsets there is one group, rows 0 ..
// rows.
cudaError_t group_tensor_scales(const float* amax, const std::int64_t* offsets, int groups, std::int64_t rows,
                                float* tensor_scales, cudaStream_t stream);
// Of the whole matrix -> amax [1].
cudaError_t tensor_amax(const ElementRows& x, std::int64_t rows, std::int64_t cols, float* amax,
                        cudaStream_t stream);

}  // namespace megamoe::cuda
