// What steps read that may have changed: leaves, and what other branches have saved.
//
// Leaves that got other data (`leaf.data = other`) while passes were open. If the old data come back, neither version
// counter nor contents show it, but nodes have read other data in between.
#pragma once

#include "sorts.h"

#include <array>
#include <atomic>
#include <mutex>
#include <unordered_set>

namespace leannorm {

struct OtherData {
  std::mutex mutex;
  int passes = 0;
  setter in_torch = nullptr;             // what sets `data`; null where this torch has it elsewhere
  std::unordered_set<const void*> seen;  // tensors, of all threads; those that no longer exist do no harm
  std::atomic<bool> any = false;
};
inline OtherData& other_data = *new OtherData;  // never destroyed

inline int set_data(PyObject* self, PyObject* to, void* closure) {
  if (THPVariable_Check(self)) {
    const std::lock_guard<std::mutex> guard(other_data.mutex);
    other_data.seen.insert(THPVariable_Unpack(self).unsafeGetTensorImpl());
    other_data.any = true;
  }
  return other_data.in_torch(self, to, closure);
}

// The attribute `data` of torch's tensors.
inline PyGetSetDef* data_of_tensors() {
  const auto base = py::module_::import("torch._C").attr("TensorBase");
  const py::object data = py::getattr(base, "data", py::none());
  if (!Py_IS_TYPE(data.ptr(), &PyGetSetDescr_Type)) return nullptr;
  return reinterpret_cast<PyGetSetDescrObject*>(data.ptr())->d_getset;
}

inline void watch_leaves() {
  PyGetSetDef* const data = data_of_tensors();
  const std::lock_guard<std::mutex> guard(other_data.mutex);
  if (other_data.passes++ > 0 || data == nullptr) return;
  other_data.in_torch = data->set, data->set = set_data;
}
inline void stop_watching_leaves() {
  PyGetSetDef* const data = data_of_tensors();
  const std::lock_guard<std::mutex> guard(other_data.mutex);
  if (other_data.passes == 0 || --other_data.passes > 0) return;
  if (data != nullptr && data->set == set_data) data->set = other_data.in_torch;
  other_data.seen.clear(), other_data.any = false;
}

// Whether the leaf had other data since the first of the open passes began. True if that is not known.
inline bool had_other_data(const at::Tensor& leaf) {
  if (other_data.in_torch == nullptr) return true;
  if (!other_data.any) return false;
  const std::lock_guard<std::mutex> guard(other_data.mutex);
  return other_data.seen.count(leaf.unsafeGetTensorImpl()) != 0;
}

// Whether the leaf has the values that a node of this pass read. As leaves.py.
inline bool proves(const Now& now, PyObject* leaf) {
  const Ref id = checked(PyLong_FromVoidPtr(leaf));
  PyObject* const before = PyDict_GetItemWithError(now.before, id.get());
  const Tensor* const v = tensor_of(leaf);
  if (before == nullptr || v == nullptr || !v->has_storage() || had_other_data(*v)) return false;
  if (PyLong_AsVoidPtr(PyTuple_GET_ITEM(before, 3)) != v->storage().unsafeGetStorageImpl()) return false;
  return PyLong_AsLong(PyTuple_GET_ITEM(before, 1)) == static_cast<long>(v->_version()) &&
         matches(PyTuple_GET_ITEM(before, 2), *v);
}

// Whether a backward pass that reaches these nodes reaches those that have saved what is kept of this value. As
// Search._is_read_below.
inline bool is_read_below(std::array<const Node*, 2> roots, PyObject* value) {
  const Ref step = get(value, slots.step);
  if (step.get() == Py_None) {
    const long seen_at = number(value, slots.seen_at);
    return seen_at == 0 || is_copied_part(value) || comes_to(roots[0], seen_at) || (roots[1] != nullptr && comes_to(roots[1], seen_at));
  }
  if (get(value, slots.layout).get() != Py_None) return true;
  PyObject* const inputs = PyTuple_GET_ITEM(step.get(), kInputs);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(inputs); ++i)
    if (!is_read_below(roots, PyTuple_GET_ITEM(inputs, i))) return false;
  return true;
}

}  // namespace leannorm
