// What the log cannot rebuild, so that the pass can say why: tensors that it cannot read, and what ran in a checkpoint.
#pragma once

#include "log.h"

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <typeinfo>

namespace leannorm::recording {

// A tensor that the log keeps but cannot read, such as a sparse one. It exists as long as a node has it.
struct Other {
  std::vector<int64_t> sizes;
  at::ScalarType dtype;
  int64_t place, nbytes;  // place: an address of its values, or 0
};

inline PyObject* own_unpack = nullptr;  // the log's unpack hook

inline bool is_of_module(py::handle object, const char* name) {
  const py::object module = py::getattr(object, "__module__", py::none());
  return py::isinstance<py::str>(module) && std::string(py::str(module)) == name;
}
inline bool is_of_checkpoint(py::handle object) { return is_of_module(object, "torch.utils.checkpoint"); }

// The hook that will unpack what is saved now, if it is not the log's.
inline PyObject* unpack_of_others() {
  const auto& hooks = at::SavedTensorDefaultHooks::get_tls_state().stack;
  if (hooks.empty()) return nullptr;
  PyObject* const top = hooks.top().second.ptr(getPyInterpreter());
  return top == own_unpack ? nullptr : top;
}
// Whether a checkpoint's hooks save what the current call saves.
inline bool runs_in_checkpoint() {
  PyObject* const unpack = unpack_of_others();
  if (unpack == nullptr) return false;
  const py::gil_scoped_acquire gil;
  return is_of_checkpoint(unpack);
}
// Whether the current hooks are neither lean()'s nor a checkpoint's, which saves memory too.
inline bool are_hooks_of_others() {
  PyObject* const unpack = unpack_of_others();
  if (unpack == nullptr) return false;
  const py::gil_scoped_acquire gil;
  return !is_of_checkpoint(unpack) && !is_of_module(unpack, "leannorm.saving.small");
}

// Whether the tensor is the output of a checkpoint that is an autograd function (use_reentrant=True).
inline bool is_made_by_checkpoint(const Tensor& t) {
  const auto& node = t.grad_fn();
  if (!node || std::strstr(typeid(*node).name(), "PyNode") == nullptr) return false;
  const auto function = py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(node));
  return is_of_checkpoint(py::getattr(py::type::handle_of(function), "_forward_cls", py::none()));
}

}  // namespace leannorm::recording
