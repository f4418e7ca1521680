// What ops/backends/triton/tape.py recorded of Triton's operators, repeated in the same way: new tensors, launches.
//
// Python says on which stream, and launches what CUDA's driver cannot launch as it is; all else needs no interpreter's lock.
#pragma once

#include "launches.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/stack.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/Exceptions.h>

#include <bit>
#include <cstring>
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

// The kind of a call: its operator, and all that this decides by. As in Python's keys, 1, 1.0 and True are the same.
class Kind {
 public:
  explicit Kind(const std::string& name) { add_text(name); }
  void add(const c10::IValue& argument) {
    if (argument.isTensor()) {
      const at::Tensor& v = argument.toTensor();
      const auto sizes = v.sizes(), strides = v.strides();
      const c10::Device device = v.device();
      add_word(kTensor, static_cast<uint8_t>(device.type()), static_cast<uint8_t>(device.index()), static_cast<uint8_t>(v.scalar_type()), sizes.size());
      words.append(sizes.begin(), sizes.end());
      words.append(strides.begin(), strides.end());
    } else if (argument.isString()) {
      add_text(argument.toStringRef());
    } else if (argument.isNone()) {
      add_word(kNone);
    } else {
      add_word(kNumber);
      words.push_back(std::bit_cast<uint64_t>(argument.isInt() ? static_cast<double>(argument.toInt()) : argument.toScalar().toDouble()));
    }
  }
  bool operator==(const Kind& other) const { return words == other.words; }
  struct Hash {
    size_t operator()(const Kind& kind) const {
      uint64_t hash = kind.words.size();
      for (const uint64_t word : kind.words) hash = (hash ^ word) * 0x9E3779B97F4A7C15ull, hash ^= hash >> 32;
      return hash;
    }
  };

 private:
  enum Is : uint64_t { kTensor = 1, kNone, kNumber, kText };
  template <class... More> void add_word(Is is, More... more) {
    uint64_t word = is;
    ((word = word << 8 | static_cast<uint64_t>(more)), ...);
    words.push_back(word);
  }
  void add_text(const std::string& text) {
    add_word(kText, text.size());
    for (size_t i = 0; i < text.size(); i += sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, text.data() + i, std::min(sizeof word, text.size() - i));
      words.push_back(word);
    }
  }
  c10::SmallVector<uint64_t, 128> words;
};

// A new tensor of a call, of which the call's kind fixes everything except the memory. One without elements needs none, so
// that all calls share it.
class Made {
 public:
  explicit Made(const at::Tensor& made)
      : sizes(made.sizes().vec()),
        strides(made.strides().vec()),
        dtype(made.scalar_type()),
        keys(c10::computeDispatchKey(dtype, made.layout(), made.device())),
        allocator(made.is_cpu() ? nullptr : made.storage().allocator()) {
    if (made.numel() == 0) without_elements = made;
  }
  // By the device's allocator itself, since torch's operators for new tensors take longer than that.
  at::Tensor operator()() const {
    if (without_elements.defined()) return without_elements;
    return at::detail::empty_strided_generic(sizes, strides, allocator != nullptr ? allocator : c10::GetCPUAllocator(), keys, dtype);
  }

 private:
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  c10::DispatchKeySet keys;
  c10::Allocator* allocator;  // null on a CPU, where a limit sets another one
  at::Tensor without_elements;
};

// The steps of a call; tensors are given by their numbers: of the arguments, then of new tensors.
struct Tape {
  c10::Device device = c10::kCPU;
  std::vector<Made> made;
  std::vector<Launch> launches;
  std::vector<int64_t> results;  // -1: None
};

class Tapes {
 public:
  // keep_tape(operator, arguments, made, launches, results), with Python's lock
  void keep(const std::string& name, const py::tuple& arguments, const py::list& made, const py::list& launches, const py::list& results) {
    auto* const tape = new Tape;
    const std::shared_ptr<const Tape> owned(tape, [](const Tape* t) {
      const py::gil_scoped_acquire gil;
      delete t;
    });
    for (const py::handle one : made) {
      const auto tensor = one.cast<at::Tensor>();
      tape->made.emplace_back(tensor), tape->device = tensor.device();
    }
    for (const py::handle launch : launches) {
      const auto both = launch.cast<py::tuple>();
      tape->launches.emplace_back(both[0], both[1]);
    }
    for (const py::handle result : results) tape->results.push_back(result.cast<int64_t>());
    Kind kind(name);
    for (const py::handle argument : arguments) kind.add(value_of(argument));
    const std::lock_guard<std::mutex> lock(mutex);
    known[std::move(kind)] = owned;
  }
  void forget() {
    std::unordered_map<Kind, std::shared_ptr<const Tape>, Kind::Hash> before;  // which is used after the lock is released
    const std::lock_guard<std::mutex> lock(mutex);
    before.swap(known);
  }
  // Replaces an operator's arguments with its results; false if it has seen no call of this kind.
  bool repeat(const std::string& name, Stack& stack) {
    if (is_watched()) return false;
    const std::shared_ptr<const Tape> tape = tape_of(name, stack);
    if (!tape) return false;
    c10::OptionalDeviceGuard guard;
    if (!tape->device.is_cpu()) guard.reset_device(tape->device);
    Slots slots;
    for (c10::IValue& argument : stack) slots.push_back(argument.isTensor() ? std::move(argument).toTensor() : at::Tensor());
    for (const Made& made : tape->made) slots.push_back(made());
    launch(*tape, slots);
    stack.clear();
    for (const int64_t result : tape->results) stack.emplace_back(result < 0 ? at::Tensor() : slots[result]);
    return true;
  }

  bool knows(const std::string& name, const Stack& stack) { return tape_of(name, stack) != nullptr; }

  py::object module;               // launch.py
  bool serves_dispatcher = false;  // whether torch's dispatcher calls Triton's kernels for their tensors

 private:
  void launch(const Tape& tape, const Slots& slots) {
    c10::SmallVector<Launch::Pointers, 4> pointers;
    bool by_driver = drivers_launch() != nullptr;
    for (const Launch& one : tape.launches) {
      pointers.push_back(one.pointers_to(slots));
      by_driver = by_driver && Launch::are_aligned(pointers.back());
    }
    void* stream = nullptr;
    size_t done = 0;
    const auto in_python = [&](const auto& run) {
      const py::gil_scoped_acquire gil;
      try {
        Around around(module);
        run(around);
      } catch (py::error_already_set& error) {
        throw_error(error);
      }
    };
    const auto launch_the_rest = [&](Around& around) {
      for (; done < pointers.size(); ++done) tape.launches[done].by_python(slots, pointers[done], around);
    };
    in_python([&](Around& around) {
      for (const Launch& one : tape.launches) by_driver = by_driver && one.stream_of_driver(around) != nullptr;
      by_driver ? void(stream = around.stream_of_device()) : launch_the_rest(around);
    });
    while (done < pointers.size() && tape.launches[done].by_driver(pointers[done], stream)) ++done;
    if (done < pointers.size()) in_python(launch_the_rest);
  }
  std::shared_ptr<const Tape> tape_of(const std::string& name, const Stack& stack) {
    Kind kind(name);
    for (const c10::IValue& argument : stack) kind.add(argument);
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = known.find(kind);
    return found == known.end() ? nullptr : found->second;
  }
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
  std::unordered_map<Kind, std::shared_ptr<const Tape>, Kind::Hash> known;
};

inline Tapes& tapes() {
  static Tapes* const all = new Tapes;  // which no end of the process destroys: Python may be gone by then
  return *all;
}

}  // namespace leannorm
