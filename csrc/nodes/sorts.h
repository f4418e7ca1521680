// What one pass knows, and the sorts of values (saving/sorts.py): a number for everything that recipes and policies
// read of one.
#pragma once

#include "values.h"

namespace leannorm {

// Mixes a number into a hash.
inline void mix(uint64_t& h, uint64_t v) { h = (h ^ v) * 0x9E3779B97F4A7C15ull ^ (h >> 29); }

// Layouts of tensors as Python has them, each made once.
struct Layouts {
  Ref of(PyObject* object, const Tensor& t) {
    static PyObject* const stride_name = PyUnicode_InternFromString("stride");
    c10::DimVector key(t.sizes().begin(), t.sizes().end());
    key.append(t.strides().begin(), t.strides().end());
    key.push_back(static_cast<int64_t>(t.scalar_type()));
    uint64_t h = 0;
    for (const int64_t v : key) mix(h, v);
    if (places_.empty()) places_.resize(512);
    auto* place = &places_[(h >> 32) % places_.size()];
    if (place->second && place->first == key) return borrowed(place->second.get());
    const Ref shape = get(object, names().shape), dtype = get(object, names().dtype);
    const Ref stride = checked(PyObject_CallMethodNoArgs(object, stride_name));
    Ref layout = checked(PyTuple_Pack(3, shape.get(), stride.get(), dtype.get()));
    place->first = key, place->second = borrowed(layout.get());
    return layout;
  }

 private:
  std::vector<std::pair<c10::DimVector, Ref>> places_;
};
inline Layouts& layouts = *new Layouts;  // never destroyed: Python is gone before that

// The sorts of kept values, by their layouts and names.
struct Sorts {
  struct Of {
    Ref layout, name, sort;
    int flavor;  // whether it has a layout of its own, is a parameter, is a trained leaf, is on a device with streams
  };
  std::unordered_map<uint64_t, Of> of;
};

// What a pass knows and its kinds read.
struct Now {
  uint64_t thread, since, next;  // this thread's next node
  PyObject *flags, *before, *sorter;
  Sorts* sorts;
  bool from_here;
  long most_in_a_row, most_runs;  // steps, as search.py has them
  Node* saved_too = nullptr;      // the node that made what the one that saves now has saved just before

  bool made(const Node& node) const { return node.thread_id() == thread && node.sequence_nr() >= since; }
};

// Whether a kept value has nothing besides its tensor that a sort includes.
inline bool is_plain_held(PyObject* value) {
  for (const Slot name : {slots.spec, slots.original})
    if (get(value, name).get() != Py_None) return false;
  for (const Slot name : {slots.in_rows, slots.from_narrow})
    if (get(value, name).get() != Py_False) return false;
  return number(value, slots.products) == 0;
}

inline Ref sort_of_held(const Now& now, PyObject* value) {
  Ref layout = get(value, slots.layout), name = get(value, slots.name);
  Ref tensor = get(value, slots.tensor);
  const Tensor* const t = tensor_of(tensor.get());
  if (t == nullptr || t->is_view() || !is_plain_held(value)) return checked(PyObject_CallOneArg(now.sorter, value));
  const bool is_parameter = Py_TYPE(tensor.get()) != reinterpret_cast<PyTypeObject*>(THPVariableClass);
  const bool streamed = get(value, slots.stream).get() != Py_None;
  const int flavor = (layout.get() == Py_None) + 2 * is_parameter + 4 * t->requires_grad() + 8 * streamed;
  uint64_t h = reinterpret_cast<uint64_t>(name.get()) + flavor;
  mix(h, reinterpret_cast<uint64_t>(layout.get()));
  if (layout.get() == Py_None) layout = layouts.of(tensor.get(), *t), mix(h, reinterpret_cast<uint64_t>(layout.get()));
  constexpr size_t kMostSorts = 4096;
  if (now.sorts->of.size() > kMostSorts) now.sorts->of.clear();
  auto found = now.sorts->of.find(h);
  if (found != now.sorts->of.end()) {
    // equal layouts mostly are one object
    const Sorts::Of& of = found->second;
    if (of.layout.get() == layout.get() && of.name.get() == name.get() && of.flavor == flavor) {
      set(value, slots.sort, of.sort);
      return borrowed(of.sort.get());
    }
  }
  Ref sort = checked(PyObject_CallOneArg(now.sorter, value));
  now.sorts->of[h] = {std::move(layout), std::move(name), borrowed(sort.get()), flavor};
  return sort;
}

// What recipes and policies read of a value, as a number (sorts.py).
inline int64_t sort_of(const Now& now, PyObject* value) {
  Ref sort = get(value, slots.sort);
  const bool is_held = get(value, slots.step).get() == Py_None;
  if (sort.get() == Py_None && is_held) sort = sort_of_held(now, value);
  else if (sort.get() == Py_None) sort = checked(PyObject_CallOneArg(now.sorter, value));
  return PyLong_AsLongLong(sort.get());
}

}  // namespace leannorm
