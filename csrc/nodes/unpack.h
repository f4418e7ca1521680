// The second hook of lean(): returns what is kept and rebuilds what ordinary steps rebuild, as unpacking.py and
// values.py do. Whatever is unusual, or has changed, is left to Python's hook: this is found out before anything is
// changed.
#pragma once

#include "flags.h"
#include "sorts.h"

#include <torch/csrc/autograd/function.h>

#include <unordered_map>
#include <unordered_set>

namespace leannorm {

// Set once by unpacking.py.
struct Unpacking {
  PyObject* by_python = nullptr;
};
inline Unpacking unpacking;

enum Owner { kOwn, kShared, kHeld };  // as steps.py
struct Made {
  Ref tensor;
  Owner owner;
};

class Rebuild {
 public:
  // Whether it is rebuilt by ordinary steps, and everything that they read is unchanged.
  bool is_usual(PyObject* value) {
    if (!is_plain_step(value) || get(value, slots.in_rows).get() != Py_False || !is_current(value)) return false;
    for (PyObject* of = value; is_kind(of, "view") && PyTuple_GET_SIZE(field_of(of, kInputs)) != 0;) {
      of = PyTuple_GET_ITEM(field_of(of, kInputs), 0);
      if (get(of, slots.packed).get() != Py_None || get(of, slots.memory).get() != Py_None) return false;
    }
    if (get(value, slots.packed).get() != Py_None || !is_proved(value)) return false;
    if (is_streamed_ && !(stream_told_ && on_one_stream())) return false;
    return flags_ == nullptr || are_flags(flags_);
  }

  // For one reader; kept for the others, unless it is a view of what is kept.
  Made of(PyObject* value) {
    Made made{get(value, slots._rebuilt), kShared};
    const bool is_gone = made.tensor.get() == Py_None;  // it may have been proved since, for another reader
    if (const auto kept = at_hand_.find(value); is_gone && kept != at_hand_.end()) made.tensor = borrowed(kept->second.get());
    else if (is_gone) made = run(value);
    const long left = number(value, slots._left) - 1;
    if (left <= 0) set(value, slots._rebuilt, Py_None), set(value, slots._left, get(value, slots.users));
    else set_number(value, slots._left, left);
    if (left > 0 && made.owner != kHeld) {
      const Tensor& t = THPVariable_Unpack(made.tensor.get());
      set(value, slots._rebuilt, made.tensor), made.owner = kShared;
      set_number(value, slots._rebuilt_version, t._version()), set(value, slots._rebuilt_on, stream_of(t));
    }
    return made;
  }

 private:
  bool is_plain_step(PyObject* value) {
    for (const Slot none : {slots.spec, slots.original, slots.memory})
      if (get(value, none).get() != Py_None) return false;
    is_streamed_ = is_streamed_ || get(value, slots.stream).get() != Py_None;
    return get(value, slots.from_narrow).get() == Py_False && !is_kind(value, "held");
  }
  bool is_proved(PyObject* value) {
    if (!seen_.insert(value).second) return true;
    PyObject* const step = in_its_place(value, slots.step);
    if (step == Py_None) return holds(value);
    if (!is_plain_step(value)) return false;
    if (Ref there = get(value, slots._rebuilt); there.get() != Py_None) {
      const Tensor* const t = tensor_of(there.get());
      if (t == nullptr || static_cast<long>(t->_version()) != number(value, slots._rebuilt_version)) return false;
      is_streamed_ = is_streamed_ || get(value, slots._rebuilt_on).get() != Py_None;
      note_stream(*t);
      at_hand_.emplace(value, std::move(there));
      return true;
    }
    PyObject* const flags = PyTuple_GET_ITEM(step, kFlags);
    if (flags_ == nullptr && flags != Py_None) flags_ = flags;
    if (flags != Py_None && flags != flags_) return false;
    PyObject* const captured = PyTuple_GET_ITEM(step, kCaptured);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(captured); ++i)
      if (const Tensor* const of = tensor_of(PyTuple_GET_ITEM(captured, i)); of != nullptr && of->_version() != 0) return false;
    PyObject* const inputs = PyTuple_GET_ITEM(step, kInputs);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(inputs); ++i)
      if (!is_proved(PyTuple_GET_ITEM(inputs, i))) return false;
    return true;
  }
  bool holds(PyObject* value) {
    if (get(value, slots.spec).get() != Py_None || !is_current(value)) return false;
    const Ref held = as_pinned(value), own = get(value, slots.tensor), sample = get(value, slots.sample);
    const Tensor *const t = tensor_of(held.get()), *const leaf = tensor_of(own.get());
    if (t == nullptr || leaf == nullptr) return false;
    is_streamed_ = is_streamed_ || get(value, slots.stream).get() != Py_None;
    note_stream(*t);
    if (sample.get() == Py_None && leaf->requires_grad()) {  // not sampled: of a device, or it may be freed
      if (t->is_cpu() || !t->has_storage() || (t->numel() != 0 && t->storage().nbytes() == 0)) return false;
    }
    return matches(sample.get(), *t);
  }
  // Records the stream on which it would be read now.
  void note_stream(const Tensor& t) {
    if (!t.is_cpu()) stream_of(t), is_streamed_ = stream_told_ = true;
  }

  Made run(PyObject* value) {
    const Ref step = get(value, slots.step);
    PyObject* const inputs = PyTuple_GET_ITEM(step.get(), kInputs);
    std::vector<Made> made;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(inputs); ++i) {
      PyObject* const input = PyTuple_GET_ITEM(inputs, i);
      if (in_its_place(input, slots.step) == Py_None) made.push_back({as_pinned(input), kHeld});
      else made.push_back(of(input));
    }
    PyObject* const in_place = PyTuple_GET_ITEM(step.get(), kInPlace);
    bool overwrites = in_place != Py_None && !made.empty() && made[0].owner == kOwn;
    if (overwrites) overwrites = THPVariable_Unpack(made[0].tensor.get()).is_non_overlapping_and_dense();
    std::vector<PyObject*> given;
    for (const Made& input : made) given.push_back(input.tensor.get());
    for (const Field more : {kCaptured, kConstants}) {
      PyObject* const from = PyTuple_GET_ITEM(step.get(), more);
      given.insert(given.end(), &PyTuple_GET_ITEM(from, 0), &PyTuple_GET_ITEM(from, 0) + PyTuple_GET_SIZE(from));
    }
    PyObject* const function = overwrites ? in_place : PyTuple_GET_ITEM(step.get(), kFunction);
    Made result{raised(PyObject_Vectorcall(function, given.data(), given.size(), nullptr)), kOwn};
    if (!THPVariable_Check(result.tensor.get())) throw py::type_error("a step makes a tensor");
    const Tensor& t = THPVariable_Unpack(result.tensor.get());
    for (const Made& input : made)
      if (input.owner > result.owner && THPVariable_Unpack(input.tensor.get()).is_alias_of(t)) result.owner = input.owner;
    PyObject* const captured = PyTuple_GET_ITEM(step.get(), kCaptured);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(captured); ++i) {
      PyObject* const of = PyTuple_GET_ITEM(captured, i);
      if (of != Py_None && THPVariable_Unpack(of).is_alias_of(t)) result.owner = kHeld;
    }
    if (!matches(in_its_place(value, slots.sample), t)) {
      static PyObject* const check = PyUnicode_InternFromString("_check_rebuilt");
      raised(PyObject_CallMethodOneArg(value, check, result.tensor.get()));
    }
    return result;
  }
  static Ref raised(PyObject* result) {
    if (result == nullptr) throw python_error();
    return Ref(result);
  }

  PyObject* flags_ = nullptr;
  bool is_streamed_ = false, stream_told_ = false;  // on a device with streams; their stream is known
  std::unordered_set<PyObject*> seen_;
  std::unordered_map<PyObject*, Ref> at_hand_;  // what they are made of was not checked, and must not be run
};

// Whether the reader only needs a tensor to read: it is a node of torch's or ours (a user's may write into what it
// has saved), with neither a graph of the backward pass nor autocast.
inline bool reads_alone() {
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr || dynamic_cast<const torch::autograd::TraceableFunction*>(node.get()) == nullptr) return false;
  const auto excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
  return !at::GradMode::is_enabled() && (excluded & c10::autocast_dispatch_keyset) == c10::autocast_dispatch_keyset;
}

inline PyObject* unpack(PyObject*, PyObject* packed) {
  HANDLE_TH_ERRORS
  const Unwatched unwatched;
  Rebuild rebuild;
  bool is_usual = false;
  try {
    if (is_value(packed) && in_its_place(packed, slots.step) == Py_None) {
      Ref held = get(packed, slots.tensor);
      const Tensor* const t = tensor_of(held.get());
      const bool is_plain = t != nullptr && get(packed, slots.spec).get() == Py_None;
      if (is_plain && static_cast<long>(t->_version()) == number(packed, slots.version)) return held.release();
    } else {
      is_usual = is_value(packed) && reads_alone() && rebuild.is_usual(packed);
    }
  } catch (const Unusual&) {
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) return nullptr;
    PyErr_Clear();
  }
  if (!is_usual) return PyObject_CallOneArg(unpacking.by_python, packed);
  try {
    return rebuild.of(packed).tensor.release();
  } catch (const Unusual&) {  // no memory for a number
    return PyErr_Occurred() ? nullptr : PyErr_NoMemory();
  }
  END_HANDLE_TH_ERRORS
}

}  // namespace leannorm
