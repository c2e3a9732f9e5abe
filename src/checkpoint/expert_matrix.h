// expert_matrix.h: reads one expert matrix out of a checkpoint, whatever its encoding.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "checkpoint/model_index.h"
#include "megamoe/types.h"

namespace megamoe {

// The matrix as FP32 [rows, cols], row-major: exact for F32, F16, BF16 and MXFP4; for NVFP4 and FP8 one
// rounding to FP32. Throws kInvalidFile that names tensor, row and block for a NaN or negative block scale,
// or a tensor scale that is not finite and positive.
std::vector<float> read_f32(const ExpertMatrix& matrix);
// kDense BF16, and nothing else: the raw bits [rows, cols].
std::vector<bf16> read_bf16(const ExpertMatrix& matrix);

// An NVFP4 matrix, or an MXFP4 one cast to NVFP4: the largest exponent of a block with a code other than 0
// becomes 2^8, codes untouched. `inexact_blocks` (32-blocks of the source) counts those whose exponent lies
// more than 17 below the largest: these are quantised anew under that tensor scale.
struct Nvfp4Data {
  std::vector<std::uint8_t> codes;   // [rows, cols / 2]
  std::vector<std::uint8_t> scales;  // [rows, cols / 16] E4M3
  float tensor_scale = 1.0f;         // the multiplier
  std::int64_t inexact_blocks = 0;
};
// `scale_partner`: an MXFP4 matrix (an expert's other half) that shall come out under the same tensor scale,
// whose exponents therefore count too; no say where `matrix` is NVFP4. Its bytes are read, not returned.
Nvfp4Data read_nvfp4(const ExpertMatrix& matrix, const ExpertMatrix* scale_partner = nullptr);

// What a matrix is in the file itself, where nothing has to be moved to read it: its rows lie one after the
// other. Checked like read_nvfp4. The pointers live as long as the checkpoint.
struct Nvfp4View {
  const std::uint8_t* codes = nullptr;
  const std::uint8_t* scales = nullptr;
  float tensor_scale = 1.0f;
};
std::optional<Nvfp4View> view_nvfp4(const ExpertMatrix& matrix);  // kNvfp4 only
const bf16* view_bf16(const ExpertMatrix& matrix);  // null where it is not BF16, contiguous and aligned

// The activations' tensor scale as the multiplier, or 0 where the checkpoint has none. Throws kInvalidFile
// that names the tensor if it is not finite and positive.
float read_input_scale(const ExpertMatrix& matrix);
// The bias as FP32 [rows], or empty.
std::vector<float> read_bias(const ExpertMatrix& matrix);
// Any float tensor as FP32.
std::vector<float> read_f32(const TensorRef& tensor);
// How many values are NaN.
std::int64_t count_nans(const std::vector<float>& values);

}  // namespace megamoe
