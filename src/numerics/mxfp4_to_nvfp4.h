// mxfp4_to_nvfp4.h: MXFP4 as NVFP4 without touching a code, where the exponents allow it.
//
// Why       both formats hold E2M1 codes, and a power of two is an E4M3 number, so a block of 32 becomes two
//           blocks of 16 of the same codes. No value changes.
// Rule      with k the exponent of a block (scale byte - 127) and k_max the largest k among blocks that have
// a
//           code other than +-0: the tensor scale is 2^m, m = k_max - 8, and a block's scale, written for
//           both of its halves, is 2^(k - m), which runs from 2^8 (k = k_max) down to 2^-9 (k = k_max - 17).
//           A block of +-0 alone keeps its codes under the scale 1 and has no say in k_max.
//           A block with k < k_max - 17 is below what E4M3 reaches: its values, which are exact in FP32, are
//           quantised anew under the tensor scale, and it is counted, whether or not it lost anything.
// Range     m lies in [-135, 119], so 2^m is an FP32 number (a subnormal below -126).
#pragma once

#include <cstdint>
#include <optional>

namespace megamoe {

// MXFP4 [rows, cols], row-major; cols is a multiple of 32.
struct Mxfp4View {
  const std::uint8_t* codes = nullptr;   // [rows, cols / 2]
  const std::uint8_t* scales = nullptr;  // [rows, cols / 32] E8M0
  std::int64_t rows = 0;
  std::int64_t cols = 0;
};

// k_max, or nothing where every code is +-0. Throws kInvalidArgument that names row and block for a scale of
// NaN (0xFF), wherever it stands, and for columns that are no multiple of 32.
std::optional<int> mxfp4_max_exponent(const Mxfp4View& in);

struct Mxfp4Cast {
  float tensor_scale = 1.0f;        // 2^(k_max - 8); 1 where k_max is nothing
  std::int64_t inexact_blocks = 0;  // blocks of 32 that were quantised anew
};

// Writes `codes` [rows, cols / 2] (may be `in.codes` itself) and `scales` [rows, cols / 16]. `k_max`:
// mxfp4_max_exponent of `in`, or the largest of several matrices that shall share a tensor scale; less than
// that of `in` is kInvalidArgument.
Mxfp4Cast cast_mxfp4_to_nvfp4(const Mxfp4View& in, std::optional<int> k_max, std::uint8_t* codes,
                              std::uint8_t* scales);

}  // namespace megamoe
