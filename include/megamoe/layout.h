// layout.h: the two orders that fast paths want weights and scales in, and the ways back.
#pragma once

#include <cstdint>

namespace megamoe {

// The 128x4 order of block scales (picture: src/numerics/swizzle.h). Scales are [rows, cols] bytes,
// row-major, `cols` counting blocks. Rows pad to a multiple of 128 and columns to a multiple of 4.
//
// Bytes of the swizzled form. Throws kInvalidArgument for a negative size, kOutOfMemory on overflow.
std::int64_t swizzled_bytes(std::int64_t rows, std::int64_t cols);
// `in` [rows, cols] -> `out` [swizzled_bytes]. Writes every byte of `out`; padding is 0.
void swizzle_scales(const std::uint8_t* in, std::int64_t rows, std::int64_t cols, std::uint8_t* out);
// The inverse, `in` [swizzled_bytes] -> `out` [rows, cols]; padding is not read.
void unswizzle_scales(const std::uint8_t* in, std::int64_t rows, std::int64_t cols, std::uint8_t* out);

// The order of the first GEMM's rows: 8 of gate, the 8 of up that belong to them, the next 8 of gate, ...
// A row is `row_bytes` bytes of anything: codes, scales, BF16 values or a bias. `rows` is I, a multiple of 8,
// or kInvalidArgument is thrown; buffers must not overlap.
//
// `gate` [rows], `up` [rows] -> `out` [2 * rows].
void interleave(const void* gate, const void* up, std::int64_t rows, std::int64_t row_bytes, void* out);
// The inverse: `in` [2 * rows] -> `gate` [rows], `up` [rows].
void deinterleave(const void* in, std::int64_t rows, std::int64_t row_bytes, void* gate, void* up);

}  // namespace megamoe
