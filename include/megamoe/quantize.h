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
  float tensor_scale = 0.0f;  // kGiven: greater than 0, and 6 times it still finite
  // Tries each block against 4 as well as 6 as its largest code and keeps the smaller squared error.
  // The tensor scale is then amax / 1536, so that a scale raised by 1.5 still fits. For weights.
  bool four_over_six = false;
};

// Quantises `x` [rows, cols]. A block with a NaN or an infinity becomes a block of NaN and touches nothing
// else: an amax looks at finite values only. Zero rows are fine. Throws kInvalidArgument if cols is not a
// multiple of 16, the view is not one (null data, a row stride below cols), or a given tensor scale is not
// positive or so large that 6 times it is not finite.
Nvfp4Tensor quantize(MatrixView<const float> x, const QuantizeOptions& options = {});
Nvfp4Tensor quantize(MatrixView<const bf16> x, const QuantizeOptions& options = {});
Nvfp4Tensor quantize(MatrixView<const fp16> x, const QuantizeOptions& options = {});

// The values of `x`, row-major [rows, cols]. Throws kInvalidArgument if its vectors do not have the sizes
// above.
std::vector<float> dequantize(const Nvfp4Tensor& x);

}  // namespace megamoe
