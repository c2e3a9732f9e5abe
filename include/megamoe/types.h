// types.h: element types and the views that tensors are passed in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace megamoe {

// Storage of a 16-bit float: bits only; arithmetic goes through src/numerics.
struct bf16 {
  std::uint16_t bits;
  friend constexpr bool operator==(bf16, bf16) = default;
};
struct fp16 {
  std::uint16_t bits;
  friend constexpr bool operator==(fp16, fp16) = default;
};

// The element types that a safetensors file can hold, by safetensors' own names.
enum class DType : std::uint8_t {
  kBool,
  kU8,
  kI8,
  kU16,
  kI16,
  kU32,
  kI32,
  kU64,
  kI64,
  kF4,
  kF6E2M3,
  kF6E3M2,
  kE4M3,
  kE5M2,
  kE8M0,
  kF16,
  kBF16,
  kF32,
  kF64,
  kC64,
};

// Bits of one element (4 and 6 for the packed types).
int bits_of(DType dtype);
// safetensors' name: "BF16", "F8_E4M3", ...
std::string_view to_string(DType dtype);
// The type of that name, or nothing.
std::optional<DType> parse_dtype(std::string_view name);
// Bytes of a tensor of that shape; nothing where a dimension is negative, the size overflows 64 bits or a
// packed type does not fill whole bytes.
std::optional<std::int64_t> bytes_of(DType dtype, std::span<const std::int64_t> shape);

// A matrix somebody else owns. Elements of a row are adjacent; rows may be further apart than `cols`.
template <class T>
struct MatrixView {
  T* data = nullptr;  // [rows, cols]
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t row_stride = 0;  // elements from one row to the next, >= cols

  constexpr MatrixView() = default;
  constexpr MatrixView(T* d, std::int64_t r, std::int64_t c) : MatrixView(d, r, c, c) {}
  constexpr MatrixView(T* d, std::int64_t r, std::int64_t c, std::int64_t stride)
      : data(d), rows(r), cols(c), row_stride(stride) {}
  // A view of mutable elements is also a view of const ones.
  template <class U>
  requires(!__is_same(U, T) && __is_same(const U, T)) constexpr MatrixView(const MatrixView<U>& other)
      : MatrixView(other.data, other.rows, other.cols, other.row_stride) {}

  constexpr T* row(std::int64_t r) const { return data + r * row_stride; }
};

}  // namespace megamoe
