// What the functions of nodes.cpp share: they read tensors from Python, check that a call is an ordinary one (as `usual_call`
// of autograd/fast.py does), and call operators.
#pragma once

#include "tapes.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>

namespace leannorm {

using at::Tensor;

// The key of tensors with named dimensions, which torch has had up to 2.12.
template <class Key> constexpr c10::DispatchKeySet of_named_dims() {
  if constexpr (requires { Key::Named; }) return c10::DispatchKeySet(Key::Named);
  else return {};
}

// Whether nothing in this thread intercepts operators or replaces tensors: no transform, tracer or mode.
// Three modes are allowed: autocast, which does not know our operators, inference mode, and that of torch.matmul,
// which drops named dimensions.
inline bool plain_thread() {
  const auto now = c10::impl::tls_local_dispatch_key_set();
  const c10::DispatchKeySet no_grad(c10::DispatchKey::ADInplaceOrView);
  const auto may_be = c10::autocast_dispatch_keyset | of_named_dims<c10::DispatchKey>();
  const auto left_out = now.excluded_ | may_be, usual = c10::default_excluded_set | may_be;
  if (now.included_ == c10::default_included_set) return left_out == usual;
  return now.included_ == c10::default_included_set - no_grad && left_out == (usual | c10::autograd_dispatch_keyset);
}

// Whether the tensor is an ordinary one on a CPU or on CUDA: no wrapper, no lazy conjugation, no tangent.
inline bool plain(const Tensor& v) {
  using c10::BackendComponent;
  static const auto keys = [](bool inference) {
    const c10::InferenceMode mode(inference);
    return at::empty({0}).key_set();
  };
  static const auto on_cuda = [](c10::DispatchKeySet of_cpu) {
    const auto own = [](BackendComponent device) {
      return c10::DispatchKeySet(device) | c10::getAutocastRelatedKeySetFromBackend(device);
    };
    const auto autocast = c10::getAutocastRelatedKeySetFromBackend(BackendComponent::CPUBit);
    return (of_cpu - autocast).remove_backend(BackendComponent::CPUBit) | own(BackendComponent::CUDABit);
  };
  static const c10::DispatchKeySet usual[] = {keys(false), keys(true), on_cuda(keys(false)), on_cuda(keys(true))};
  for (const c10::DispatchKeySet of : usual)
    if (v.key_set() == of) return !v._fw_grad(0).defined();
  return false;
}

// A call that nothing but autograd records, and no recompute by a backward pass; as `plain` of ops/modes.py.
inline bool plain_call() {
  return plain_thread() && torch::autograd::get_current_graph_task_id() == -1 &&
         !at::impl::torch_function_mode_enabled();
}

template <class... Tensors> bool recorded(const Tensors&... of) {
  return at::GradMode::is_enabled() && ((of.defined() && of.requires_grad()) || ...);
}
// Whether it belongs to inference mode, so that autograd cannot save it.
inline bool in_inference(const Tensor& v) { return v.defined() && v.is_inference(); }

// As is_contiguous(), with the channel axis last.
inline bool channels_last(const Tensor& x) {
  const auto sizes = x.sizes(), strides = x.strides();
  int64_t expected = 1;
  const auto follows = [&](int64_t d) {
    if (sizes[d] != 1 && strides[d] != expected) return false;
    expected *= sizes[d];
    return true;
  };
  if (x.numel() == 0) return true;
  if (!follows(1)) return false;
  for (int64_t d = x.dim() - 1; d > 1; --d)
    if (!follows(d)) return false;
  return follows(0);
}
inline bool dense(const Tensor& x) { return x.dim() > 1 && (x.is_contiguous() || channels_last(x)); }

// Reads an argument; false if an ordinary call would not have it. Triton's tapes check that tensors are on one device.
inline bool read(PyObject* from, Tensor& to, bool by_triton) {
  if (from == Py_None) return true;
  if (!THPVariable_CheckExact(from)) return false;
  to = THPVariable_Unpack(from);
  return plain(to) && (by_triton || to.is_cpu());
}
inline bool read(PyObject* from, double& to) {
  to = PyFloat_AsDouble(from);
  if (to != -1.0 || !PyErr_Occurred()) return true;
  PyErr_Clear();
  return false;
}
inline bool read(PyObject* from, int64_t& to) {
  to = PyLong_AsLongLong(from);
  if (to != -1 || !PyErr_Occurred()) return true;
  PyErr_Clear();
  return false;
}
inline bool read(PyObject* from, c10::IValue& to) {
  const char* const text = PyUnicode_Check(from) ? PyUnicode_AsUTF8(from) : nullptr;
  if (text == nullptr) return PyErr_Clear(), false;
  to = std::string(text);
  return true;
}

// The arguments of every function of nodes.cpp: x, weight, bias, eps and act, or the equivalent for rows.
struct Given {
  Tensor x, weight, bias;
  double eps = 0;
  bool by_triton = false, records = false;

  // The last argument of every function says whose kernels to use.
  bool read_from(PyObject* const* given, Py_ssize_t count) {
    by_triton = given[count - 1] == Py_True;
    if (!(plain_call() && read(given[0], x, by_triton) && read(given[1], weight, by_triton))) return false;
    return read(given[2], bias, by_triton) && read(given[3], eps) && x.defined() && can_record();
  }
  // Finds whether autograd records a call on these tensors and on `others`; false if it cannot save all of them then.
  template <class... Others> bool can_record(const Others&... others) {
    records = recorded(x, weight, bias, others...);
    return !(records && (in_inference(x) || in_inference(weight) || in_inference(bias) || (in_inference(others) || ...)));
  }
  // Whether there is no residual, or one like x and in its layout.
  bool takes(const Tensor& residual) const {
    if (!residual.defined()) return true;
    return residual.scalar_type() == x.scalar_type() && residual.sizes() == x.sizes() && residual.strides() == x.strides();
  }
  // Whether there is no bias without a weight, and none of another dtype.
  bool alike() const { return !bias.defined() || (weight.defined() && weight.scalar_type() == bias.scalar_type()); }
};

// Running statistics, which a training batch updates.
struct Running {
  Tensor mean, var, num_batches;
  c10::IValue momentum;

  bool read_from(PyObject* given, bool by_triton) {
    if (given == Py_None) return true;
    if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != 4) return false;
    Tensor* const tensors[] = {&mean, &var, &num_batches};
    for (int i = 0; i < 3; ++i)
      if (!read(PyTuple_GET_ITEM(given, i), *tensors[i], by_triton)) return false;
    for (const Tensor* v : {&mean, &var})
      if (!v->defined() || v->requires_grad() || v->is_inference()) return false;
    double weight;
    PyObject* const last = PyTuple_GET_ITEM(given, 3);
    if (last != Py_None && !read(last, weight)) return false;
    if (last != Py_None) momentum = weight;
    return !(num_batches.defined() && num_batches.is_inference());
  }
  bool given() const { return mean.defined(); }
};

// An operator's arguments; an undefined tensor is None.
inline c10::IValue argument(const Tensor& v) { return v.defined() ? c10::IValue(v) : c10::IValue(); }
template <class T> c10::IValue argument(const T& v) { return v; }
template <class... Arguments> Stack stack_of(const Arguments&... given) {
  Stack stack;
  stack.reserve(sizeof...(given));
  (stack.push_back(argument(given)), ...);
  return stack;
}
inline Tensor tensor(Stack& results, size_t i) { return std::move(results[i]).toTensor(); }

// An operator of the kernels, by its name, below autograd; its results replace its arguments.
struct Operator {
  const std::string name;
  const c10::OperatorHandle handle;

  explicit Operator(const char* name)
      : name(name), handle(c10::Dispatcher::singleton().findSchemaOrThrow((std::string("leannorm::") + name).c_str(), "")) {}
  // False if Triton's kernel has seen no such call, which Python then has to make.
  bool operator()(Stack& stack, bool by_triton) const {
    if (by_triton) return by_tape(stack);
    handle.callBoxed(&stack);
    return true;
  }
  // Also false if the CPU's kernel has rejected its arguments: then it has written nothing.
  bool taken(Stack& stack, bool by_triton) const {
    const at::AutoDispatchBelowADInplaceOrView below;
    if (by_triton) return by_tape(stack);
    try {
      handle.callBoxed(&stack);
    } catch (const std::exception&) {
      return false;
    }
    return true;
  }
  // Who listens to operators, such as a pass in lean(), hears a call of the dispatcher's.
  bool by_tape(Stack& stack) const {
    if (!is_watched()) return tapes().repeat(name, stack);
    if (!tapes().serves_dispatcher || !tapes().knows(name, stack)) return false;
    handle.callBoxed(&stack);
    return true;
  }
};

// A new tensor for Python, made while other threads of Python run; None if it is not defined.
template <class Make> PyObject* result(Make make) {
  Tensor made;
  {
    const py::gil_scoped_release others_run;
    made = make();
  }
  return THPVariable_Wrap(std::move(made));
}

// Makes a node, owned by the type of pointer with which this release of torch counts references.
template <class Kind, class Pointer> auto new_node() {
  if constexpr (std::is_constructible_v<Pointer, std::shared_ptr<Kind>>)
    return std::shared_ptr<Kind>(new Kind(), [](auto* node) { deleteNode(node); });  // torch's, where it has it
  else
    return c10::make_intrusive<Kind>();
}

}  // namespace leannorm
