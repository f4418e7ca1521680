// The Python objects that lean()'s search makes (saving/values.py, steps.py, evidence.py, graph.py), made here.
#pragma once

#include "fields.h"

#include <torch/csrc/autograd/python_anomaly_mode.h>

namespace leannorm {

using at::Tensor;

inline Ref borrowed(PyObject* object) {
  Py_XINCREF(object);
  return Ref(object);
}

// The names of attributes.
struct Names {
#define LEANNORM_NAME(name) *name = PyUnicode_InternFromString(#name)
  PyObject LEANNORM_NAME(tensor), LEANNORM_NAME(version), LEANNORM_NAME(step), LEANNORM_NAME(name), LEANNORM_NAME(users);
  PyObject LEANNORM_NAME(_left), LEANNORM_NAME(sample), LEANNORM_NAME(provenance), LEANNORM_NAME(order), LEANNORM_NAME(call);
  PyObject LEANNORM_NAME(layout), LEANNORM_NAME(seen_at), LEANNORM_NAME(as_made), LEANNORM_NAME(copied_to_edit), LEANNORM_NAME(watch);
  PyObject LEANNORM_NAME(memory), LEANNORM_NAME(shape), LEANNORM_NAME(dtype), LEANNORM_NAME(seconds), LEANNORM_NAME(products);
  PyObject LEANNORM_NAME(why), LEANNORM_NAME(frees), LEANNORM_NAME(sort), LEANNORM_NAME(spec);
  PyObject LEANNORM_NAME(original), LEANNORM_NAME(seen), LEANNORM_NAME(_largest), LEANNORM_NAME(_anything_waits), LEANNORM_NAME(_closed);
  PyObject LEANNORM_NAME(_call_of), LEANNORM_NAME(_retry), LEANNORM_NAME(rebuilds);
  PyObject LEANNORM_NAME(stream), LEANNORM_NAME(in_rows), LEANNORM_NAME(from_narrow), LEANNORM_NAME(told), LEANNORM_NAME(again);
  PyObject LEANNORM_NAME(_offers), LEANNORM_NAME(place), LEANNORM_NAME(recent), LEANNORM_NAME(append);
  PyObject LEANNORM_NAME(plan), LEANNORM_NAME(made_for), LEANNORM_NAME(calls), LEANNORM_NAME(rebuild), LEANNORM_NAME(narrow);
  PyObject LEANNORM_NAME(whys);
#undef LEANNORM_NAME
  PyObject* waiting = PyUnicode_InternFromString("leannorm waiting");
  PyObject* registry[8];  // the keys of a node's metadata, by output; as graph.py
  Names() {
    for (int i = 0; i < 8; ++i) registry[i] = PyUnicode_InternFromString(("leannorm " + std::to_string(i)).c_str());
  }
};
inline const Names& names() {
  static const Names made;
  return made;
}

// What could not be made in the usual way: Python does it.
struct Unusual {};

inline Ref checked(PyObject* object) {
  if (object == nullptr) throw Unusual();
  return Ref(object);
}
inline Ref get(PyObject* object, PyObject* name) { return checked(PyObject_GetAttr(object, name)); }
inline void set(PyObject* object, PyObject* name, PyObject* to) {
  if (to == nullptr || PyObject_SetAttr(object, name, to) != 0) throw Unusual();
}
inline void set(PyObject* object, PyObject* name, const Ref& to) { set(object, name, to.get()); }
inline long number(PyObject* object, PyObject* name) {
  const long found = PyLong_AsLong(get(object, name).get());
  if (found == -1 && PyErr_Occurred()) throw Unusual();
  return found;
}
inline void set_number(PyObject* object, PyObject* name, long to) { set(object, name, checked(PyLong_FromLong(to))); }

// The classes of these objects; set once by memo.py.
struct Classes {
  PyObject *value = nullptr, *step = nullptr, *packed = nullptr;
};
inline Classes& classes() {
  static Classes known;
  return known;
}

// A tensor of one of torch's two classes, strided, on the CPU.
inline const Tensor* tensor_of(PyObject* object) {
  return object != nullptr && THPVariable_CheckExact(object) ? &THPVariable_Unpack(object) : nullptr;
}

// ---------------------------------------------------------------- samples

// Bytes, or None.
inline Ref sample_of(const Tensor& v) {
  std::string content;
  if (!sample_into(v, content)) return borrowed(Py_None);
  return checked(PyBytes_FromStringAndSize(content.data(), content.size()));
}
// Does the tensor still hold the bytes of this sample (or is it None)?
inline bool matches(PyObject* sample, const Tensor& v) {
  if (sample == Py_None) return true;
  std::string now;
  if (!PyBytes_CheckExact(sample) || !sample_into(v, now)) return false;
  const size_t size = PyBytes_GET_SIZE(sample);
  return now.size() == size && std::memcmp(PyBytes_AS_STRING(sample), now.data(), size) == 0;
}

// ---------------------------------------------------------------- values

inline bool is_value(PyObject* object) { return reinterpret_cast<PyObject*>(Py_TYPE(object)) == classes().value; }

// Value(tensor, version, step, name); None for no tensor and no step.
inline Ref new_value(PyObject* tensor, long version, PyObject* step, PyObject* name) {
  auto* const type = reinterpret_cast<PyTypeObject*>(classes().value);
  static PyObject* const nothing = PyTuple_New(0);
  Ref value = checked(type->tp_new(type, nothing, nullptr));  // attributes without a dict, as tp_alloc would not
  const auto& n = names();
  set(value.get(), n.tensor, tensor), set_number(value.get(), n.version, version);
  set(value.get(), n.step, step), set(value.get(), n.name, name);
  set_number(value.get(), n.users, 0), set_number(value.get(), n._left, 0);
  return value;
}

// Is the version counter still what it was when the tensor was packed?
inline bool is_current(PyObject* value) {
  Ref counter = get(value, names().watch);
  if (counter.get() == Py_None) counter = get(value, names().tensor);
  if (counter.get() == Py_None) return true;
  return THPVariable_Check(counter.get()) && THPVariable_Unpack(counter.get())._version() == number(value, names().version);
}

// Value.used
inline void use(PyObject* value) {
  const auto& n = names();
  const long users = number(value, n.users) + 1;
  set_number(value, n.users, users), set_number(value, n._left, number(value, n._left) + 1);
  if (users != 1) return;
  const Ref step = get(value, n.step);
  if (step.get() == Py_None) return;
  PyObject* const inputs = PyTuple_GET_ITEM(step.get(), 1);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(inputs); ++i) {
    PyObject* const input = PyTuple_GET_ITEM(inputs, i);
    use(input);
    const Ref tensor = get(input, n.tensor);
    if (tensor.get() == Py_None || get(input, n.step).get() != Py_None || get(input, n.sample).get() != Py_None) continue;
    const Tensor* const held = tensor_of(tensor.get());
    if (held == nullptr) throw Unusual();
    set(input, n.sample, sample_of(*held));
  }
}

// ---------------------------------------------------------------- from a node's output to its value

inline PyObject* metadata_of(Node* node) {
  return static_cast<torch::autograd::PyAnomalyMetadata*>(node->metadata())->dict();
}
struct Registered {
  Ref value;  // alive
  bool is_packed = false;
};
inline PyObject* registry_key(uint32_t output) {
  if (output >= std::size(names().registry)) throw Unusual();
  return names().registry[output];
}
inline Registered registered(Node* node, uint32_t output) {
  Registered found;
  PyObject* const lookup = PyDict_GetItemWithError(metadata_of(node), registry_key(output));
  if (lookup == nullptr) return found;
  if (!PyWeakref_CheckRef(lookup)) throw Unusual();
  found.is_packed = reinterpret_cast<PyObject*>(Py_TYPE(lookup)) == classes().packed;
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* value = nullptr;
  if (PyWeakref_GetRef(lookup, &value) < 0) throw Unusual();
  found.value = Ref(value);
#else
  PyObject* const value = PyWeakref_GetObject(lookup);
  if (value != Py_None) found.value = borrowed(value);
#endif
  return found;
}
inline void record(Node* node, uint32_t output, const Ref& lookup) {
  if (PyDict_SetItem(metadata_of(node), registry_key(output), lookup.get()) != 0) throw Unusual();
}
inline void record_packed(Node* node, uint32_t output, PyObject* value, PyObject* sample) {
  const Ref lookup = checked(PyObject_CallOneArg(classes().packed, value));
  set(lookup.get(), names().sample, sample);
  record(node, output, lookup);
}

}  // namespace leannorm
