// What lean() compares a tensor and a node by, read without Python's share: some of a tensor's bytes, its version
// counter, and what a node keeps. evidence.py and graph.py say what is read and do the same.
#pragma once

#include "graph.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <cstring>
#include <string>
#include <typeindex>
#include <unordered_map>

namespace leannorm {

// ---------------------------------------------------------------- tensors

// Do the elements lie without gaps?
inline bool fills_its_memory(const at::Tensor& v) {
  if (v.is_contiguous()) return true;
  int64_t extent = 1;
  for (int64_t d = 0; d < v.dim(); ++d) extent += (v.size(d) - 1) * v.stride(d);
  return extent == v.numel();
}

// sample(tensor, runs, run): so many bytes of so many places, or None as in evidence.py.
inline PyObject* sample(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 3 || !THPVariable_CheckExact(arguments[0])) Py_RETURN_NONE;
  const at::Tensor& v = THPVariable_Unpack(arguments[0]);
  const int64_t runs = PyLong_AsLongLong(arguments[1]), run = PyLong_AsLongLong(arguments[2]);
  const bool read = v.is_cpu() && v.layout() == at::kStrided && v.has_storage();
  if (!read || v.unsafeGetTensorImpl()->has_symbolic_sizes_strides() || !fills_its_memory(v)) Py_RETURN_NONE;
  if (v.storage().nbytes() == 0) Py_RETURN_NONE;
  const char* const start = static_cast<const char*>(v.const_data_ptr());
  const int64_t nbytes = v.numel() * v.itemsize();
  if (nbytes <= runs * run) return PyBytes_FromStringAndSize(start, nbytes);
  PyObject* const found = PyBytes_FromStringAndSize(nullptr, runs * run);
  if (found == nullptr) return nullptr;
  const int64_t step = (nbytes - run) / (runs - 1);
  for (int64_t i = 0; i < runs; ++i) std::memcpy(PyBytes_AS_STRING(found) + i * run, start + i * step, run);
  return found;
  END_HANDLE_TH_ERRORS
}

// version_of(tensor, empty): `empty` with the version counter of `tensor`.
inline PyObject* version_of(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 2 && THPVariable_Check(arguments[0]) && THPVariable_Check(arguments[1]));
  const auto counter = torch::autograd::impl::version_counter(THPVariable_Unpack(arguments[0]));
  const auto* const empty = THPVariable_Unpack(arguments[1]).unsafeGetTensorImpl();
  return THPVariable_Wrap(at::Tensor(empty->shallow_copy_and_detach(counter, /*allow_tensor_metadata_change=*/true)));
  END_HANDLE_TH_ERRORS
}

// ---------------------------------------------------------------- nodes

// Bytes that are equal only where everything that was put there is.
struct Told {
  std::string bytes;
  bool all = true;  // is nothing symbolic?

  template <class Plain> void raw(const Plain& v) { bytes.append(reinterpret_cast<const char*>(&v), sizeof v); }
  void put(bool v) { raw(v); }
  void put(int64_t v) { raw(v); }
  void put(double v) { raw(v); }
  void put(const c10::SymInt& v) {
    if (const auto known = v.maybe_as_int()) raw(*known);
    else all = false;
  }
  void put(const at::Scalar& v) {
    if (v.isSymbolic()) all = false;
    else if (v.isBoolean()) raw('b'), raw(v.to<bool>());
    else if (v.isIntegral(false)) raw('i'), raw(v.to<int64_t>());
    else if (v.isFloatingPoint()) raw('f'), raw(v.to<double>());
    else raw('c'), raw(v.to<c10::complex<double>>());
  }
  void put(const std::string& v) { raw(v.size()), bytes += v; }
  template <class Item> void put(const std::vector<Item>& list) {
    raw(list.size());
    for (const Item& v : list) put(v);
  }
  template <class Item> void put(const std::optional<Item>& v) {
    raw(v.has_value());
    if (v) put(*v);
  }
  template <class Item> void put(const c10::OptionalArray<Item>& v) { put(v.list); }
  void put(const torch::autograd::InputMetadata& v) {
    if (v.was_default_constructed() || v.is_cpp_nested_tensor()) return void(all = false);
    const auto shape = v.shape_as_dim_vector();
    raw(shape.size());
    for (const c10::SymInt& size : shape) put(size);
    raw(c10::typeMetaToScalarType(v.dtype())), raw(v.device().type()), raw(v.device().index());
  }
};

// The names by which Python shows what nodes of a class keep beside tensors, and a function that reads it.
struct Class {
  const char* names;
  void (*read)(Told&, const Node&);
};

inline const std::unordered_map<std::type_index, Class>& classes() {
  using namespace torch::autograd::generated;
#define LEANNORM_CLASS(kind, names, ...) \
  {typeid(kind), {names, [](Told& told, const Node& node) { \
     [[maybe_unused]] const auto& of = static_cast<const kind&>(node); \
     [&told](const auto&... kept) { (told.put(kept), ...); }(__VA_ARGS__); \
   }}}
  static const std::unordered_map<std::type_index, Class> known = {
      LEANNORM_CLASS(AddBackward0, "alpha", of.alpha),
      LEANNORM_CLASS(AddmmBackward0, "alpha beta mat1_sym_sizes mat1_sym_strides mat2_sym_sizes mat2_sym_strides", of.alpha, of.beta, of.mat1_sym_sizes, of.mat1_sym_strides, of.mat2_sym_sizes, of.mat2_sym_strides),
      LEANNORM_CLASS(AliasBackward0, ""),
      LEANNORM_CLASS(BmmBackward0, ""),
      LEANNORM_CLASS(CatBackward0, "dim", of.dim),
      LEANNORM_CLASS(CloneBackward0, ""),
      LEANNORM_CLASS(ConvolutionBackward0, "bias_sym_sizes_opt dilation groups output_padding padding stride transposed", of.bias_sym_sizes_opt, of.dilation, of.groups, of.output_padding, of.padding, of.stride, of.transposed),
      LEANNORM_CLASS(DivBackward0, ""),
      LEANNORM_CLASS(EluBackward0, "alpha input_scale scale", of.alpha, of.input_scale, of.scale),
      LEANNORM_CLASS(ExpandBackward0, "self_sym_sizes", of.self_sym_sizes),
      LEANNORM_CLASS(FusedRmsNormBackward0, "normalized_shape", of.normalized_shape),
      LEANNORM_CLASS(GeluBackward0, "approximate", of.approximate),
      LEANNORM_CLASS(HardsigmoidBackward0, ""),
      LEANNORM_CLASS(HardswishBackward0, ""),
      LEANNORM_CLASS(HardtanhBackward0, "max_val min_val", of.max_val, of.min_val),
      LEANNORM_CLASS(LeakyReluBackward0, "negative_slope", of.negative_slope),
      LEANNORM_CLASS(LeakyReluBackward1, "negative_slope", of.negative_slope),
      LEANNORM_CLASS(LogSoftmaxBackward0, "dim", of.dim),
      LEANNORM_CLASS(MeanBackward1, "dim keepdim self_sym_numel self_sym_sizes", of.dim, of.keepdim, of.self_sym_numel, of.self_sym_sizes),
      LEANNORM_CLASS(MishBackward0, ""),
      LEANNORM_CLASS(MmBackward0, "mat2_sym_sizes mat2_sym_strides self_sym_sizes self_sym_strides", of.mat2_sym_sizes, of.mat2_sym_strides, of.self_sym_sizes, of.self_sym_strides),
      LEANNORM_CLASS(MulBackward0, ""),
      LEANNORM_CLASS(MulBackward1, "other", of.other),
      LEANNORM_CLASS(NativeBatchNormBackward0, "eps training", of.eps, of.training),
      LEANNORM_CLASS(NativeGroupNormBackward0, "C HxW N eps group", of.C, of.HxW, of.N, of.eps, of.group),
      LEANNORM_CLASS(NativeLayerNormBackward0, "normalized_shape", of.normalized_shape),
      LEANNORM_CLASS(NegBackward0, ""),
      LEANNORM_CLASS(PermuteBackward0, "dims", of.dims),
      LEANNORM_CLASS(PowBackward0, "exponent", of.exponent),
      LEANNORM_CLASS(ReluBackward0, ""),
      LEANNORM_CLASS(RsqrtBackward0, ""),
      LEANNORM_CLASS(ScaledDotProductFlashAttentionForCpuBackward0, "dropout_p is_causal scale", of.dropout_p, of.is_causal, of.scale),
      LEANNORM_CLASS(SelectBackward0, "dim index self_sym_sizes", of.dim, of.index, of.self_sym_sizes),
      LEANNORM_CLASS(SigmoidBackward0, ""),
      LEANNORM_CLASS(SiluBackward0, ""),
      LEANNORM_CLASS(SliceBackward0, "dim end self_sym_sizes start step", of.dim, of.end, of.self_sym_sizes, of.start, of.step),
      LEANNORM_CLASS(SoftmaxBackward0, "dim", of.dim),
      LEANNORM_CLASS(SplitBackward0, "dim self_sym_sizes split_size", of.dim, of.self_sym_sizes, of.split_size),
      LEANNORM_CLASS(TBackward0, ""),
      LEANNORM_CLASS(TanhBackward0, ""),
      LEANNORM_CLASS(ToCopyBackward0, ""),
      LEANNORM_CLASS(TransposeBackward0, "dim0 dim1", of.dim0, of.dim1),
      LEANNORM_CLASS(UnbindBackward0, "dim", of.dim),
      LEANNORM_CLASS(UnsafeViewBackward0, "self_sym_sizes", of.self_sym_sizes),
      LEANNORM_CLASS(UnsqueezeBackward0, "dim", of.dim),
      LEANNORM_CLASS(ViewBackward0, "self_sym_sizes", of.self_sym_sizes),
  };
#undef LEANNORM_CLASS
  return known;
}

// told(node): its class' constants and the shape, dtype and device of each output and input, as bytes; None where one
// is symbolic. And does that include what the node keeps? Else Python is to read it.
inline PyObject* told(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  const Node* const node = node_of(object);
  if (node == nullptr) Py_RETURN_NONE;
  Told told;
  told.bytes.reserve(512);
  told.raw(node->num_inputs()), told.raw(node->num_outputs());
  for (uint32_t i = 0; i < node->num_inputs(); ++i) told.put(node->input_metadata(i));
  for (const auto& [producer, output] : node->next_edges()) {
    told.raw(producer != nullptr);
    if (producer) told.put(producer->input_metadata(output));
  }
  const auto found = classes().find(typeid(*node));
  if (found != classes().end()) found->second.read(told, *node);
  if (!told.all) Py_RETURN_NONE;
  const py::bytes bytes(told.bytes);
  return PyTuple_Pack(2, bytes.ptr(), found == classes().end() ? Py_False : Py_True);
  END_HANDLE_TH_ERRORS
}

// told_names(node): which constants of this node `told` reads, by their names in Python; None where it reads none.
inline PyObject* told_names(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  const Node* const node = node_of(object);
  const auto found = node == nullptr ? classes().end() : classes().find(typeid(*node));
  if (found == classes().end()) Py_RETURN_NONE;
  return PyUnicode_FromString(found->second.names);
  END_HANDLE_TH_ERRORS
}

}  // namespace leannorm
