// quantize.h: NVFP4 quantisation of matrices on the CPU, bit-exact by definition (see docs/numerics.md).
#pragma once

#include <cstdint>
#include <vector>

#include "megamoe/types.h"

namespace megamoe {

// A matrix of NVFP4: row-major, low nibble first, value = e2m1 * e4m3 * tensor scale.
struct Nvfp4Tensor {
  std::int64_t rows = 0;
  std::int64_t cols = 0;              // a multiple of 16
  std::vector<std::uint8_t> codes;    // [rows, cols / 2]
  std::vector<std::uint8_t> scales;   // [rows, cols / 16] E4M3
  std::vector<float> tensor_scales;   // [1], or [rows] when each row has its own
  std::int64_t saturated_blocks = 0;  // blocks whose scale was cut to 448
  std::int64_t nonfinite_blocks = 0;  // blocks that held a NaN or an infinity
};

struct QuantizeOptions {
  enum class TensorScale {
    kGiven,   // `tensor_scale` below
    kTensor,  // amax / 2688 over the whole matrix
    kRow,     // amax / 2688 over each row
  };
  TensorScale mode = TensorScale::kTensor;
  float tensor_scale = 0.0f;  // kGiven: finite, greater than 0
  // Tries each block against 4 as well as 6 as its largest code and keeps the smaller squared error.
  // The tensor scale is then amax / 1536, so that a scale raised by 1.5 still fits. For weights.
  bool four_over_six = false;
};

// Quantises `x` [rows, cols]; throws kInvalidArgument if cols is not a multiple of 16 or a given tensor
// scale is not a finite positive number. Zero rows are fine.
Nvfp4Tensor quantize(MatrixView<const float> x, const QuantizeOptions& options = {});
Nvfp4Tensor quantize(MatrixView<const bf16> x, const QuantizeOptions& options = {});
Nvfp4Tensor quantize(MatrixView<const fp16> x, const QuantizeOptions& options = {});

// The values of `x`, row-major [rows, cols].
std::vector<float> dequantize(const Nvfp4Tensor& x);

}  // namespace megamoe
