// stored_part.h: walks the stored elements of one expert matrix without believing their values.
#pragma once

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "checkpoint/model_index.h"
#include "numerics/bf16.h"
#include "numerics/e4m3.h"
#include "numerics/e8m0.h"
#include "numerics/fp16.h"

namespace megamoe {

// Whether `tensor` has a part for each expert; a single scale is all experts'.
inline bool holds_all_experts(const TensorRef& tensor, const ExpertMatrix& matrix) {
  return matrix.fused_experts && tensor.info->elements() > 1;
}

// The elements of `tensor` (the matrix's weight or block scales) that belong to `matrix`; of a packed type,
// its bytes. `rows_per_unit` is how many rows of the weight one stored row covers: 128 for FP8 blocks,
// else 1.
struct StoredPart {
  const std::byte* data = nullptr;
  std::int64_t first = 0, last = 0, step = 1;  // stored rows, both ends included
  std::int64_t stored_rows = 0;
  std::int64_t units = 0;  // elements of one stored row
  std::int64_t element_bytes = 1;
  bool transposed = false;

  StoredPart(const TensorRef& tensor, const ExpertMatrix& matrix, std::int64_t rows_per_unit = 1)
      : data(tensor.bytes().data()),
        element_bytes(std::max(bits_of(tensor.info->dtype) / 8, 1)),
        transposed(matrix.transposed) {
    const std::int64_t stored = matrix.stored_rows > 0 ? matrix.stored_rows : matrix.rows;
    std::int64_t elements = tensor.info->bytes() / element_bytes;
    if (holds_all_experts(tensor, matrix)) {
      MEGAMOE_CHECK(matrix.expert < tensor.info->shape[0]);
      elements /= tensor.info->shape[0];
      data += matrix.expert * elements * element_bytes;
    }
    if (elements <= 1) {  // one scale for all rows
      stored_rows = units = elements;
      last = elements - 1;
      return;
    }
    stored_rows = (stored + rows_per_unit - 1) / rows_per_unit;
    MEGAMOE_CHECK(stored_rows > 0 && elements % stored_rows == 0);
    units = elements / stored_rows;
    first = matrix.row_first / rows_per_unit;
    last = (matrix.row_first + (matrix.rows - 1) * matrix.row_step) / rows_per_unit;
    step = rows_per_unit > 1 ? 1 : matrix.row_step;
  }

  // Calls f(pointer to the element) until it returns false.
  template <class F>
  void for_each(F f) const {
    for (std::int64_t r = first; r <= last; r += step) {
      for (std::int64_t u = 0; u < units; ++u) {
        const std::int64_t at = transposed ? u * stored_rows + r : r * units + u;
        if (!f(data + at * element_bytes)) return;
      }
    }
  }
};

// The value of one element of a float tensor; U8 counts as E8M0, which is how MXFP4 scales come.
inline float stored_value(DType dtype, const std::byte* element) {
  const auto read = [element]<class T>(T value) {
    std::memcpy(&value, element, sizeof(value));
    return value;
  };
  switch (dtype) {
    case DType::kF64: return static_cast<float>(read(0.0));
    case DType::kF32: return read(0.0f);
    case DType::kF16: return to_float(read(fp16{}));
    case DType::kBF16: return to_float(read(bf16{}));
    case DType::kE4M3: return decode_e4m3(read(std::uint8_t{0}));
    case DType::kE8M0:
    case DType::kU8: return decode_e8m0(read(std::uint8_t{0}));
    default: fail(ErrorCode::kInvalidFile, "{} is no type for weights or scales", to_string(dtype));
  }
}

}  // namespace megamoe
