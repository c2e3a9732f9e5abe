// module.cc: the extension module `megamoe._core`: the library's errors as Python's, threads, and its parts.
#include "bindings/module.h"

#include <nanobind/stl/string.h>

#include <string_view>

#include "base/parallel.h"
#include "megamoe/error.h"

namespace megamoe::python {

namespace nb = nanobind;

namespace {

PyObject* exception_for(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
    case ErrorCode::kInvalidFile: return PyExc_ValueError;
    case ErrorCode::kNoFile: return PyExc_FileNotFoundError;
    case ErrorCode::kNotFound: return PyExc_LookupError;
    case ErrorCode::kUnsupported: return PyExc_NotImplementedError;
    case ErrorCode::kIo: return PyExc_OSError;
    case ErrorCode::kOutOfMemory: return PyExc_MemoryError;
    case ErrorCode::kInternal: break;
  }
  return PyExc_RuntimeError;
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    // It may hold the name of a file, which need not be UTF-8.
    const std::string_view what = error.what();
    const auto size = static_cast<Py_ssize_t>(what.size());
    const nb::object text = nb::steal(PyUnicode_DecodeUTF8(what.data(), size, "backslashreplace"));
    PyErr_SetObject(exception_for(error.code()), text.ptr());
  }
}

}  // namespace
}  // namespace megamoe::python

NB_MODULE(_core, m) {
  using namespace megamoe::python;
  m.doc() = "The compiled part of MegaMoE; its names are those of the package `megamoe`.";
  nb::set_leak_warnings(false);  // a layer may well live until the interpreter ends
  nb::register_exception_translator(translate);
  m.def("set_num_threads", &megamoe::set_num_threads, nb::arg("count"),
        "Sets how many threads the library uses; 0: all cores. Results do not depend on it.\n\n"
        "Raises ValueError for a negative number.");
  m.def("num_threads", &megamoe::num_threads, "How many threads the library uses.");
  bind_quantize(m);
  bind_checkpoint(m);
  bind_layer(m);
}
