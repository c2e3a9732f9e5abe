// quantize.cc: matrices in NVFP4, and the orders that fast paths store them in.
#include "megamoe/quantize.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "bindings/arrays.h"
#include "bindings/interpreter_lock.h"
#include "bindings/module.h"
#include "megamoe/layout.h"
#include "numerics/nvfp4.h"

namespace megamoe::python {
namespace {

constexpr DTypes kBytes = {DType::kU8, DType::kE4M3};

QuantizeOptions quantize_options(std::optional<float> tensor_scale, bool per_row, bool four_over_six) {
  using Mode = QuantizeOptions::TensorScale;
  if (tensor_scale && per_row) {
    fail(ErrorCode::kInvalidArgument, "tensor_scale and per_row exclude each other, got both");
  }
  QuantizeOptions options;
  options.mode = tensor_scale ? Mode::kGiven : per_row ? Mode::kRow : Mode::kTensor;
  options.tensor_scale = tensor_scale.value_or(0.0f);
  options.four_over_six = four_over_six;
  return options;
}

template <class T>
Nvfp4Tensor quantize_as(Array&& x, const QuantizeOptions& options) {
  const HostMatrix<T> matrix(std::move(x));
  const Unlocked unlocked;
  return quantize(matrix.view(), options);
}

Nvfp4Tensor quantize_array(nb::handle x, std::optional<float> tensor_scale, bool per_row,
                           bool four_over_six) {
  const QuantizeOptions options = quantize_options(tensor_scale, per_row, four_over_six);
  Array array(x, "x", 2, kFloats);
  switch (array.dtype()) {
    case DType::kBF16: return quantize_as<bf16>(std::move(array), options);
    case DType::kF16: return quantize_as<fp16>(std::move(array), options);
    default: return quantize_as<float>(std::move(array), options);
  }
}

void check_size(const char* name, std::int64_t rows, std::int64_t cols, const Array& array) {
  if (array.rows() == rows && array.cols() == cols) return;
  fail(ErrorCode::kInvalidArgument, "{} must have shape [{}, {}], got [{}, {}]", name, rows, cols,
       array.rows(), array.cols());
}

void construct(Nvfp4Tensor* self, nb::handle codes, nb::handle scales, nb::handle tensor_scales) {
  const HostMatrix<std::uint8_t> c(codes, "codes", 2, {DType::kU8}), s(scales, "scales", 2, kBytes);
  const HostMatrix<float> t(tensor_scales, "tensor_scales", 1, kFloats);
  const std::int64_t rows = c.view().rows, cols = checked_mul(c.view().cols, 2);
  if (cols % kNvfp4Block != 0) {
    fail(ErrorCode::kInvalidArgument, "codes must have a multiple of {} columns, got {}", kNvfp4Block / 2,
         c.view().cols);
  }
  check_size("scales", rows, cols / kNvfp4Block, s.array());
  if (t.view().cols != 1 && t.view().cols != rows) {
    fail(ErrorCode::kInvalidArgument, "tensor_scales must hold 1 or {} numbers, got {}", rows, t.view().cols);
  }
  new (self) Nvfp4Tensor{
      .rows = rows, .cols = cols, .codes = c.packed(), .scales = s.packed(), .tensor_scales = t.packed()};
}

nb::ndarray<nb::numpy, float> dequantize_tensor(const Nvfp4Tensor& tensor) {
  std::vector<float> values;
  {
    const Unlocked unlocked;
    values = dequantize(tensor);
  }
  return to_numpy(std::move(values), {tensor.rows, tensor.cols});
}

nb::ndarray<nb::numpy, std::uint8_t> swizzle(nb::handle scales) {
  const HostMatrix<std::uint8_t> in(scales, "scales", 2, kBytes);
  std::vector<std::uint8_t> out(static_cast<std::size_t>(swizzled_bytes(in.view().rows, in.view().cols)));
  swizzle_scales(in.packed().data(), in.view().rows, in.view().cols, out.data());
  const auto size = static_cast<std::int64_t>(out.size());
  return to_numpy(std::move(out), {size});
}

nb::ndarray<nb::numpy, std::uint8_t> unswizzle(nb::handle swizzled, std::int64_t rows, std::int64_t cols) {
  const HostMatrix<std::uint8_t> in(swizzled, "swizzled", 1, kBytes);
  check_size("swizzled", 1, swizzled_bytes(rows, cols), in.array());
  std::vector<std::uint8_t> out(static_cast<std::size_t>(checked_mul(rows, cols)));
  unswizzle_scales(in.packed().data(), rows, cols, out.data());
  return to_numpy(std::move(out), {rows, cols});
}

nb::ndarray<nb::numpy, std::uint8_t> interleave_rows(nb::handle gate, nb::handle up) {
  const HostMatrix<std::uint8_t> g(gate, "gate", 2, kBytes), u(up, "up", 2, kBytes);
  const std::int64_t rows = g.view().rows, bytes = g.view().cols;
  check_size("up", rows, bytes, u.array());
  std::vector<std::uint8_t> out(static_cast<std::size_t>(checked_mul(checked_mul(rows, bytes), 2)));
  interleave(g.packed().data(), u.packed().data(), rows, bytes, out.data());
  return to_numpy(std::move(out), {2 * rows, bytes});
}

std::pair<nb::ndarray<nb::numpy, std::uint8_t>, nb::ndarray<nb::numpy, std::uint8_t>> deinterleave_rows(
    nb::handle interleaved) {
  const HostMatrix<std::uint8_t> in(interleaved, "interleaved", 2, kBytes);
  if (in.view().rows % 2 != 0) {
    fail(ErrorCode::kInvalidArgument, "interleaved must have an even number of rows, got {}", in.view().rows);
  }
  const std::int64_t rows = in.view().rows / 2, bytes = in.view().cols;
  std::vector<std::uint8_t> gate(static_cast<std::size_t>(rows * bytes)), up(gate.size());
  deinterleave(in.packed().data(), rows, bytes, gate.data(), up.data());
  return {to_numpy(std::move(gate), {rows, bytes}), to_numpy(std::move(up), {rows, bytes})};
}

}  // namespace

void bind_quantize(nb::module_& m) {
  nb::class_<Nvfp4Tensor>(m, "Nvfp4Tensor",
                          "A matrix of NVFP4: value = e2m1 code * E4M3 block scale * tensor scale.\n\n"
                          "Its arrays are read-only views that keep it alive.")
      .def("__init__", &construct, nb::arg("codes") = nb::none(), nb::arg("scales") = nb::none(),
           nb::arg("tensor_scales") = nb::none(),
           nb::sig("def __init__(self, codes: megamoe.Array, scales: megamoe.Array, tensor_scales: "
                   "megamoe.Array) -> "
                   "None"),
           "Copies codes uint8 [rows, cols / 2], scales uint8 or float8_e4m3fn [rows, cols / 16] and "
           "tensor_scales\n"
           "float [1] or [rows].\n\nRaises TypeError or ValueError where they are not that.")
      .def_prop_ro(
          "shape", [](const Nvfp4Tensor& t) { return nb::make_tuple(t.rows, t.cols); },
          nb::sig("def shape(self) -> tuple[int, int]"), "(rows, cols) of the values.")
      .def_prop_ro(
          "codes",
          [](nb::handle self) {
            const auto& t = nb::cast<const Nvfp4Tensor&>(self);
            return numpy_view(t.codes.data(), {t.rows, t.cols / 2}, self);
          },
          "uint8 [rows, cols / 2]: two E2M1 codes a byte, the even column in the low half.")
      .def_prop_ro(
          "scales",
          [](nb::handle self) {
            const auto& t = nb::cast<const Nvfp4Tensor&>(self);
            return numpy_view(t.scales.data(), {t.rows, t.cols / kNvfp4Block}, self);
          },
          "uint8 [rows, cols / 16]: the bits of an E4M3 scale for each 16 columns.")
      .def_prop_ro(
          "tensor_scales",
          [](nb::handle self) {
            const auto& t = nb::cast<const Nvfp4Tensor&>(self);
            return numpy_view(t.tensor_scales.data(), {static_cast<std::int64_t>(t.tensor_scales.size())},
                              self);
          },
          "float32 [1], or [rows] where each row has its own: the multiplier.")
      .def_ro("saturated_blocks", &Nvfp4Tensor::saturated_blocks, "Blocks whose scale was cut to 448.")
      .def_ro("nonfinite_blocks", &Nvfp4Tensor::nonfinite_blocks, "Blocks that held a NaN or an infinity.")
      .def("dequantize", &dequantize_tensor, "The values, float32 [rows, cols].")
      .def("__repr__", [](const Nvfp4Tensor& t) {
        return nb::str(fmt::format("Nvfp4Tensor({} x {}, {})", t.rows, t.cols,
                                   t.tensor_scales.size() == 1
                                       ? fmt::format("tensor scale {:.6g}", t.tensor_scales[0])
                                       : std::string("a tensor scale for each row"))
                           .c_str());
      });

  m.def(
      "quantize", &quantize_array, nb::arg("x").none(), nb::kw_only(), nb::arg("tensor_scale") = nb::none(),
      nb::arg("per_row") = false, nb::arg("four_over_six") = false,
      nb::sig("def quantize(x: megamoe.Array, *, tensor_scale: float | None = None, per_row: bool = False, "
              "four_over_six: bool = False) -> Nvfp4Tensor"),
      "Quantises x [rows, cols] of float32, float16 or bfloat16 to NVFP4 on the CPU.\n\n"
      "The tensor scale is amax / 2688 of the whole of x, or of each row with `per_row`, or `tensor_scale`.\n"
      "`four_over_six` tries each block with 4 as well as 6 as its largest code and keeps the smaller "
      "squared\n"
      "error; the tensor scale is then amax / 1536. float64 is rounded to float32 first. A block with a NaN "
      "or\n"
      "an infinity becomes NaN. cols must be a multiple of 16.\n\n"
      "Raises TypeError where x is no array of floats; ValueError for another shape, a GPU's memory, or a "
      "tensor\n"
      "scale that is not positive or so large that 6 times it is not finite.");
  m.def("dequantize", &dequantize_tensor, nb::arg("x"),
        "The values of an Nvfp4Tensor, float32 [rows, cols].");
  m.def("swizzle_scales", &swizzle, nb::arg("scales").none(),
        nb::sig("def swizzle_scales(scales: megamoe.Array) -> numpy.typing.NDArray[numpy.uint8]"),
        "Block scales uint8 [rows, cols] in the 128x4 order of tensor cores, uint8 [n], padding 0.\n\n"
        "Rows pad to a multiple of 128 and columns, which count blocks, to a multiple of 4.");
  m.def("unswizzle_scales", &unswizzle, nb::arg("swizzled").none(), nb::arg("rows"), nb::arg("cols"),
        nb::sig("def unswizzle_scales(swizzled: megamoe.Array, rows: int, cols: int) -> "
                "numpy.typing.NDArray[numpy.uint8]"),
        "The inverse of swizzle_scales, uint8 [rows, cols].\n\n"
        "Raises ValueError where `swizzled` does not have the size for that.");
  m.def(
      "interleave", &interleave_rows, nb::arg("gate").none(), nb::arg("up").none(),
      nb::sig("def interleave(gate: megamoe.Array, up: megamoe.Array) -> numpy.typing.NDArray[numpy.uint8]"),
      "Rows of gate and up, uint8 [rows, n] each, in the order of the first GEMM: 8 of gate, the 8 of up "
      "that\n"
      "belong to them, and so on; uint8 [2 * rows, n].\n\n"
      "For codes and scales as they are; for others pass `array.view(numpy.uint8)`. Raises ValueError where "
      "the\n"
      "shapes differ or rows is not a multiple of 8.");
  m.def("deinterleave", &deinterleave_rows, nb::arg("interleaved").none(),
        nb::sig("def deinterleave(interleaved: megamoe.Array) -> tuple[numpy.typing.NDArray[numpy.uint8], "
                "numpy.typing.NDArray[numpy.uint8]]"),
        "The inverse of interleave: (gate, up) of uint8 [2 * rows, n].");
}

}  // namespace megamoe::python
