// A launch of Triton's with all arguments except its tensors, as a `Launch` of launch.py: that one handles everything unusual.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/utils/pybind.h>

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>
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
  void* stream_of_device() const { return PyLong_AsVoidPtr(stream.ptr()); }

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

// CUDA's cuLaunchKernel, where its library is loaded: function, programs and threads along three axes, bytes of shared memory,
// stream, arguments.
using DriversLaunch = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
inline DriversLaunch& drivers_launch() {
  static DriversLaunch found = [] {
    void* const library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    return library == nullptr ? nullptr : reinterpret_cast<DriversLaunch>(dlsym(library, "cuLaunchKernel"));
  }();
  return found;
}

class Launch {
 public:
  using Pointers = c10::SmallVector<uint64_t, 16>;

  Launch(py::handle launch, py::handle places)
      : whole(py::reinterpret_borrow<py::object>(launch)), places(py::reinterpret_borrow<py::object>(places)) {
    for (const py::handle place : places) {
      const auto [position, slot, offset] = place.cast<std::tuple<size_t, size_t, int64_t>>();
      where.push_back({position, slot, offset, 0});
    }
  }
  // Where its tensors lie; the kernel that `aligned` of launch.py has is for multiples of 16.
  Pointers pointers_to(const Slots& slots) const {
    Pointers pointers;
    for (const Place& one : where) {
      const at::Tensor& v = slots[one.slot];
      pointers.push_back(reinterpret_cast<uint64_t>(v.data_ptr()) + one.offset * v.element_size());
    }
    return pointers;
  }
  static bool are_aligned(const Pointers& pointers) {
    return std::all_of(pointers.begin(), pointers.end(), [](uint64_t p) { return (p & 15) == 0; });
  }

  // With Python's lock. The stream if the driver can launch it, otherwise nullptr.
  PyObject* stream_of_driver(Around& around) const {
    return knows_kernel() && threads > 0 ? around.stream_for(of_found(2), of_found(3), of_found(4)) : nullptr;
  }
  // Without Python's lock: a launch may wait until the device has done some of its work. False if the driver refuses, as it
  // does in a thread that has no CUDA context yet: Triton's launcher makes it, or raises the error.
  bool by_driver(const Pointers& pointers, void* stream) const {
    c10::SmallVector<uint64_t, 64> values(words.begin(), words.end());
    for (size_t i = 0; i < where.size(); ++i) values[where[i].word] = pointers[i];
    c10::SmallVector<void*, 64> arguments;
    for (uint64_t& value : values) arguments.push_back(&value);
    return drivers_launch()(function, programs, 1, 1, threads, 1, 1, shared, stream, arguments.data(), nullptr) == 0;
  }
  // With Python's lock.
  void by_python(const Slots& slots, const Pointers& pointers, Around& around) const {
    PyObject* const stream = are_aligned(pointers) && knows_kernel() ? around.stream_for(of_found(2), of_found(3), of_found(4)) : nullptr;
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
    checked(PyObject_Vectorcall(of_found(0), given.data(), given.size(), nullptr));
  }

 private:
  enum { kStream = 3 };  // its place among the launcher's arguments, behind the programs along three axes
  struct Place {
    size_t position, slot;
    int64_t offset;
    mutable size_t word;  // among those that the driver passes
  };
  // `aligned` of launch.py: what runs the kernel, its arguments between the stream and the kernel's own, Triton's settings, its
  // function for the stream, and the device. Once it is there it stays.
  bool knows_kernel() const {
    if (found) return true;
    const py::object known = whole.attr("aligned");
    if (known.is_none()) return false;
    found = known;
    static PyObject* const one = PyLong_FromLong(1);
    const py::object number = whole.attr("programs");
    programs = number.cast<unsigned>();
    arguments = {number.ptr(), one, one, nullptr};
    PyObject* const before = of_found(1);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(before); ++i) arguments.push_back(PyTuple_GET_ITEM(before, i));
    first = arguments.size();
    for (const py::handle value : whole.attr("values")) arguments.push_back(value.ptr());
    if (const py::object way = whole.attr("driver"); !way.is_none()) lay_out(way.cast<std::tuple<uintptr_t, unsigned, unsigned, std::string>>());
    return true;
  }
  // `driver` of launch.py: the kernel's handle, threads and bytes of shared memory, and of each argument how it is passed.
  void lay_out(const std::tuple<uintptr_t, unsigned, unsigned, std::string>& way) const {
    const auto& [handle, count, bytes, letters] = way;
    size_t placed = 0;
    for (size_t position = 0; position < letters.size(); ++position) {
      const char letter = letters[position];
      if (letter == '-') continue;  // a part of the compiled kernel
      uint64_t word = 0;
      if (letter == 'p') {
        for (const Place& place : where)
          if (place.position == position) place.word = words.size(), ++placed;
      } else if (letter != '0') {
        word = of_number(py::handle(arguments[first + position]), letter);
      }
      words.push_back(word);
    }
    if (placed != where.size()) return;
    function = reinterpret_cast<void*>(handle), threads = count, shared = bytes;
  }
  static uint64_t of_number(py::handle value, char letter) {
    uint64_t word = 0;
    const auto put = [&word](auto number) { std::memcpy(&word, &number, sizeof number); };
    if (letter == 'f') put(value.cast<float>());
    else if (letter == 'd') put(value.cast<double>());
    else put(value.cast<int64_t>());  // of 4 bytes or of 8: the first ones are the same
    return word;
  }
  PyObject* of_found(Py_ssize_t i) const { return PyTuple_GET_ITEM(found.ptr(), i); }

  py::object whole, places;
  std::vector<Place> where;
  mutable py::object found;
  mutable std::vector<PyObject*> arguments;  // which `whole` and `found` own
  mutable size_t first = 0;                  // of the kernel's own
  mutable void* function = nullptr;
  mutable unsigned programs = 0, threads = 0, shared = 0;
  mutable std::vector<uint64_t> words;
};

}  // namespace leannorm
