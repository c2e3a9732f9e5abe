// packed_matrix.h: a weight matrix in panels of 16 output rows, in the order in which the GEMM reads it.
//
// Panels    rows 16p .. 16p+15 of the matrix lie together, so that a vector's lanes are output rows and no
//           sum is ever split. Rows and columns are multiples of 16: there are no tails.
// NVFP4     for each group of 64 columns (or what is left at the end) the scales of its 1 to 4 blocks, 16 a
// block, one for
//           each row, then each block's 128 bytes of codes. 576 bytes a group: 9 lines of memory, 4.5 bits a
//           weight.
//
//             | block 0: s0 .. s15 | block 1 | block 2 | block 3 | block 0: codes | block 1 | block 2 | block
//             3 |
//
//           Byte 4r + i of a block's first 64 holds row r's columns i (low) and 4 + i (high); of its second
//           64, columns 8 + i and 12 + i. A 32-bit lane thus has 4 neighbouring columns of a row, what a
//           dot-product instruction of bytes adds up; wider vectors hold more rows.
// BF16, FP32  for each column the 16 values of the rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/aligned_buffer.h"
#include "megamoe/layer.h"
#include "numerics/nvfp4.h"

namespace megamoe::cpu {

inline constexpr std::int64_t kPanel = 16;
inline constexpr std::int64_t kPackedGroup = 4;  // blocks whose scales stand together
inline constexpr std::int64_t kPackedCodeBytes = kPanel * kNvfp4Block / 2;
inline constexpr std::int64_t kPackedBlockBytes = kPanel + kPackedCodeBytes;

// Calls body(block, scales, codes) for `blocks` blocks of packed NVFP4 that begin at a group and end at one
// or at the end of the panel. Byte is std::uint8_t, const or not.
template <class Byte, class Body>
void for_each_packed_block(Byte* packed, std::int64_t blocks, const Body& body) {
  for (std::int64_t first = 0; first < blocks; first += kPackedGroup) {
    const std::int64_t group = std::min(kPackedGroup, blocks - first);
    Byte* codes = packed + group * kPanel;
    for (std::int64_t b = 0; b < group; ++b)
      body(first + b, packed + b * kPanel, codes + b * kPackedCodeBytes);
    packed += group * kPackedBlockBytes;
  }
}

class PackedMatrix {
 public:
  PackedMatrix() = default;
  // Copies both; the matrix into bytes_of(matrix) bytes at `memory`, on a cache line, or into memory of its
  // own.
  PackedMatrix(const WeightMatrix& matrix, const float* bias, std::uint8_t* memory = nullptr);
  static std::int64_t bytes_of(const WeightMatrix& matrix);

  WeightFormat format() const { return format_; }
  std::int64_t rows() const { return rows_; }
  std::int64_t cols() const { return cols_; }
  float tensor_scale() const { return tensor_scale_; }  // 1 for BF16 and FP32
  const float* bias() const { return bias_.data(); }    // [rows] or null
  // Column `column` (a multiple of 64) of panel `panel`.
  const std::uint8_t* at(std::int64_t panel, std::int64_t column) const;

 private:
  WeightFormat format_ = WeightFormat::kNvfp4;
  std::int64_t rows_ = 0;
  std::int64_t cols_ = 0;
  float tensor_scale_ = 1.0f;
  const std::uint8_t* data_ = nullptr;
  AlignedBuffer<std::uint8_t> own_;
  AlignedBuffer<float> bias_;
};

}  // namespace megamoe::cpu
