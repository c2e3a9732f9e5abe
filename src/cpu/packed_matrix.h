// packed_matrix.h: a weight matrix in panels of 16 output rows, in the order in which the GEMM reads it.
//
// Panels    rows 16p .. 16p+15 of the matrix lie together, so that a vector's lanes are output rows and no
//           sum is ever split. Rows and columns are multiples of 16: there are no tails.
// NVFP4     for each block of 16 columns, 144 bytes: 16 scales, one a row, then 8 times 16 bytes of codes.
//           Byte j of the q-th 16 is the checkpoint's own byte q of row j: columns 2q (low) and 2q+1 (high).
//
//             | s0 .. s15 | row0..row15, columns 0 1 | row0..row15, columns 2 3 | ... | columns 14 15 |
//
// BF16, FP32  for each column the 16 values of the rows.
#pragma once

#include <cstdint>

#include "base/aligned_buffer.h"
#include "megamoe/layer.h"
#include "numerics/nvfp4.h"

namespace megamoe::cpu {

inline constexpr std::int64_t kPanel = 16;
inline constexpr std::int64_t kPackedBlockBytes = kPanel + kPanel * kNvfp4Block / 2;

class PackedMatrix {
 public:
  PackedMatrix() = default;
  PackedMatrix(const WeightMatrix& matrix, const float* bias);  // copies both

  WeightFormat format() const { return format_; }
  std::int64_t rows() const { return rows_; }
  std::int64_t cols() const { return cols_; }
  float tensor_scale() const { return tensor_scale_; }  // 1 for BF16 and FP32
  const float* bias() const { return bias_.data(); }    // [rows] or null
  // Column `column` (a multiple of 16) of panel `panel`.
  const std::uint8_t* at(std::int64_t panel, std::int64_t column) const;

 private:
  WeightFormat format_ = WeightFormat::kNvfp4;
  std::int64_t rows_ = 0;
  std::int64_t cols_ = 0;
  float tensor_scale_ = 1.0f;
  AlignedBuffer<std::uint8_t> data_;
  AlignedBuffer<float> bias_;
};

}  // namespace megamoe::cpu
