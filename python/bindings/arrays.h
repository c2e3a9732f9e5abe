// arrays.h: arrays of Python (NumPy, torch, whatever speaks DLPack) as the library's views, and back.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

#include "base/check.h"
#include "megamoe/types.h"

namespace megamoe::python {

namespace nb = nanobind;

using DTypes = std::initializer_list<DType>;
inline constexpr DTypes kFloats = {DType::kBF16, DType::kF32, DType::kF16, DType::kF64};
inline constexpr DTypes kIntegers = {DType::kI32, DType::kI64};

// An object's memory and what it holds. Throws TypeError where it is no array, or of no accepted type; `kind`
// ("an array") and `name` are for the message. A tensor that requires a gradient is taken as detached.
template <class NdArray>
struct Imported {
  Imported(nb::handle object, const char* name, const char* kind, DTypes accepted);
  NdArray memory;
  DType dtype = DType::kU8;
};

// An argument [rows, cols], or [cols] as one row, in whatever memory; that stays alive while this does.
class Array {
 public:
  // Throws as Imported, and ValueError where it does not have `dimensions` (1 or 2) or is neither on the CPU
  // nor on a CUDA GPU.
  Array(nb::handle object, const char* name, int dimensions, DTypes accepted)
      : Array(Imported<nb::ndarray<nb::ro>>(object, name, "an array", accepted), name, dimensions) {}
  template <class NdArray>
  Array(const Imported<NdArray>& imported, const char* name, int dimensions)
      : Array(nb::ndarray<nb::ro>(imported.memory), imported.dtype, name, dimensions) {}

  const char* name() const { return name_; }
  DType dtype() const { return dtype_; }
  int gpu() const { return gpu_; }  // its number; -1: host memory
  std::int64_t rows() const { return rows_; }
  std::int64_t cols() const { return cols_; }
  std::int64_t row_stride() const { return row_stride_; }
  std::int64_t col_stride() const { return col_stride_; }
  const std::byte* data() const { return static_cast<const std::byte*>(memory_.data()); }

  // Rows of adjacent, aligned elements, one after the other: what a MatrixView can say.
  bool is_matrix() const;
  void require_host() const;  // throws ValueError

 private:
  Array(nb::ndarray<nb::ro> memory, DType dtype, const char* name, int dimensions);

  nb::ndarray<nb::ro> memory_;
  const char* name_;
  DType dtype_ = DType::kU8;
  int gpu_ = -1;
  std::int64_t rows_ = 1, cols_ = 0, row_stride_ = 0, col_stride_ = 0;
};

// A host array as elements of T: its own memory where that is a matrix of T, else a copy. Floats of any width
// become BF16 or FP32 (rounded to nearest even), int64 becomes int32 (ValueError where one does not fit);
// bytes may be uint8 or E4M3.
template <class T>
class HostMatrix {
 public:
  explicit HostMatrix(Array array);
  HostMatrix(nb::handle object, const char* name, int dimensions, DTypes accepted)
      : HostMatrix(Array(object, name, dimensions, accepted)) {}

  const Array& array() const { return array_; }
  MatrixView<const T> view() const { return view_; }
  std::vector<T> packed() const;

 private:
  Array array_;
  std::vector<T> copy_;
  MatrixView<const T> view_;
};

// An argument [rows, cols] that is written to.
class OutputMatrix {
 public:
  // Throws TypeError or ValueError for anything but a writable matrix of that shape and of an accepted type.
  OutputMatrix(nb::handle object, const char* name, std::int64_t rows, std::int64_t cols, DTypes accepted);

  DType dtype() const { return array_.dtype(); }
  int gpu() const { return array_.gpu(); }
  template <class T>
  MatrixView<T> view() const {
    return {static_cast<T*>(imported_.memory.data()), array_.rows(), array_.cols(), array_.row_stride()};
  }

 private:
  Imported<nb::ndarray<>> imported_;
  Array array_;
};

// Memory that an object of ours owns, as a read-only NumPy array that keeps the object alive.
template <class T>
nb::ndarray<nb::numpy, const T> numpy_view(const T* data, std::initializer_list<std::int64_t> shape,
                                           nb::handle owner) {
  const std::vector<std::size_t> sizes(shape.begin(), shape.end());
  return {data, sizes.size(), sizes.data(), owner};
}

// A vector that a NumPy array takes over.
template <class T>
nb::ndarray<nb::numpy, T> to_numpy(std::vector<T>&& values, std::initializer_list<std::int64_t> shape) {
  auto owned = std::make_unique<std::vector<T>>(std::move(values));
  T* data = owned->data();
  const nb::capsule owner(owned.get(), [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  owned.release();
  const std::vector<std::size_t> sizes(shape.begin(), shape.end());
  return {data, sizes.size(), sizes.data(), owner};
}

}  // namespace megamoe::python
