// What lean() compares tensors and nodes by, read without Python: some of a tensor's bytes, its version counter, and
// a node's attributes. evidence.py and graph.py define what is read and do the same.
#pragma once

#include "graph.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <cstring>
#include <string>

namespace leannorm {

// An owning reference to a Python object.
class Ref {
 public:
  explicit Ref(PyObject* object = nullptr) : object_(object) {}
  Ref(Ref&& other) noexcept : object_(other.release()) {}
  Ref& operator=(Ref&& other) noexcept {
    PyObject* const before = object_;
    object_ = other.release();
    Py_XDECREF(before);
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_;
};

// ---------------------------------------------------------------- tensors

// Whether the elements have no gaps.
inline bool fills_its_memory(const at::Tensor& v) {
  if (v.is_contiguous()) return true;
  int64_t extent = 1;
  for (int64_t d = 0; d < v.dim(); ++d) extent += (v.size(d) - 1) * v.stride(d);
  return extent == v.numel();
}

// The size and some of the bytes, chosen as in evidence.py; false if there are none to read.
constexpr int64_t kRuns = 4, kRun = 256, kPlaces = 256, kPlace = 8;

inline bool sample_into(const at::Tensor& v, std::string& found) {
  found.clear();
  const int64_t numel = v.numel();
  const auto with_size = [&] { found.append(reinterpret_cast<const char*>(&numel), sizeof numel); };
  const bool read = v.is_cpu() && v.layout() == at::kStrided && v.has_storage();
  if (!read || v.unsafeGetTensorImpl()->has_symbolic_sizes_strides() || !fills_its_memory(v)) return false;
  if (v.storage().nbytes() == 0) return false;
  const char* const start = static_cast<const char*>(v.const_data_ptr());
  const int64_t nbytes = numel * v.itemsize();
  if (start == nullptr && nbytes) return false;
  if (nbytes <= kRuns * kRun) return with_size(), found.append(start, nbytes), true;
  found.reserve(sizeof numel + kRuns * kRun);
  with_size();
  const auto take = [&](int64_t count, int64_t length) {
    const int64_t step = (nbytes - length) / (count - 1);
    for (int64_t i = 0; i < count; ++i) found.append(start + i * step, length);
  };
  take(kRuns, kRun);
  const char* const runs = found.data() + sizeof numel;
  bool repeats = true;
  for (int64_t at = 0; at < kRuns * kRun; at += kRun)
    repeats = repeats && std::memcmp(runs + at, runs + at + kPlace, kRun - kPlace) == 0;
  if (repeats) take(kPlaces, kPlace);
  return true;
}

// sample(tensor): bytes, or None.
inline PyObject* sample(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  std::string found;
  if (!THPVariable_CheckExact(object) || !sample_into(THPVariable_Unpack(object), found)) Py_RETURN_NONE;
  return PyBytes_FromStringAndSize(found.data(), found.size());
  END_HANDLE_TH_ERRORS
}

// storage(tensor): where its storage is, and its bytes.
inline PyObject* storage(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(THPVariable_Check(object));
  const c10::Storage& of = THPVariable_Unpack(object).storage();
  return Py_BuildValue("KK", reinterpret_cast<unsigned long long>(of.unsafeGetStorageImpl()), static_cast<unsigned long long>(of.nbytes()));
  END_HANDLE_TH_ERRORS
}

// version_of(tensor, empty): `empty` with the version counter of `tensor`.
inline at::Tensor sharing_version(const at::Tensor& of, const at::Tensor& empty) {
  const auto counter = torch::autograd::impl::version_counter(of);
  return at::Tensor(empty.unsafeGetTensorImpl()->shallow_copy_and_detach(counter, /*allow_tensor_metadata_change=*/true));
}
inline PyObject* version_of(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 2 && THPVariable_Check(arguments[0]) && THPVariable_Check(arguments[1]));
  return THPVariable_Wrap(sharing_version(THPVariable_Unpack(arguments[0]), THPVariable_Unpack(arguments[1])));
  END_HANDLE_TH_ERRORS
}

// torch's CPU kernel computes fma(x, scale, fma(-mean, scale, bias)); the same with torch's operators.
inline std::pair<at::Tensor, at::Tensor> scale_and_shift_of(const at::Tensor& mean, const at::Tensor& rstd,
                                                            const at::Tensor& weight, const at::Tensor& bias) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::Tensor scale = weight.defined() ? at::mul(rstd, weight) : rstd;
  at::Tensor shift = at::addcmul(bias.defined() ? bias : at::zeros_like(mean), mean, scale, -1);
  return {std::move(scale), std::move(shift)};
}

// scale_and_shift(mean, rstd, weight, bias) of a batch norm, None for no weight or bias; as in recipes/norms.py.
inline PyObject* scale_and_shift(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  at::Tensor of[4];  // mean, rstd, weight, bias
  for (Py_ssize_t i = 0; i < 4; ++i) {
    TORCH_CHECK(count == 4 && (THPVariable_Check(arguments[i]) || (i > 1 && arguments[i] == Py_None)));
    if (arguments[i] != Py_None) of[i] = THPVariable_Unpack(arguments[i]);
  }
  const auto [scale, shift] = scale_and_shift_of(of[0], of[1], of[2], of[3]);
  const THPObjectPtr first(THPVariable_Wrap(scale)), second(THPVariable_Wrap(shift));
  return first && second ? PyTuple_Pack(2, first.get(), second.get()) : nullptr;
  END_HANDLE_TH_ERRORS
}

// ---------------------------------------------------------------- nodes

// Bytes that are equal only if everything that was put there is equal.
struct Told {
  std::string bytes;
  bool all = true;  // could everything be put there?

  template <class Plain> void raw(const Plain& v) { bytes.append(reinterpret_cast<const char*>(&v), sizeof v); }
  void put(const c10::SymInt& v) {
    if (const auto known = v.maybe_as_int()) raw(*known);
    else all = false;
  }
  void put(const torch::autograd::InputMetadata& v) {
    if (v.was_default_constructed()) return raw(~size_t{0});  // an output without a gradient
    if (v.is_cpp_nested_tensor()) return void(all = false);
    const auto shape = v.shape_as_dim_vector();
    raw(shape.size());
    for (const c10::SymInt& size : shape) put(size);
    raw(c10::typeMetaToScalarType(v.options().dtype())), raw(v.device().type()), raw(v.device().index());
  }
  // A number, a string, None, or a list of these.
  void put(PyObject* v) {
    int large = 0;
    if (v == Py_None) raw('0');
    else if (PyBool_Check(v)) raw('b'), raw(v == Py_True);
    else if (PyLong_CheckExact(v)) {
      const int64_t number = PyLong_AsLongLongAndOverflow(v, &large);
      raw('i'), raw(large), raw(large > 0 ? PyLong_AsUnsignedLongLong(v) : number);  // torch shows -1 as 2**64 - 1
      if (PyErr_Occurred()) PyErr_Clear(), all = false;
      all = all && large >= 0;
    }
    else if (PyFloat_CheckExact(v)) raw('f'), raw(PyFloat_AS_DOUBLE(v));
    else if (PyUnicode_CheckExact(v)) {
      Py_ssize_t size = 0;
      const char* const text = PyUnicode_AsUTF8AndSize(v, &size);
      if (text == nullptr) return PyErr_Clear(), void(all = false);
      raw('s'), raw(size), bytes.append(text, size);
    } else if (PyTuple_CheckExact(v) || PyList_CheckExact(v)) {
      raw('('), raw(PySequence_Fast_GET_SIZE(v));
      for (Py_ssize_t i = 0; all && i < PySequence_Fast_GET_SIZE(v); ++i) put(PySequence_Fast_GET_ITEM(v, i));
    } else all = false;
  }
  // The shape, dtype and device of each output and input.
  void put_shapes(const Node& node) {
    raw(node.num_inputs()), raw(node.num_outputs());
    for (uint32_t i = 0; i < node.num_inputs(); ++i) put(node.input_metadata(i));
    for (const auto& [producer, output] : node.next_edges()) {
      raw(producer != nullptr);
      if (producer) put(producer->input_metadata(output));
    }
  }
  // The attributes with these names of the node behind this object.
  void put_constants(PyObject* object, PyObject* names) {
    for (Py_ssize_t i = 0; all && i < PyTuple_GET_SIZE(names); ++i) {
      const Ref kept(PyObject_GetAttr(object, PyTuple_GET_ITEM(names, i)));
      if (!kept) PyErr_Clear();
      if (kept) put(kept.get());
      else all = false;
    }
  }
};

// told(node, names): the shape, dtype and device of each output and input, and the node's attributes with these
// names, as bytes; None if Python has to read it.
inline PyObject* told(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 2 && PyTuple_Check(arguments[1]));
  const Node* const node = node_of(arguments[0]);
  if (node == nullptr) Py_RETURN_NONE;
  Told told;
  told.bytes.reserve(512);
  told.put_shapes(*node);
  told.put_constants(arguments[0], arguments[1]);
  if (!told.all) Py_RETURN_NONE;
  return PyBytes_FromStringAndSize(told.bytes.data(), told.bytes.size());
  END_HANDLE_TH_ERRORS
}

}  // namespace leannorm
