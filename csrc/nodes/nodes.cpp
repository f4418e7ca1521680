// Autograd nodes in C++ for the calls of autograd/fast.py, whose functions they stand in for: the same
// operators, the same saved tensors, the same bits, without Python's share of a small call. Of Triton's operators they
// repeat calls that Python has made before (tapes.h).
//
// They need torch's own C++ headers and Python's, so this library serves the torch and the Python that it was built
// for (autograd/nodes.py asks before it loads it); without it fast.py does the same in Python. Each function returns
// None for a call that is not a usual one, and for one that the kernel refuses: then nothing has been written.
#include "../activation.h"
#include "calls.h"
#include "evidence.h"
#include "graph.h"
#include "learning.h"

#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/csrc/utils/tensor_memoryformats.h>

namespace leannorm {
namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

PyObject* by_python = nullptr;  // fast.py's backward pass, for all that is not usual

enum Saved { kX, kMean, kRstd, kWeight, kBias, kOut, kSaved };
using Tensors = std::array<Tensor, kSaved>;

// What the three nodes share: tensors that are saved, and a backward pass by kernels or by Python.
struct Direct : Node {
  std::array<SavedVariable, kSaved> saved;
  c10::IValue act;
  bool by_triton;

  // Empty where Python is to do it.
  virtual variable_list by_kernels(const Tensor& dy, const Tensors& kept) = 0;
  virtual py::tuple how() const = 0;  // what fast.py keeps beside the tensors

  void save(Saved place, const Tensor& value, bool is_output = false) {
    if (value.defined()) saved[place] = SavedVariable(value, is_output);
  }
  Tensors unpacked() {
    Tensors kept;
    for (int i = 0; i < kSaved; ++i) kept[i] = saved[i].unpack(i == kOut ? getptr() : nullptr);
    return kept;
  }
  bool needs(int input) const { return next_edge(input).is_valid(); }

  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Tensors kept = unpacked();
    Tensor dy = std::move(gradients[0]);
    if (!dy.defined()) dy = input_metadata(0).zeros_like();
    // create_graph=True, a transform, a mode: Python hands them to plain torch
    if (at::GradMode::is_enabled() || !plain_thread() || !plain(dy)) return of_python(dy, kept);
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      variable_list found = by_kernels(dy, kept);
      if (!found.empty()) return found;
    }
    return of_python(dy, kept);
  }
  variable_list of_python(const Tensor& dy, const Tensors& kept) {
    const py::gil_scoped_acquire gil;
    try {
      py::list tensors;
      for (const Tensor& v : kept) tensors.append(v.defined() ? py::cast(v) : py::none());
      const py::tuple needed = py::make_tuple(needs(0), needs(1), needs(2));
      const py::tuple found = py::handle(by_python)(name(), tensors, needed, how(), dy, by_triton);
      variable_list gradients;
      for (int i = 0; i < 3; ++i) gradients.push_back(found[i].is_none() ? Tensor() : found[i].cast<Tensor>());
      return gradients;
    } catch (py::error_already_set& error) {
      throw_error(error);
    }
  }
  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable& v : saved) v.reset_data();
  }

  // Compiled autograd traces `apply` on stand-ins of what is saved.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(name());
    args.collect(act);
    args.collect(by_triton);
    for (int i = 0; i < kSaved; ++i) args.collect(saved[i], i == kOut);
  }
  variable_list apply_with_saved(const variable_list& given, torch::dynamo::autograd::SwapSavedVariables& swap) override {
    for (SavedVariable& v : saved) swap.before(v);
    variable_list result = apply(variable_list(given));
    for (SavedVariable& v : saved) swap.after(v);
    return result;
  }
};

// dy in the layout of x, which is dense.
Tensor like(const Tensor& x, const Tensor& dy) {
  const Tensor same = dy.scalar_type() == x.scalar_type() ? dy : dy.to(x.scalar_type());
  if (x.is_contiguous()) return same.contiguous();
  return channels_last(same) ? same : same.movedim(1, -1).contiguous().movedim(-1, 1);
}

struct ChannelNorm final : Direct {
  double eps;
  int64_t groups;

  std::string name() const override { return "ChannelNormBackward"; }
  py::tuple how() const override { return py::make_tuple(act.toStringRef(), eps, groups); }
  variable_list by_kernels(const Tensor& dy, const Tensors& kept) override {
    static const Operator backward("channel_backward");
    Stack stack = stack_of(like(kept[kX], dy), kept[kX], kept[kMean], kept[kRstd], kept[kWeight], kept[kBias], Tensor(),
                           Tensor(), act, groups, false, false, Tensor(), Tensor());
    if (!backward(stack, by_triton)) return {};
    return {tensor(stack, 0), needs(1) ? tensor(stack, 1) : Tensor(), needs(2) ? tensor(stack, 2) : Tensor()};
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    Direct::compiled_args(args);
    args.collect(eps);
    args.collect(groups);
  }
};

struct ChannelAffine final : Direct {
  at::MemoryFormat layout;  // of y

  std::string name() const override { return "ChannelAffineBackward"; }
  py::tuple how() const override {
    return py::make_tuple(act.toStringRef(), py::reinterpret_borrow<py::object>(torch::utils::getTHPMemoryFormat(layout)));
  }
  variable_list by_kernels(const Tensor& given, const Tensors& kept) override {
    static const Operator both("channel_backward"), sums("channel_grad_sums"), input("channel_input_grad");
    const bool has_x = kept[kX].defined();
    const Tensor dy = has_x ? like(kept[kX], given) : given.contiguous(layout);
    const Tensor x = has_x ? kept[kX] : dy;  // only its shape and layout are read
    const auto taken = [&](auto... more) {
      return stack_of(dy, x, kept[kMean], kept[kRstd], kept[kWeight], kept[kBias], Tensor(), kept[kOut], more...);
    };
    if (!(needs(1) || needs(2))) {
      Stack stack = taken(Tensor(), Tensor(), act, false, Tensor());
      if (!input(stack, by_triton)) return {};
      return {tensor(stack, 0), Tensor(), Tensor()};
    }
    Stack stack = needs(0) ? taken(act, int64_t(0), false, true, Tensor(), Tensor()) : taken(act, Tensor());
    if (!(needs(0) ? both : sums)(stack, by_triton)) return {};
    const auto gradient = [&](int input, size_t i) { return needs(input) ? tensor(stack, i) : Tensor(); };
    if (needs(0)) return {gradient(0, 0), gradient(1, 1), gradient(2, 2)};
    return {Tensor(), gradient(1, 1), gradient(2, 0)};
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    Direct::compiled_args(args);
    args.collect(int64_t(layout));
  }
};

struct RowNorm final : Direct {
  int64_t start, stop;
  double eps;
  bool rms;

  std::string name() const override { return "RowNormBackward"; }
  py::tuple how() const override { return py::make_tuple(start, stop, eps, rms); }
  variable_list by_kernels(const Tensor& dy, const Tensors& kept) override {
    static const Operator backward("row_backward");
    const Tensor mean = kept[kMean].defined() ? kept[kMean] : at::zeros_like(kept[kRstd]);
    Stack stack = stack_of(dy, Tensor(), kept[kX], mean, kept[kRstd], kept[kWeight], start, stop, rms,
                           needs(1) || needs(2), 0.0, Tensor());
    if (!backward(stack, by_triton)) return {};
    return {tensor(stack, 0), needs(1) ? tensor(stack, 1) : Tensor(), needs(2) ? tensor(stack, 2) : Tensor()};
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    Direct::compiled_args(args);
    args.collect(start);
    args.collect(stop);
    args.collect(eps);
    args.collect(rms);
  }
};

// The node of a call on x, weight and bias, which autograd records.
template <class Kind> auto node_of(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  auto node = new_node<Kind, decltype(torch::autograd::Edge().function)>();
  node->set_next_edges(torch::autograd::collect_next_edges(x, weight, bias));
  return node;
}

Tensor channel_norm(const Given& of, const c10::IValue& act, int64_t groups, const Running& running) {
  static const Operator forward("channel_forward"), tracked("channel_forward_tracked_");
  const auto& [x, weight, bias, eps, by_triton, records] = of;
  Stack stack = running.given() ? stack_of(x, weight, bias, Tensor(), eps, act, running.mean, running.var,
                                           running.num_batches, running.momentum)
                                : stack_of(x, weight, bias, Tensor(), eps, act, groups, Tensor());
  if (!(running.given() ? tracked : forward).taken(stack, by_triton)) return {};
  for (const Tensor* v : {&running.mean, &running.var, &running.num_batches})
    if (v->defined()) torch::autograd::impl::bump_version(*v);
  Tensor y = tensor(stack, 0);
  if (!records) return y;
  const auto node = node_of<ChannelNorm>(x, weight, bias);
  node->save(kX, x);
  node->save(kMean, tensor(stack, 1));
  node->save(kRstd, tensor(stack, 3));
  node->save(kWeight, weight);
  if (act.toStringRef() != "identity") node->save(kBias, bias);
  node->by_triton = by_triton, node->act = act, node->eps = eps, node->groups = groups;
  torch::autograd::set_history(y, node);
  return y;
}

// channel_norm(x, weight, bias, eps, act, groups, running, by_triton)
PyObject* call_channel_norm(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Given given;
  Running running;
  c10::IValue act;
  int64_t groups;
  if (count != 8 || !given.read_from(arguments, count) || !read(arguments[4], act)) Py_RETURN_NONE;
  if (!read(arguments[5], groups) || !running.read_from(arguments[6], given.by_triton) || !dense(given.x) || !given.alike()) Py_RETURN_NONE;
  return result([&] { return channel_norm(given, act, groups, running); });
  END_HANDLE_TH_ERRORS
}

// Does the output of this activation tell its derivative?
bool from_output(const std::string& act) {
#define LEANNORM_NAMED(enumerator, name, from_output) \
  if (act == name) return from_output;
  LEANNORM_ACTIVATIONS(LEANNORM_NAMED)
#undef LEANNORM_NAMED
  return false;
}

at::MemoryFormat layout_of(const Tensor& y) {
  const auto last = y.dim() == 5 ? at::MemoryFormat::ChannelsLast3d : at::MemoryFormat::ChannelsLast;
  const bool is_last = (y.dim() == 4 || y.dim() == 5) && !y.is_contiguous() && y.is_contiguous(last);
  return is_last ? last : at::MemoryFormat::Contiguous;
}

Tensor evaluation(const Given& of, const c10::IValue& act, const Tensor& running_mean, const Tensor& running_var) {
  static const Operator constants("constants_of"), normalize("channel_normalize");
  const auto& [x, weight, bias, eps, by_triton, records] = of;
  if (by_triton && !records) {  // in one launch
    Stack whole = stack_of(x, running_mean, running_var, eps, weight, bias, Tensor(), act);
    const at::AutoDispatchBelowADInplaceOrView below;
    return tapes().repeat("channel_evaluate", whole) ? tensor(whole, 0) : Tensor();
  }
  Stack made = stack_of(running_mean, running_var, eps);
  if (!constants.taken(made, by_triton)) return {};
  const Tensor mean = tensor(made, 0), rstd = tensor(made, 1);
  Stack stack = stack_of(x, mean, rstd, weight, bias, Tensor(), act, Tensor());
  if (!normalize.taken(stack, by_triton)) return {};
  Tensor y = tensor(stack, 0);
  if (!records) return y;
  const auto node = node_of<ChannelAffine>(x, weight, bias);
  torch::autograd::set_history(y, node);
  const bool identity = act.toStringRef() == "identity", of_weight = weight.defined() && weight.requires_grad();
  const bool by_output = !of_weight && !identity && from_output(act.toStringRef());
  if (of_weight || !(identity || by_output)) node->save(kX, x);  // else it is for the activation alone
  node->save(kMean, mean);
  node->save(kRstd, rstd);
  node->save(kWeight, weight);
  if (!identity) node->save(kBias, bias);
  if (by_output) node->save(kOut, y, true);
  node->by_triton = by_triton, node->act = act, node->layout = layout_of(y);
  return y;
}

// evaluation(x, weight, bias, eps, act, mean, var, by_triton)
PyObject* call_evaluation(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Given given;
  Tensor mean, var;
  c10::IValue act;
  if (count != 8 || !given.read_from(arguments, count) || !read(arguments[4], act)) Py_RETURN_NONE;
  if (!read(arguments[5], mean, given.by_triton) || !read(arguments[6], var, given.by_triton)) Py_RETURN_NONE;
  if (!mean.defined() || !var.defined()) Py_RETURN_NONE;
  if (!dense(given.x) || !given.alike()) Py_RETURN_NONE;
  return result([&] { return evaluation(given, act, mean, var); });
  END_HANDLE_TH_ERRORS
}

Tensor row_norm(const Given& of, int64_t start, bool rms) {
  static const Operator forward("row_forward");
  const auto& [x, weight, bias, eps, by_triton, records] = of;
  Stack stack = stack_of(x, Tensor(), weight, bias, start, x.dim(), eps, rms, 0.0, false, Tensor());
  if (!forward.taken(stack, by_triton)) return {};
  Tensor y = tensor(stack, 0);
  if (!records) return y;
  const auto node = node_of<RowNorm>(x, weight, bias);
  node->save(kX, x);
  if (!rms || by_triton) node->save(kMean, tensor(stack, 2));  // else zeros would be one more launch
  node->save(kRstd, tensor(stack, 3));
  node->save(kWeight, weight);
  node->by_triton = by_triton, node->start = start, node->stop = x.dim(), node->eps = eps, node->rms = rms;
  torch::autograd::set_history(y, node);
  return y;
}

// row_norm(x, weight, bias, eps, shape, rms, by_triton)
PyObject* call_row_norm(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Given given;
  PyObject* const shape = arguments[4];
  if (count != 7 || !given.read_from(arguments, count) || !PyTuple_Check(shape)) Py_RETURN_NONE;
  const auto& [x, weight, bias, eps, by_triton, records] = given;
  const int64_t axes = PyTuple_GET_SIZE(shape), start = x.dim() - axes;
  if (start < 0 || axes == 0 || !(eps >= 0) || !given.alike()) Py_RETURN_NONE;
  for (int64_t i = 0, size; i < axes; ++i)
    if (!read(PyTuple_GET_ITEM(shape, i), size) || x.size(start + i) != size) Py_RETURN_NONE;
  const auto sizes = x.sizes().slice(start);
  if (weight.defined() && !(weight.sizes() == sizes && weight.is_floating_point())) Py_RETURN_NONE;
  if (bias.defined() && bias.sizes() != sizes) Py_RETURN_NONE;
  const bool rms = arguments[5] == Py_True;
  return result([&] { return row_norm(given, start, rms); });
  END_HANDLE_TH_ERRORS
}

// The backward pass of fast.py.
PyObject* set_backward(PyObject*, PyObject* function) {
  Py_INCREF(function);
  Py_XSETREF(by_python, function);
  Py_RETURN_NONE;
}

// launch.py, which says what the current device is.
PyObject* set_launches(PyObject*, PyObject* module) {
  tapes().module = py::reinterpret_borrow<py::object>(module);
  Py_RETURN_NONE;
}

// keep_tape(operator, arguments, made, launches, results)
PyObject* keep_tape(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 5);
  const auto list = [&](int i) { return py::handle(given[i]).cast<py::list>(); };
  tapes().keep(py::handle(given[0]).cast<std::string>(), py::handle(given[1]).cast<py::tuple>(), list(2), list(3), list(4));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* forget_tapes(PyObject*, PyObject*) {
  tapes().forget();
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"channel_norm", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call_channel_norm)), METH_FASTCALL, nullptr},
    {"evaluation", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call_evaluation)), METH_FASTCALL, nullptr},
    {"row_norm", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call_row_norm)), METH_FASTCALL, nullptr},
    {"set_launches", &set_launches, METH_O, nullptr},
    {"keep_tape", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&keep_tape)), METH_FASTCALL, nullptr},
    {"forget_tapes", &forget_tapes, METH_NOARGS, nullptr},
    {"set_backward", &set_backward, METH_O, nullptr},
    {"thread_of", &thread_of, METH_O, nullptr},
    {"this_thread", &this_thread, METH_NOARGS, nullptr},
    {"in_view", &in_view, METH_O, nullptr},
    {"sample", &sample, METH_O, nullptr},
    {"storage", &storage, METH_O, nullptr},
    {"version_of", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&version_of)), METH_FASTCALL, nullptr},
    {"scale_and_shift", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&scale_and_shift)), METH_FASTCALL, nullptr},
    {"told", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&told)), METH_FASTCALL, nullptr},
    {nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "leannorm._nodes", nullptr, -1, functions};

// Nodes show themselves in Python as those in Python do.
using namespace torch::autograd;
PyGetSetDef properties[] = {THP_FUNCTION_DEFAULT_PROPERTIES, {nullptr}};
PyMethodDef methods[] = {{"_register_hook_dict", THPCppFunction_register_hook_dict, METH_O, nullptr},
                         {"register_hook", THPCppFunction_register_hook, METH_O, nullptr},
                         {"register_prehook", THPCppFunction_register_prehook, METH_O, nullptr},
                         {"name", THPCppFunction_name, METH_NOARGS, nullptr},
                         {"_sequence_nr", THPCppFunction_sequence_nr, METH_NOARGS, nullptr},
                         {nullptr}};
template <class Kind> bool add_class(PyObject* module, const char* name) {
  static PyTypeObject type;
  torch::autograd::_initFunctionPyTypeObject(type, name, properties, methods);
  torch::autograd::registerCppFunction(typeid(Kind), &type);
  return PyModule_AddObjectRef(module, std::strrchr(name, '.') + 1, reinterpret_cast<PyObject*>(&type)) == 0;
}

}  // namespace
}  // namespace leannorm

// Python looks for these words in the file before it loads it (autograd/nodes.py).
extern "C" __attribute__((visibility("default"), used)) const char leannorm_nodes[] = "leannorm nodes " LEANNORM_NODES;

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__nodes() {
  using namespace leannorm;
  HANDLE_TH_ERRORS
  PyObject* const module = PyModule_Create(&definition);
  if (module == nullptr) return nullptr;
  if (add_class<ChannelNorm>(module, "torch.autograd.function.ChannelNormBackward") &&
      add_class<ChannelAffine>(module, "torch.autograd.function.ChannelAffineBackward") &&
      add_class<RowNorm>(module, "torch.autograd.function.RowNormBackward") && add_lean(module))
    return module;
  Py_DECREF(module);
  return nullptr;
  END_HANDLE_TH_ERRORS
}
