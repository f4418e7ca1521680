// Torch's global flags (saving/flags.py), compared with those of a pass before each node and each rebuild.
#pragma once

#include "values.h"

#include <ATen/Context.h>
#include <torch/headeronly/version.h>

namespace leannorm {

// A flag: its getter in Python, or a precision of float32 products, whose getter in torch takes two names.
struct Flag {
  PyObject* getter;
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  bool is_precision = false;
  at::Float32Backend backend{};
  at::Float32Op operation{};

  explicit Flag(PyObject* of) : getter(of) {
    const Ref names(PyObject_GetAttrString(of, "args"));  // of a partial
    if (!names) PyErr_Clear();
    const py::handle two(names.get());
    if (!names || !py::isinstance<py::tuple>(two) || py::len(two) != 2) return;
    backend = at::str2backend(py::str(two[py::int_(0)])), operation = at::str2op(py::str(two[py::int_(1)]));
    is_precision = true;
  }
  bool is_still(PyObject* before) const {
    if (!is_precision || !PyUnicode_Check(before)) return is_still_in_python(before);
    const std::string now = at::precision2str(at::globalContext().float32Precision(backend, operation));
    return PyUnicode_CompareWithASCIIString(before, now.c_str()) == 0;
  }
#else
  explicit Flag(PyObject* of) : getter(of) {}
  bool is_still(PyObject* before) const { return is_still_in_python(before); }
#endif

 private:
  bool is_still_in_python(PyObject* before) const {
    const Ref now = checked(PyObject_CallNoArgs(getter));
    if (now.get() == before) return true;
    const int same = PyObject_RichCompareBool(now.get(), before, Py_EQ);
    if (same < 0) throw Unusual();
    return same == 1;
  }
};

// All flags, in the order of a tuple of `Flags`; set once by unpacking.py.
inline std::vector<Flag>& all_flags() {
  static auto* const flags = new std::vector<Flag>();
  return *flags;
}

// Whether these are the global flags now.
inline bool are_flags(PyObject* flags) {
  Py_ssize_t i = 0;
  for (const Flag& flag : all_flags())
    if (!flag.is_still(PyTuple_GET_ITEM(flags, i++))) return false;
  return true;
}

}  // namespace leannorm
