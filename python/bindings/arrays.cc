#include "bindings/arrays.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>

#include "bindings/interpreter_lock.h"
#include "numerics/bf16.h"
#include "numerics/fp16.h"

namespace megamoe::python {
namespace {

std::optional<DType> dtype_of(nb::dlpack::dtype type) {
  using Code = nb::dlpack::dtype_code;
  struct Row {
    Code code;
    int bits;
    DType dtype;
  };
  static constexpr Row kRows[] = {
      {Code::Float, 16, DType::kF16},         {Code::Float, 32, DType::kF32}, {Code::Float, 64, DType::kF64},
      {Code::Bfloat, 16, DType::kBF16},       {Code::Int, 32, DType::kI32},   {Code::Int, 64, DType::kI64},
      {Code::Float8_E4M3FN, 8, DType::kE4M3}, {Code::UInt, 8, DType::kU8},
  };
  for (const Row& row : kRows) {
    if (type.lanes == 1 && type.code == static_cast<std::uint8_t>(row.code) && type.bits == row.bits)
      return row.dtype;
  }
  return std::nullopt;
}

// NumPy has the types of the package ml_dtypes by name alone, and does not export them.
struct NamedType {
  const char* name;
  const char* bits;  // an integer of that size
  DType dtype;
};
constexpr NamedType kNamedTypes[] = {{"bfloat16", "uint16", DType::kBF16},
                                     {"float8_e4m3fn", "uint8", DType::kE4M3}};

const NamedType* find_named_type(nb::handle object) {
  const nb::object dtype = nb::getattr(object, "dtype", nb::none());
  const nb::object name = nb::getattr(dtype, "name", nb::none());
  for (const NamedType& type : kNamedTypes) {
    if (name.equal(nb::str(type.name))) return &type;
  }
  return nullptr;
}

// torch's own export of a tensor of its, several times as fast as the tensor's __dlpack__ and without waiting
// for any stream; None for other objects. torch is not imported here: where there are tensors it has been.
nb::object torch_capsule(nb::handle object) {
  static PyObject* tensor_type = nullptr;  // these live as long as torch does
  static PyObject* to_dlpack = nullptr;
  if (tensor_type == nullptr) {
    const nb::object torch = nb::steal(PyImport_GetModule(nb::str("torch").ptr()));
    if (!torch.is_valid()) {
      PyErr_Clear();
      return nb::none();
    }
    to_dlpack = nb::object(nb::module_::import_("torch.utils.dlpack").attr("to_dlpack")).release().ptr();
    tensor_type = nb::object(torch.attr("Tensor")).release().ptr();
  }
  if (object.type().ptr() != tensor_type) return nb::none();
  try {
    // A negative that has not been carried out yet is not in the memory.
    if (nb::cast<bool>(object.attr("is_neg")())) return nb::handle(to_dlpack)(object.attr("resolve_neg")());
    return nb::handle(to_dlpack)(object);
  } catch (const nb::python_error&) {
    return nb::none();
  }
}

// The object's memory, or nothing where it is no array; `dtype` is what it holds, where we have a name for
// that.
template <class NdArray>
std::optional<NdArray> import(nb::handle object, std::optional<DType>& dtype) {
  NdArray out;
  const nb::object capsule = torch_capsule(object);
  if (nb::try_cast(capsule.is_none() ? object : nb::handle(capsule), out, false)) {
    dtype = dtype_of(out.dtype());
    return out;
  }
  if (const NamedType* type = find_named_type(object)) {
    dtype = type->dtype;
    if (nb::try_cast(object.attr("view")(type->bits), out, false)) return out;
  }
  if (nb::hasattr(object, "detach") && nb::try_cast(object.attr("detach")(), out, false)) {
    dtype = dtype_of(out.dtype());
    return out;
  }
  return std::nullopt;
}

std::string listed(DTypes accepted) {
  std::string text;
  for (const DType* type = accepted.begin(); type != accepted.end(); ++type) {
    if (type != accepted.begin()) text += type + 1 == accepted.end() ? " or " : ", ";
    text += to_string(*type);
  }
  return text;
}

// "list", "numpy.ndarray of complex128", "torch.Tensor of torch.float32 on meta": what came.
std::string described(nb::handle object) {
  std::string text = nb::inst_name(object).c_str();
  for (const auto& [attribute, before, usual] :
       {std::tuple("dtype", " of ", ""), std::tuple("device", " on ", "cpu"),
        std::tuple("layout", ", ", "torch.strided")}) {
    const nb::object value = nb::getattr(object, attribute, nb::none());
    const std::string name = nb::str(value).c_str();
    if (!value.is_none() && name != usual) text += before + name;
  }
  // NumPy has them where elements are fields of structures.
  const nb::object strides = nb::getattr(object, "strides", nb::none()),
                   size = nb::getattr(object, "itemsize", nb::none());
  std::int64_t bytes = 0, step = 0;
  if (nb::isinstance<nb::tuple>(strides) && nb::try_cast(size, bytes) && bytes > 0) {
    for (const nb::handle stride : strides) {
      if (nb::try_cast(stride, step) && step % bytes != 0)
        return text + " with strides of " + nb::str(strides).c_str() + " bytes";
    }
  }
  return text;
}

// BF16's and FP16's bits as a number.
template <class T>
auto number(T value) {
  if constexpr (std::is_same_v<T, bf16> || std::is_same_v<T, fp16>) {
    return to_float(value);
  } else {
    return value;
  }
}

template <class To, class From>
To converted(From value, const char* name) {
  if constexpr (std::is_same_v<To, From>) {
    return value;
  } else if constexpr (std::is_same_v<To, bf16>) {
    return to_bf16(static_cast<float>(number(value)));
  } else if constexpr (std::is_integral_v<To>) {
    if (value < std::numeric_limits<To>::min() || value > std::numeric_limits<To>::max()) {
      fail(ErrorCode::kInvalidArgument, "{} holds {}, expected numbers of {} bits", name, value,
           8 * sizeof(To));
    }
    return static_cast<To>(value);
  } else {
    return static_cast<To>(number(value));
  }
}

template <class To, class From>
std::vector<To> copy_as(const Array& array) {
  std::vector<To> out(static_cast<std::size_t>(checked_mul(array.rows(), array.cols())));
  const auto size = static_cast<std::int64_t>(sizeof(From));
  To* to = out.data();
  for (std::int64_t r = 0; r < array.rows(); ++r) {
    const std::byte* from = array.data() + r * array.row_stride() * size;
    for (std::int64_t c = 0; c < array.cols(); ++c, from += array.col_stride() * size) {
      From value;
      std::memcpy(&value, from, sizeof(value));
      *to++ = converted<To>(value, array.name());
    }
  }
  return out;
}

template <class To>
std::vector<To> copy_as(const Array& array) {
  if constexpr (std::is_same_v<To, std::int32_t>) {
    return array.dtype() == DType::kI64 ? copy_as<To, std::int64_t>(array) : copy_as<To, To>(array);
  } else if constexpr (std::is_same_v<To, float> || std::is_same_v<To, bf16>) {
    switch (array.dtype()) {
      case DType::kBF16: return copy_as<To, bf16>(array);
      case DType::kF16: return copy_as<To, fp16>(array);
      case DType::kF64: return copy_as<To, double>(array);
      default: return copy_as<To, float>(array);
    }
  } else {
    return copy_as<To, To>(array);
  }
}

template <class T>
bool holds(const Array& array) {
  switch (array.dtype()) {
    case DType::kF32: return std::is_same_v<T, float>;
    case DType::kBF16: return std::is_same_v<T, bf16>;
    case DType::kF16: return std::is_same_v<T, fp16>;
    case DType::kI32: return std::is_same_v<T, std::int32_t>;
    case DType::kU8:
    case DType::kE4M3: return std::is_same_v<T, std::uint8_t>;
    default: return false;
  }
}

}  // namespace

template <class NdArray>
Imported<NdArray>::Imported(nb::handle object, const char* name, const char* kind, DTypes accepted) {
  std::optional<DType> type;
  std::optional<NdArray> array = import <NdArray>(object, type);
  if (!array || !type || std::find(accepted.begin(), accepted.end(), *type) == accepted.end()) {
    throw nb::type_error(
        fmt::format("{} must be {} of {}, got {}", name, kind, listed(accepted), described(object)).c_str());
  }
  memory = *array;
  dtype = *type;
}
template struct Imported<nb::ndarray<nb::ro>>;
template struct Imported<nb::ndarray<>>;

Array::Array(nb::ndarray<nb::ro> memory, DType dtype, const char* name, int dimensions)
    : memory_(std::move(memory)), name_(name), dtype_(dtype) {
  if (memory_.ndim() != static_cast<std::size_t>(dimensions)) {
    fail(ErrorCode::kInvalidArgument, "{} must have {} dimension{}, got {}", name, dimensions,
         dimensions == 1 ? "" : "s", memory_.ndim());
  }
  const auto last = static_cast<std::size_t>(dimensions - 1);
  cols_ = static_cast<std::int64_t>(memory_.shape(last));
  if (dimensions == 2) rows_ = static_cast<std::int64_t>(memory_.shape(0));
  const bool empty = rows_ == 0 || cols_ == 0;  // strides then say nothing
  col_stride_ = cols_ > 1 && !empty ? memory_.stride(last) : 1;
  row_stride_ = rows_ > 1 && !empty ? memory_.stride(0) : cols_;
  switch (memory_.device_type()) {
    case nb::device::cpu::value:
    case nb::device::cuda_host::value: break;
    case nb::device::cuda::value:
    case nb::device::cuda_managed::value: gpu_ = memory_.device_id(); break;
    default:
      fail(ErrorCode::kInvalidArgument, "{} must be on the CPU or a CUDA GPU, got DLPack device type {}",
           name, memory_.device_type());
  }
}

bool Array::is_matrix() const {
  const auto alignment = static_cast<std::uintptr_t>(bits_of(dtype_) / 8);
  return col_stride_ == 1 && row_stride_ >= cols_ &&
         reinterpret_cast<std::uintptr_t>(data()) % alignment == 0;
}

void Array::require_host() const {
  if (gpu_ >= 0)
    fail(ErrorCode::kInvalidArgument, "{} must be on the CPU, got an array on GPU {}", name_, gpu_);
}

template <class T>
HostMatrix<T>::HostMatrix(Array array) : array_(std::move(array)) {
  array_.require_host();
  if (holds<T>(array_) && array_.is_matrix()) {
    view_ = {reinterpret_cast<const T*>(array_.data()), array_.rows(), array_.cols(), array_.row_stride()};
  } else {
    // Others may run meanwhile, where it is long enough for taking turns.
    constexpr std::int64_t kLong = 1 << 16;
    std::optional<Unlocked> unlocked;
    if (array_.rows() > kLong / std::max<std::int64_t>(array_.cols(), 1)) unlocked.emplace();
    copy_ = copy_as<T>(array_);
    view_ = {copy_.data(), array_.rows(), array_.cols()};
  }
}

template <class T>
std::vector<T> HostMatrix<T>::packed() const {
  std::vector<T> out;
  out.reserve(static_cast<std::size_t>(view_.rows * view_.cols));
  for (std::int64_t r = 0; r < view_.rows; ++r)
    out.insert(out.end(), view_.row(r), view_.row(r) + view_.cols);
  return out;
}

template class HostMatrix<float>;
template class HostMatrix<bf16>;
template class HostMatrix<fp16>;
template class HostMatrix<std::int32_t>;
template class HostMatrix<std::uint8_t>;

OutputMatrix::OutputMatrix(nb::handle object, const char* name, std::int64_t rows, std::int64_t cols,
                           DTypes accepted)
    : imported_(object, name, "a writable array", accepted), array_(imported_, name, 2) {
  if (array_.rows() != rows || array_.cols() != cols) {
    fail(ErrorCode::kInvalidArgument, "{} must have shape [{}, {}], got [{}, {}]", name, rows, cols,
         array_.rows(), array_.cols());
  }
  if (!array_.is_matrix()) {
    fail(ErrorCode::kInvalidArgument, "{} must have rows of adjacent elements, got strides [{}, {}]", name,
         array_.row_stride(), array_.col_stride());
  }
}

}  // namespace megamoe::python
