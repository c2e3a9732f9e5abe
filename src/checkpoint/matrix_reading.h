// matrix_reading.h: how the tensors of one matrix (weight, scales, bias) can be read, judged by dtype and
// shape alone.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "checkpoint/model_index.h"
#include "checkpoint/tensor_names.h"

namespace megamoe {

// The tensors that were found for one matrix.
struct MatrixParts {
  std::string module;  // their common name
  std::array<const TensorRef*, kNumTensorParts> tensors = {};

  const TensorRef* operator[](TensorPart part) const { return tensors[static_cast<std::size_t>(part)]; }
  bool any() const { return !module.empty(); }
};

struct MatrixReading {
  Encoding encoding = Encoding::kDense;
  Family family = Family::kPlain;
  bool transposed = false;
  std::int64_t num_experts = 0;  // the leading dimension; 0 where the tensor is one expert's
  std::int64_t stored_rows = 0;
  std::int64_t cols = 0;
};

// Every way the tensors fit together, at least one: two only for dense and FP8 matrices of all experts, whose
// shapes leave the order of rows and columns open. Throws kInvalidFile (kUnsupported) where nothing fits.
std::vector<MatrixReading> matrix_readings(const MatrixParts& parts, bool all_experts);

// The tensor that holds the weight; throws kInvalidFile where there is none or more than one.
const TensorRef& weight_tensor(const MatrixParts& parts);

// The matrix of `parts` read as `reading`: of expert `expert`, rows row_first, row_first + row_step, ...
ExpertMatrix make_matrix(const MatrixParts& parts, const MatrixReading& reading, std::int64_t expert,
                         std::int64_t rows, std::int64_t row_first, std::int64_t row_step);

}  // namespace megamoe
