// Autograd nodes in C++ for the calls of autograd/fast.py, whose functions they replace: the same operators, saved
// tensors and bits, without the time that Python takes in a small call. For Triton's operators they repeat calls that
// Python has made before (tapes.h).
//
// They need torch's own C++ headers and Python's, so this library works only with the torch and the Python that it was
// built for (autograd/nodes.py checks before loading it); without it fast.py does the same in Python. Each function
// returns None for an unusual call and for one that the kernel rejects: then nothing has been written.
#include "../activation.h"
#include "record/pass.h"
#include "rows.h"

#include <torch/csrc/autograd/python_cpp_function.h>

namespace leannorm {
namespace {

// Whether the output of this activation determines its derivative.
bool from_output(const std::string& act) {
#define LEANNORM_NAMED(enumerator, name, from_output) \
  if (act == name) return from_output;
  LEANNORM_ACTIVATIONS(LEANNORM_NAMED)
#undef LEANNORM_NAMED
  return false;
}

Tensor channel_norm(const Given& of, const c10::IValue& act, int64_t groups, const Running& running, const Tensor& residual) {
  static const Operator forward("channel_forward"), tracked("channel_forward_tracked_");
  const auto& [x, weight, bias, eps, by_triton, records] = of;
  Stack stack = running.given() ? stack_of(x, weight, bias, residual, eps, act, running.mean, running.var,
                                           running.num_batches, running.momentum)
                                : stack_of(x, weight, bias, residual, eps, act, groups, Tensor());
  if (!(running.given() ? tracked : forward).taken(stack, by_triton)) return {};
  for (const Tensor* v : {&running.mean, &running.var, &running.num_batches})
    if (v->defined()) torch::autograd::impl::bump_version(*v);
  Tensor y = tensor(stack, 0);
  if (!records) return y;
  const auto node = residual.defined() ? node_of<ChannelNorm>(x, weight, bias, residual) : node_of<ChannelNorm>(x, weight, bias);
  node->has_bias = bias.defined();
  torch::autograd::set_history(y, node);
  node->save(kX, x);
  node->save(kMean, tensor(stack, 1));
  node->save(kRstd, tensor(stack, 3));
  node->save(kWeight, weight);
  if (act.toStringRef() != "identity") {
    node->save(kBias, bias);
    const bool by_output = residual.defined() && from_output(act.toStringRef());
    by_output ? node->save(kOut, y, true) : node->save(kResidual, residual);
  }
  node->by_triton = by_triton, node->act = act, node->eps = eps, node->groups = groups, node->has_residual = residual.defined();
  return y;
}

// channel_norm(x, weight, bias, eps, act, groups, running, residual, by_triton)
PyObject* call_channel_norm(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Given given;
  Running running;
  Tensor residual;
  c10::IValue act;
  int64_t groups;
  if (count != 9 || !given.read_from(arguments, count) || !read(arguments[4], act)) Py_RETURN_NONE;
  if (!read(arguments[5], groups) || !running.read_from(arguments[6], given.by_triton) || !dense(given.x) || !given.alike()) Py_RETURN_NONE;
  if (!read(arguments[7], residual, given.by_triton) || !given.takes(residual) || !given.can_record(residual)) Py_RETURN_NONE;
  return result([&] { return channel_norm(given, act, groups, running, residual); });
  END_HANDLE_TH_ERRORS
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
  node->has_bias = bias.defined();
  torch::autograd::set_history(y, node);
  const bool identity = act.toStringRef() == "identity", of_weight = weight.defined() && weight.requires_grad();
  const bool by_output = !of_weight && !identity && from_output(act.toStringRef());
  if (of_weight || !(identity || by_output)) node->save(kX, x);  // otherwise only the activation needs it
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

// storage(tensor): where its storage is, and its bytes.
PyObject* storage(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(THPVariable_Check(object));
  const c10::Storage& of = THPVariable_Unpack(object).storage();
  return Py_BuildValue("KK", reinterpret_cast<unsigned long long>(of.unsafeGetStorageImpl()), static_cast<unsigned long long>(of.nbytes()));
  END_HANDLE_TH_ERRORS
}

// is_watched(): does anyone listen to operators in this thread?
PyObject* watched(PyObject*, PyObject*) { return PyBool_FromLong(is_watched()); }

// What is called once per process, or once for a kind of call.
void add_settings(py::module_ module) {
  module.def("set_backward", [](py::object of_fast) { by_python = of_fast.release().ptr(); });
  // launch.py reports the current device; the interpreter's kernels are not the dispatcher's
  module.def("set_launches", [](py::object launch, bool serves_dispatcher) {
    tapes().module = launch, tapes().serves_dispatcher = serves_dispatcher;
  });
  module.def("set_driver", [](uintptr_t launch) { drivers_launch() = reinterpret_cast<DriversLaunch>(launch); });  // of no device
  module.def("keep_tape", [](const std::string& name, const py::tuple& arguments, const py::list& made, const py::list& launches,
                             const py::list& results) { tapes().keep(name, arguments, made, launches, results); });
  module.def("forget_tapes", [] { tapes().forget(); });
}

PyMethodDef functions[] = {
    {"channel_norm", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call_channel_norm)), METH_FASTCALL, nullptr},
    {"evaluation", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call_evaluation)), METH_FASTCALL, nullptr},
    {"row_norm", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call_row_norm)), METH_FASTCALL, nullptr},
    {"gated_norm", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call_gated_norm)), METH_FASTCALL, nullptr},
    {"storage", &storage, METH_O, nullptr},
    {"is_watched", &watched, METH_NOARGS, nullptr},
    {nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "leannorm._nodes", nullptr, -1, functions};

// Nodes appear in Python like those written in Python.
using namespace torch::autograd;
// Other releases of torch store nodes in another way.
template <class Pointer> Node* pointed_to(const Pointer& pointer) {
  if constexpr (requires { pointer.lock(); }) return pointer.lock().get();
  else return pointer.get();
}
// The call that made the node; `call_of` of fast.py reads it.
PyObject* saved_how(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  return static_cast<Direct*>(pointed_to(reinterpret_cast<torch::autograd::THPCppFunction*>(self)->cdata))->how().release().ptr();
  END_HANDLE_TH_ERRORS
}
PyGetSetDef properties[] = {THP_FUNCTION_DEFAULT_PROPERTIES, {"_saved_how", &saved_how, nullptr, nullptr, nullptr}, {nullptr}};
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
  const auto module = py::reinterpret_steal<py::module_>(PyModule_Create(&definition));
  if (!module || !add_class<ChannelNorm>(module.ptr(), "torch.autograd.function.ChannelNormBackward") ||
      !add_class<ChannelAffine>(module.ptr(), "torch.autograd.function.ChannelAffineBackward") ||
      !add_class<RowNorm>(module.ptr(), "torch.autograd.function.RowNormBackward") ||
      !add_class<GatedNorm>(module.ptr(), "torch.autograd.function.GatedNormBackward"))
    return nullptr;
  add_settings(module), recording::add_record(module);
  return module.inc_ref().ptr();
  END_HANDLE_TH_ERRORS
}
