// What a pass keeps and rebuilds, as saving/ledger.py lists it, read when the pass ends.
#pragma once

#include "sorts.h"

#include <unordered_set>

namespace leannorm {

// The rebuilt value whose storage a rebuilt view shares; as _root.
inline PyObject* root_of(PyObject* value) {
  PyObject* root = value;
  while (is_kind(root, "view") && PyTuple_GET_SIZE(field_of(root, kInputs)) != 0) root = PyTuple_GET_ITEM(field_of(root, kInputs), 0);
  return in_its_place(root, slots.step) == Py_None ? value : root;
}

// rows(references): the fields of all rows, as Ledger._rows returns them; None if Python has to read them.
inline PyObject* rows(PyObject*, PyObject* references) {
  HANDLE_TH_ERRORS
  try {
    Ref made = checked(PyList_New(0));
    std::unordered_set<const void*> storages;
    std::unordered_set<PyObject*> seen, roots;
    const auto put = [&](PyObject* value, PyObject* shape, PyObject* dtype, size_t bytes, bool rebuilt, PyObject* seconds) {
      const Ref size = checked(PyLong_FromSize_t(bytes));
      PyObject *const name = in_its_place(value, slots.name), *const why = in_its_place(value, slots.why);
      for (PyObject* const field : {name, shape, dtype, size.get(), rebuilt ? Py_True : Py_False, seconds, why})
        if (PyList_Append(made.get(), field) != 0) throw Unusual();
    };
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(references); ++i) {
      const Ref alive = referred(PyList_GET_ITEM(references, i));
      if (!alive) continue;
      PyObject* const value = alive.get();
      PyObject* const tensor = in_its_place(value, field_of(value, kKind) == nullptr ? slots.tensor : slots.memory);
      if (tensor != Py_None) {
        const Tensor* const t = tensor_of(tensor);
        if (t == nullptr || t->layout() != at::kStrided || !t->has_storage()) Py_RETURN_NONE;
        const bool is_first = storages.insert(t->storage().unsafeGetStorageImpl()).second;
        const Ref layout = layouts.of(tensor, *t);
        PyObject *const shape = PyTuple_GET_ITEM(layout.get(), 0), *const dtype = PyTuple_GET_ITEM(layout.get(), 2);
        put(value, shape, dtype, is_first ? t->storage().nbytes() : 0, false, Py_None);
      } else if (seen.insert(value).second) {  // a value that was kept first is listed twice
        PyObject* const root = root_of(value);
        const size_t bytes = roots.insert(root).second ? number(root, slots.frees) : 0;
        const bool is_held = field_of(value, kKind) == nullptr || is_kind(value, "held");
        PyObject *const shape = in_its_place(value, slots.shape), *const dtype = in_its_place(value, slots.dtype);
        put(value, shape, dtype, bytes, !is_held, is_held ? Py_None : in_its_place(value, slots.seconds));
      }
    }
    return made.release();
  } catch (const Unusual&) {
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
  }
  END_HANDLE_TH_ERRORS
}

}  // namespace leannorm
