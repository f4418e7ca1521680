// What ops/backends/triton/tape.py recorded of Triton's operators, repeated in the same way: new tensors, launches.
//
// Triton launches by a Python function, so a launch needs the interpreter's lock; everything else does without it.
#pragma once

#include <ATen/core/stack.h>
#include <ATen/ops/empty_like.h>
#include <ATen/record_function.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <mutex>
#include <unordered_map>

namespace leannorm {

using torch::jit::Stack;

// A Python error in a form that other threads, and autograd, can pass on.
[[noreturn]] inline void throw_error(py::error_already_set& error) {
  python_error raised;
  error.restore();
  raised.persist();
  throw raised;
}

// Whether anyone in this thread is to see each operator, such as a profiler or a pass in lean().
inline bool is_watched() {
  if (!at::hasCallbacks()) return false;
  const auto called = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
  return called.has_value() && !called->callbacks_.empty();
}

// A part of a call's kind: what an operator decides by. As in Python's keys, 1, 1.0 and True are the same.
inline void add_kind(std::string& kind, const c10::IValue& argument) {
  const auto add = [&](auto value) { kind.append(reinterpret_cast<const char*>(&value), sizeof value); };
  if (argument.isTensor()) {
    const at::Tensor& v = argument.toTensor();
    add('T'), add(v.device().type()), add(v.device().index()), add(v.scalar_type()), add(v.dim());
    for (const int64_t size : v.sizes()) add(size);
    for (const int64_t stride : v.strides()) add(stride);
  } else if (argument.isString()) {
    add('S'), add(argument.toStringRef().size()), kind += argument.toStringRef();
  } else if (argument.isNone()) {
    add('N');
  } else {
    add('D'), add(argument.toScalar().toDouble());
  }
}

// A launch with all arguments except its tensors; a `Launch` of launch.py handles everything unusual.
class Launch {
 public:
  Launch(py::handle launch, py::handle places)
      : whole(py::reinterpret_borrow<py::object>(launch)), places(py::reinterpret_borrow<py::object>(places)) {
    programs = whole.attr("programs");
    for (const py::handle value : whole.attr("values")) values.push_back(py::reinterpret_borrow<py::object>(value));
    for (const py::handle place : places) {
      const auto [position, slot, offset] = place.cast<std::tuple<size_t, size_t, int64_t>>();
      where.push_back({position, slot, offset});
    }
  }
  void operator()(const std::vector<at::Tensor>& slots, const py::object& module) const {
    static PyObject* const aligned = PyUnicode_InternFromString("aligned");
    const py::object found = got(whole.ptr(), aligned);
    uintptr_t bits = 0;
    c10::SmallVector<uintptr_t, 16> pointers;
    for (const auto& [position, slot, offset] : where) {
      const at::Tensor& v = slots[slot];
      pointers.push_back(reinterpret_cast<uintptr_t>(v.data_ptr()) + offset * v.element_size());
      bits |= pointers.back();
    }
    // another kernel, none known yet, a profiler, another device
    if ((bits & 15) != 0 || found.is_none() || !usual(found.ptr(), module)) {
      py::list given;
      for (const at::Tensor& v : slots) given.append(v.defined() ? py::cast(v) : py::none());
      whole(given, places);
      return;
    }
    const auto of_found = [&](Py_ssize_t i) { return PyTuple_GET_ITEM(found.ptr(), i); };
    const py::object stream = checked(PyObject_CallOneArg(of_found(4), of_found(5)));
    static PyObject* const one = PyLong_FromLong(1);
    c10::SmallVector<PyObject*, 64> given{programs.ptr(), one,     one,     stream.ptr(), of_found(1),
                                          of_found(2),    Py_None, Py_None, Py_None};
    const size_t first = given.size();
    for (const py::object& value : values) given.push_back(value.ptr());
    c10::SmallVector<py::object, 16> numbers;
    for (size_t i = 0; i < where.size(); ++i) {
      numbers.push_back(checked(PyLong_FromUnsignedLongLong(pointers[i])));
      given[first + where[i].position] = numbers.back().ptr();
    }
    checked(PyObject_Vectorcall(of_found(0), given.data(), given.size(), nullptr));
  }

 private:
  struct Place {
    size_t position, slot;
    int64_t offset;
  };
  static py::object checked(PyObject* made) {
    if (made == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(made);
  }
  static py::object got(PyObject* from, PyObject* name) { return checked(PyObject_GetAttr(from, name)); }
  static bool listens(PyObject* settings, PyObject* name) {
    static PyObject* const calls = PyUnicode_InternFromString("calls");
    const py::object hook = got(settings, name);
    if (!PyObject_HasAttr(hook.ptr(), calls)) return true;
    return PyObject_IsTrue(got(hook.ptr(), calls).ptr()) != 0;
  }
  // Whether no profiler listens to launches, and the kernel's device is the current one.
  static bool usual(PyObject* found, const py::object& module) {
    static PyObject* const enter = PyUnicode_InternFromString("launch_enter_hook");
    static PyObject* const leave = PyUnicode_InternFromString("launch_exit_hook");
    static PyObject* const device = PyUnicode_InternFromString("_current_device");
    PyObject* const settings = PyTuple_GET_ITEM(found, 3);
    if (listens(settings, enter) || listens(settings, leave)) return false;
    const py::object current = checked(PyObject_CallNoArgs(got(module.ptr(), device).ptr()));
    return PyObject_RichCompareBool(current.ptr(), PyTuple_GET_ITEM(found, 5), Py_EQ) == 1;
  }

  py::object whole, places, programs;
  std::vector<py::object> values;
  std::vector<Place> where;
};

// The steps of a call; tensors are given by their numbers: of the arguments, then of new tensors.
struct Tape {
  struct Made {
    size_t like;
    at::Tensor pattern;  // in its place, without memory
  };
  std::vector<Made> made;
  std::vector<Launch> launches;
  std::vector<int64_t> results;  // -1: None
};

class Tapes {
 public:
  // keep_tape(operator, arguments, made, launches, results), with Python's lock
  void keep(const std::string& name, const py::tuple& arguments, const py::list& made, const py::list& launches,
            const py::list& results) {
    auto* const tape = new Tape;
    const std::shared_ptr<const Tape> owned(tape, [](const Tape* t) {
      const py::gil_scoped_acquire gil;
      delete t;
    });
    for (const py::handle like : made) {
      if (PyLong_Check(like.ptr())) tape->made.push_back({like.cast<size_t>(), {}});
      else tape->made.push_back({0, like.cast<at::Tensor>()});
    }
    for (const py::handle launch : launches) {
      const auto both = launch.cast<py::tuple>();
      tape->launches.emplace_back(both[0], both[1]);
    }
    for (const py::handle result : results) tape->results.push_back(result.cast<int64_t>());
    std::string kind = name;
    for (const py::handle argument : arguments) add_kind(kind, value_of(argument));
    const std::lock_guard<std::mutex> lock(mutex);
    known[std::move(kind)] = owned;
  }
  void forget() {
    std::unordered_map<std::string, std::shared_ptr<const Tape>> before;  // which is used after the lock is released
    const std::lock_guard<std::mutex> lock(mutex);
    before.swap(known);
  }
  // Replaces an operator's arguments with its results; false if it has seen no call of this kind.
  bool repeat(const std::string& name, Stack& stack) {
    if (is_watched()) return false;
    std::string kind = name;
    kind.reserve(1024);
    for (const c10::IValue& argument : stack) add_kind(kind, argument);
    std::shared_ptr<const Tape> tape;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      const auto found = known.find(kind);
      if (found == known.end()) return false;
      tape = found->second;
    }
    std::vector<at::Tensor> slots;
    slots.reserve(stack.size() + tape->made.size());
    for (const c10::IValue& argument : stack) slots.push_back(argument.isTensor() ? argument.toTensor() : at::Tensor());
    for (const auto& [like, pattern] : tape->made) slots.push_back(at::empty_like(pattern.defined() ? pattern : slots[like]));
    {
      const py::gil_scoped_acquire gil;
      try {
        for (const Launch& launch : tape->launches) launch(slots, module);
      } catch (py::error_already_set& error) {
        throw_error(error);
      }
    }
    stack.clear();
    for (const int64_t result : tape->results) stack.emplace_back(result < 0 ? at::Tensor() : slots[result]);
    return true;
  }

  py::object module;  // launch.py

 private:
  static c10::IValue value_of(py::handle argument) {
    PyObject* const given = argument.ptr();
    if (given == Py_None) return {};
    if (PyBool_Check(given)) return given == Py_True;
    if (PyFloat_Check(given)) return argument.cast<double>();
    if (PyLong_Check(given)) return argument.cast<int64_t>();
    if (PyUnicode_Check(given)) return argument.cast<std::string>();
    return argument.cast<at::Tensor>();
  }

  std::mutex mutex;
  std::unordered_map<std::string, std::shared_ptr<const Tape>> known;
};

inline Tapes& tapes() {
  static Tapes* const all = new Tapes;  // which no end of the process destroys: Python may be gone by then
  return *all;
}

}  // namespace leannorm
