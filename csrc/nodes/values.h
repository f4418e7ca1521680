// The Python objects that lean()'s search makes (saving/values.py, steps.py, evidence.py, graph.py), made here.
#pragma once

#include "fields.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <structmember.h>
#include <torch/csrc/autograd/python_anomaly_mode.h>

namespace leannorm {

using at::Tensor;

inline Ref borrowed(PyObject* object) {
  Py_XINCREF(object);
  return Ref(object);
}

// Objects in no cycle, or in none that Python's collector could see, so it need not track them. Tracked objects that
// live from the forward to the backward pass age: a pass of some thousand of them soon makes the collector scan
// everything that Python has, a tenth of a second each time.
inline Ref out_of_circles(Ref object) {
  PyObject_GC_UnTrack(object.get());
  return object;
}

// The names of attributes.
struct Names {
#define LEANNORM_NAME(name) *name = PyUnicode_InternFromString(#name)
  PyObject LEANNORM_NAME(shape), LEANNORM_NAME(dtype), LEANNORM_NAME(sample), LEANNORM_NAME(seen), LEANNORM_NAME(_largest);
  PyObject LEANNORM_NAME(last), LEANNORM_NAME(_closed), LEANNORM_NAME(_call_of), LEANNORM_NAME(drop_dead);
  PyObject LEANNORM_NAME(_offers), LEANNORM_NAME(rebuilds), LEANNORM_NAME(told), LEANNORM_NAME(again), LEANNORM_NAME(recent);
  PyObject LEANNORM_NAME(append), LEANNORM_NAME(plan), LEANNORM_NAME(made_for), LEANNORM_NAME(calls), LEANNORM_NAME(rebuild);
  PyObject LEANNORM_NAME(narrow), LEANNORM_NAME(whys);
#undef LEANNORM_NAME
  PyObject* registry[8];  // the keys of a node's metadata, by output; as graph.py
  Names() {
    for (int i = 0; i < 8; ++i) registry[i] = PyUnicode_InternFromString(("leannorm " + std::to_string(i)).c_str());
  }
};
inline const Names& names() {
  static const Names made;
  return made;
}

// What could not be made in the usual way, so that Python does it.
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

// The classes of these objects, and a name; set once by unpacking.py.
struct Classes {
  PyObject *value = nullptr, *step = nullptr, *packed = nullptr;
  PyObject* copied_part = nullptr;  // the name of a value that is kept for a concatenation alone
};
inline Classes& classes() {
  static Classes known;
  return known;
}
inline bool is_value(PyObject* object) { return reinterpret_cast<PyObject*>(Py_TYPE(object)) == classes().value; }

// The offsets of the fields of a Value, which are slots of its class.
#define LEANNORM_SLOTS(of)                                                                                       \
  of(tensor) of(version) of(step) of(name) of(users) of(layout) of(shape) of(dtype) of(seconds) of(frees)        \
  of(place) of(as_made) of(provenance) of(order) of(seen_at) of(copied_to_edit) of(products) of(call)            \
  of(from_narrow) of(why) of(watch) of(spec) of(sample) of(memory) of(seen) of(original) of(sort) of(in_rows)    \
  of(stream) of(whole) of(packed) of(pinned) of(_left) of(_rebuilt) of(_rebuilt_version) of(_rebuilt_on)
struct Slot {
  Py_ssize_t at = 0;

  PyObject*& of(PyObject* value) const { return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(value) + at); }
};
struct Slots {
#define LEANNORM_SLOT(name) Slot name;
  LEANNORM_SLOTS(LEANNORM_SLOT)
#undef LEANNORM_SLOT
  std::vector<std::pair<Slot, PyObject*>> blank;  // what each field of a new value contains

  void read_from(PyObject* type, PyObject* value) {
    const auto slot_of = [&](PyObject* name) {
      const Ref slot(PyObject_GetAttr(type, name));
      if (!slot || !Py_IS_TYPE(slot.get(), &PyMemberDescr_Type)) throw py::type_error("a field of Value is no slot");
      return Slot{reinterpret_cast<PyMemberDescrObject*>(slot.get())->d_member->offset};
    };
#define LEANNORM_SLOT(name) name = slot_of(py::str(#name).ptr());
    LEANNORM_SLOTS(LEANNORM_SLOT)
#undef LEANNORM_SLOT
    for (const py::handle name : py::handle(type).attr("__slots__")) {
      const Slot slot = slot_of(name.ptr());
      blank.emplace_back(slot, Py_XNewRef(slot.of(value)));
    }
  }
};
inline Slots slots;

inline PyObject* in_its_place(PyObject* value, Slot slot) {
  if (!is_value(value) || slot.of(value) == nullptr) throw Unusual();
  return slot.of(value);
}
inline Ref get(PyObject* value, Slot slot) { return borrowed(in_its_place(value, slot)); }
inline void set(PyObject* value, Slot slot, PyObject* to) {
  PyObject* const before = in_its_place(value, slot);
  slot.of(value) = Py_NewRef(to);
  Py_DECREF(before);
}
inline void set(PyObject* value, Slot slot, const Ref& to) { set(value, slot, to.get()); }
inline long number(PyObject* value, Slot slot) {
  const long found = PyLong_AsLong(in_its_place(value, slot));
  if (found == -1 && PyErr_Occurred()) throw Unusual();
  return found;
}
inline void set_number(PyObject* value, Slot slot, long to) { set(value, slot, checked(PyLong_FromLong(to))); }

// A tensor of one of torch's two classes.
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
// Whether the tensor still has the bytes of this sample (or it is None).
inline bool matches(PyObject* sample, const Tensor& v) {
  if (sample == Py_None) return true;
  std::string now;
  if (!PyBytes_CheckExact(sample) || !sample_into(v, now)) return false;
  const size_t size = PyBytes_GET_SIZE(sample);
  return now.size() == size && std::memcmp(PyBytes_AS_STRING(sample), now.data(), size) == 0;
}

// ---------------------------------------------------------------- streams

// For a device that runs asynchronously: what device.py has recorded, and how it asks for a stream the first time;
// set once.
struct Streams {
  PyObject *used = nullptr, *by_python = nullptr;
};
inline Streams streams;

// The stream on which this thread queues work for the tensor's device; None for a CPU. As stream_of of device.py.
inline Ref stream_of(const Tensor& t) {
  if (t.is_cpu()) return borrowed(Py_None);
  constexpr size_t kMost = 64;
  static auto* const known = new std::vector<std::pair<c10::Stream, PyObject*>>();
  if (PyDict_GET_SIZE(streams.used) == 0) {  // Python records again what it has forgotten
    for (const auto& [stream, object] : *known) Py_DECREF(object);
    known->clear();
  }
  const c10::Stream now = c10::impl::VirtualGuardImpl(t.device().type()).getStream(t.device());
  for (const auto& [stream, object] : *known)
    if (stream == now) return borrowed(object);
  const Ref object = checked(THPVariable_Wrap(t));
  Ref found = checked(PyObject_CallOneArg(streams.by_python, object.get()));
  if (known->size() < kMost) known->emplace_back(now, Py_NewRef(found.get()));
  return found;
}
// Whether each device has one stream on which anything was packed or rebuilt. Then no reader waits for another.
inline bool on_one_stream() {
  PyObject *device, *of;
  for (Py_ssize_t at = 0; PyDict_Next(streams.used, &at, &device, &of);)
    if (!PySet_Check(of) || PySet_GET_SIZE(of) > 1) return false;
  return true;
}

// ---------------------------------------------------------------- values

// The fields of a Step, a tuple.
enum Field { kFunction, kInputs, kCaptured, kConstants, kInPlace, kKind, kThenAct = 8, kFlags, kDepth = 15, kRunsOf };

// Value(tensor, version, step, name); None for no tensor and no step.
inline Ref new_value(PyObject* tensor, long version, PyObject* step, PyObject* name) {
  auto* const type = reinterpret_cast<PyTypeObject*>(classes().value);
  Ref value = checked(type->tp_alloc(type, 0));
  for (const auto& [slot, blank] : slots.blank) slot.of(value.get()) = Py_NewRef(blank);
  set(value.get(), slots.tensor, tensor), set_number(value.get(), slots.version, version);
  set(value.get(), slots.step, step), set(value.get(), slots.name, name);
  if (const Tensor* const held = tensor_of(tensor)) set(value.get(), slots.stream, stream_of(*held));
  if (step != Py_None) {
    PyObject* const captured = PyTuple_GET_ITEM(step, kCaptured);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(captured); ++i)
      if (const Tensor* const of = tensor_of(PyTuple_GET_ITEM(captured, i))) set(value.get(), slots.stream, stream_of(*of));
  }
  return out_of_circles(std::move(value));
}

// Whether the version counter is still what it was when the tensor was packed.
inline bool is_current(PyObject* value) {
  Ref counter = get(value, slots.watch);
  if (counter.get() == Py_None) counter = get(value, slots.tensor);
  if (counter.get() == Py_None) return true;
  return THPVariable_Check(counter.get()) && THPVariable_Unpack(counter.get())._version() == number(value, slots.version);
}

// Value.pin, of a value that has a sample.
inline void pin(PyObject* value, const Tensor& leaf) {
  set(value, slots.pinned, out_of_circles(checked(THPVariable_Wrap(leaf.detach()))));
}

// Value.used
inline void use(PyObject* value) {
  const long users = number(value, slots.users) + 1;
  set_number(value, slots.users, users), set_number(value, slots._left, number(value, slots._left) + 1);
  if (users != 1) return;
  const Ref step = get(value, slots.step);
  if (step.get() == Py_None) return;
  PyObject* const inputs = PyTuple_GET_ITEM(step.get(), kInputs);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(inputs); ++i) {
    PyObject* const input = PyTuple_GET_ITEM(inputs, i);
    use(input);
    const Ref tensor = get(input, slots.tensor);
    if (tensor.get() == Py_None || get(input, slots.step).get() != Py_None || get(input, slots.sample).get() != Py_None) continue;
    const Tensor* const held = tensor_of(tensor.get());
    if (held == nullptr) throw Unusual();
    set(input, slots.sample, sample_of(*held));
    if (held->requires_grad()) pin(input, *held);
  }
}

// What steps read of a value that is kept.
inline Ref as_pinned(PyObject* value) {
  Ref pinned = get(value, slots.pinned);
  return pinned.get() == Py_None ? get(value, slots.tensor) : std::move(pinned);
}

// Of the value's step; null for a value that is kept.
inline PyObject* field_of(PyObject* value, Field field) {
  PyObject* const step = in_its_place(value, slots.step);
  return step == Py_None ? nullptr : PyTuple_GET_ITEM(step, field);
}
inline bool is_kind(PyObject* value, const char* kind) {
  PyObject* const own = field_of(value, kKind);
  return own != nullptr && PyUnicode_CompareWithASCIIString(own, kind) == 0;
}

inline bool is_copied_part(PyObject* value) {
  return PyUnicode_Compare(in_its_place(value, slots.name), classes().copied_part) == 0;
}

// ---------------------------------------------------------------- from a node's output to its value

inline PyObject* metadata_of(Node* node) {
  return static_cast<torch::autograd::PyAnomalyMetadata*>(node->metadata())->dict();
}
// The object that a weak reference refers to; null if it is gone.
inline Ref referred(PyObject* reference) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* object = nullptr;
  if (PyWeakref_GetRef(reference, &object) < 0) throw Unusual();
  return Ref(object);
#else
  PyObject* const object = PyWeakref_GetObject(reference);
  if (object == nullptr) throw Unusual();
  return object == Py_None ? Ref() : borrowed(object);
#endif
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
  found.value = referred(lookup);
  return found;
}
// Whether what a node is made of is rebuilt. A view of that is, whatever a plan says; as Search.views_rebuilt.
inline bool follows_rebuilt(Node* node) {
  const auto& [producer, output] = node->next_edge(0);
  const Registered base = producer ? registered(producer.get(), output) : Registered();
  return base.value && is_value(base.value.get()) && get(base.value.get(), slots.step).get() != Py_None;
}
inline void record(Node* node, uint32_t output, const Ref& lookup) {
  PyObject* const metadata = metadata_of(node);  // only C++ refers to it; what others store there is tracked
  if (PyDict_SetItem(metadata, registry_key(output), lookup.get()) != 0) throw Unusual();
  PyObject_GC_UnTrack(metadata);
}
inline void record_packed(Node* node, uint32_t output, PyObject* value, PyObject* sample) {
  const Ref lookup = out_of_circles(checked(PyObject_CallOneArg(classes().packed, value)));
  set(lookup.get(), names().sample, sample);
  record(node, output, lookup);
}

}  // namespace leannorm
