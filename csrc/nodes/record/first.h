// The pack hook of a pass that is left alone, FirstTensor of saving/small.py, without the time that Python takes: Python runs
// only if the first tensor is larger than those before, or of a class that only Python can measure.
#pragma once

#include "hooks.h"

#include <ATen/SequenceNumber.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

namespace leannorm::recording {

// Counts open passes. While there are any, functions of saving/aside.py replace those with which torch turns hooks off.
struct Aside {
  py::object module;
  py::dict functions;  // by name, the one while no pass is open, and the other one
  int passes = 0;

  static Aside& get() {
    static auto* const aside = new Aside();
    return *aside;
  }
  void count(int more) {
    passes += more;
    if (passes > 1 || (passes == 1 && more < 0)) return;
    for (const auto& [name, of] : functions)
      if (PyDict_SetItem(PyModule_GetDict(module.ptr()), name.ptr(), PyTuple_GET_ITEM(of.ptr(), passes)) != 0) throw python_error();
  }
};

struct First {
  PyObject_HEAD
  py::object look;        // starts to record the pass; none once this hook is removed
  py::list kept;          // what was packed before that
  double most;            // bytes of the first tensor up to which the pass is small
  uint64_t nodes;         // autograd nodes that the thread had made before the pass
  unsigned long thread;
  bool is_over;           // whether this hook was removed, or the pass closed
  bool is_open;           // whether the pass counts as open

  bool is_on_top() {
    const auto& stack = at::SavedTensorDefaultHooks::get_tls_state().stack;
    return !stack.empty() && stack.top().first.ptr(getPyInterpreter()) == reinterpret_cast<PyObject*>(this);
  }
  bool remove() {
    if (!is_on_top()) return false;
    at::SavedTensorDefaultHooks::pop_hooks();
    return true;
  }
  void end() {
    if (std::exchange(is_open, false)) Aside::get().count(-1);
    is_over = true, look = py::none(), kept = py::list();
  }
};

inline void forget_first(PyObject* self) {
  reinterpret_cast<First*>(self)->~First();
  Py_TYPE(self)->tp_free(self);
}

// first(tensor): what is packed for it.
inline PyObject* pack_first(PyObject* self, PyObject* arguments, PyObject*) {
  HANDLE_TH_ERRORS
  auto& s = *reinterpret_cast<First*>(self);
  PyObject* given = nullptr;
  if (!PyArg_ParseTuple(arguments, "O", &given)) return nullptr;
  const Tensor& t = THPVariable_Unpack(given);
  const auto version = t._version();
  const auto tensor = t.grad_fn() ? py::reinterpret_steal<py::object>(THPVariable_Wrap(t.detach())) : py::reinterpret_borrow<py::object>(given);
  py::tuple packed = py::make_tuple(tensor, version);
  if (s.is_over || s.thread != PyThread_get_thread_ident() || is_parameter(t)) return packed.release().ptr();
  s.kept.append(packed);
  const bool is_usual = THPVariable_CheckExact(given) && t.layout() == at::kStrided;
  const double bytes = static_cast<double>(is_usual ? t.nbytes() : python().nbytes(py::handle(given)).cast<size_t>());
  s.is_over = bytes <= s.most ? s.remove() : s.look().cast<bool>();
  if (s.is_over) s.look = py::none();
  return packed.release().ptr();
  END_HANDLE_TH_ERRORS
}

inline PyTypeObject first_type = {PyVarObject_HEAD_INIT(nullptr, 0) "leannorm.First", sizeof(First)};

// first(look, most): the hook of a pass that begins, which is set; None where no hooks may be set, or where a tracer or other
// hooks may be active: Python then finds out which.
inline PyObject* open_first(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  using c10::impl::TorchDispatchModeTLS;
  TORCH_CHECK(count == 2);
  const bool may_trace = TorchDispatchModeTLS::stack_len() > 0 || c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::PreDispatch);
  if (may_trace || !at::SavedTensorDefaultHooks::is_enabled() || unpack_of_others() != nullptr) Py_RETURN_NONE;
  PyObject* const self = first_type.tp_alloc(&first_type, 0);
  if (self == nullptr) throw python_error();
  auto& s = *reinterpret_cast<First*>(self);
  new (&s.look) py::object(py::reinterpret_borrow<py::object>(arguments[0])), new (&s.kept) py::list();
  s.most = PyFloat_AsDouble(arguments[1]), s.thread = PyThread_get_thread_ident();
  Aside::get().count(1), s.is_open = true;
  at::SavedTensorDefaultHooks::lazy_initialize();
  at::SavedTensorDefaultHooks::push_hooks({Py_NewRef(self), getPyInterpreter()}, {Py_NewRef(own_unpack), getPyInterpreter()});
  s.nodes = at::sequence_number::peek();
  return self;
  END_HANDLE_TH_ERRORS
}

// Whether the hook was there, and is removed now.
inline PyObject* remove_first(PyObject* self, PyObject*) { return PyBool_FromLong(reinterpret_cast<First*>(self)->remove()); }

// Releases the tensors, and the pass, which refers to this. A thread may still have this hook, and this one has it if a backward
// pass within the pass removed it only for itself, as it has its own copy of the hooks.
inline PyObject* release_first(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  auto& s = *reinterpret_cast<First*>(self);
  s.remove(), s.end();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Ends a pass that was left alone: how many autograd nodes it made, whether they saved a tensor, and whether this hook is removed.
inline PyObject* close_first(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  auto& s = *reinterpret_cast<First*>(self);
  const uint64_t nodes = at::sequence_number::peek() - s.nodes;
  const bool saves = !s.kept.empty(), is_removed = s.remove() || s.is_over;
  s.end();
  return py::make_tuple(nodes, saves, is_removed).release().ptr();
  END_HANDLE_TH_ERRORS
}

inline PyObject* kept_first(PyObject* self, void*) { return reinterpret_cast<First*>(self)->kept.inc_ref().ptr(); }

inline PyMethodDef first_methods[] = {{"remove", &remove_first, METH_NOARGS, nullptr}, {"close", &close_first, METH_NOARGS, nullptr}, {"forget", &release_first, METH_NOARGS, nullptr}, {nullptr}};
inline PyGetSetDef first_properties[] = {{"kept", &kept_first, nullptr, nullptr, nullptr}, {nullptr}};
inline PyMethodDef first_function = {"record_first", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&open_first)), METH_FASTCALL, nullptr};

inline void add_first(py::module_ module) {
  first_type.tp_dealloc = &forget_first, first_type.tp_call = &pack_first, first_type.tp_flags = Py_TPFLAGS_DEFAULT;
  first_type.tp_methods = first_methods, first_type.tp_getset = first_properties;
  if (PyType_Ready(&first_type) < 0) throw py::error_already_set();
  module.def("count_passes", [](int more) { Aside::get().count(more); });
  module.def("set_aside", [](py::object of, py::dict functions) { Aside::get().module = std::move(of), Aside::get().functions = std::move(functions); });
  module.attr("record_first") = py::reinterpret_steal<py::object>(PyCFunction_New(&first_function, nullptr));
}

}  // namespace leannorm::recording
