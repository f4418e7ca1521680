// A launch of Triton's with all arguments except its tensors, as a `Launch` of launch.py: that one handles everything unusual.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/utils/pybind.h>

#include <tuple>
#include <vector>

namespace leannorm {

using Slots = c10::SmallVector<at::Tensor, 32>;  // a call's arguments, then its new tensors

inline py::object checked(PyObject* made) {
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

// What the launches of one call share, which is asked for once: are they ordinary, and on which stream?
class Around {
 public:
  explicit Around(const py::object& module) : module(module) {}
  // The stream, as a number of Python; nullptr if a profiler listens to launches, or if another device is the current one.
  // `found` is the end of what launch.py keeps of a kernel: Triton's settings, its function for the stream, the device.
  PyObject* stream_for(PyObject* settings, PyObject* stream_of, PyObject* device) {
    static PyObject* const enter = PyUnicode_InternFromString("launch_enter_hook");
    static PyObject* const leave = PyUnicode_InternFromString("launch_exit_hook");
    static PyObject* const current_device = PyUnicode_InternFromString("_current_device");
    if (std::exchange(is_known, true)) return stream.ptr();
    if (listens(settings, enter) || listens(settings, leave)) return nullptr;
    const py::object current = checked(PyObject_CallNoArgs(got(module.ptr(), current_device).ptr()));
    if (PyObject_RichCompareBool(current.ptr(), device, Py_EQ) == 1) stream = checked(PyObject_CallOneArg(stream_of, device));
    return stream.ptr();
  }

 private:
  static py::object got(PyObject* from, PyObject* name) { return checked(PyObject_GetAttr(from, name)); }
  static bool listens(PyObject* settings, PyObject* name) {
    static PyObject* const calls = PyUnicode_InternFromString("calls");
    const py::object hook = got(settings, name);
    if (!PyObject_HasAttr(hook.ptr(), calls)) return true;
    return PyObject_IsTrue(got(hook.ptr(), calls).ptr()) != 0;
  }

  const py::object& module;  // launch.py
  bool is_known = false;
  py::object stream;
};

class Launch {
 public:
  Launch(py::handle launch, py::handle places)
      : whole(py::reinterpret_borrow<py::object>(launch)), places(py::reinterpret_borrow<py::object>(places)) {
    for (const py::handle place : places) {
      const auto [position, slot, offset] = place.cast<std::tuple<size_t, size_t, int64_t>>();
      where.push_back({position, slot, offset});
    }
  }
  // With Python's lock.
  void operator()(const Slots& slots, Around& around) const {
    c10::SmallVector<uintptr_t, 16> pointers;
    uintptr_t bits = 0;
    for (const auto& [position, slot, offset] : where) {
      const at::Tensor& v = slots[slot];
      pointers.push_back(reinterpret_cast<uintptr_t>(v.data_ptr()) + offset * v.element_size());
      bits |= pointers.back();
    }
    PyObject* const stream = (bits & 15) != 0 || !knows_kernel() ? nullptr : around.stream_for(settings(), stream_of(), device());
    if (stream == nullptr) {  // or another kernel, or none known yet
      py::list given;
      for (const at::Tensor& v : slots) given.append(v.defined() ? py::cast(v) : py::none());
      whole(given, places);
      return;
    }
    c10::SmallVector<PyObject*, 80> given(arguments.begin(), arguments.end());
    given[kStream] = stream;
    c10::SmallVector<py::object, 16> numbers;
    for (size_t i = 0; i < where.size(); ++i) {
      numbers.push_back(checked(PyLong_FromUnsignedLongLong(pointers[i])));
      given[first + where[i].position] = numbers.back().ptr();
    }
    checked(PyObject_Vectorcall(PyTuple_GET_ITEM(found.ptr(), 0), given.data(), given.size(), nullptr));
  }

 private:
  enum { kStream = 3 };  // its place among the launcher's arguments, behind the programs along three axes
  struct Place {
    size_t position, slot;
    int64_t offset;
  };
  // `aligned` of launch.py: what runs the kernel, its arguments between the stream and the kernel's own, and the rest for
  // `Around`. Once it is there it stays.
  bool knows_kernel() const {
    if (found) return true;
    const py::object known = whole.attr("aligned");
    if (known.is_none()) return false;
    found = known;
    static PyObject* const one = PyLong_FromLong(1);
    arguments = {whole.attr("programs").cast<py::object>().ptr(), one, one, nullptr};
    PyObject* const before = PyTuple_GET_ITEM(found.ptr(), 1);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(before); ++i) arguments.push_back(PyTuple_GET_ITEM(before, i));
    first = arguments.size();
    for (const py::handle value : whole.attr("values")) arguments.push_back(value.ptr());
    return true;
  }
  PyObject* settings() const { return PyTuple_GET_ITEM(found.ptr(), 2); }
  PyObject* stream_of() const { return PyTuple_GET_ITEM(found.ptr(), 3); }
  PyObject* device() const { return PyTuple_GET_ITEM(found.ptr(), 4); }

  py::object whole, places;
  std::vector<Place> where;
  mutable py::object found;
  mutable std::vector<PyObject*> arguments;  // which `whole` and `found` own
  mutable size_t first = 0;                  // of the kernel's own
};

}  // namespace leannorm
