// What C++ knows about one forward pass of lean(): its kinds, its flags, and the call that saves a tensor.
#pragma once

#include "calls.h"
#include "kinds.h"
#include "unpack.h"

#include <frameobject.h>

namespace leannorm {

// A class of nodes, as a policy sees it (`NodeClass` of memo.py).
struct NodeClass {
  Ref name, why;  // why its outputs are kept
  bool usual = false, searched = false, alias = false, clone = false, widens = false, joins = false, may_edit = false;
};

// The kinds of one policy.
struct Memo {
  using Kinds = std::vector<std::shared_ptr<const Kind>>;
  std::unordered_map<uint64_t, std::shared_ptr<const Kinds>> kinds;
  std::unordered_map<const void*, NodeClass> classes;
  Sorts sorts;
  size_t size = 0;

  void clear() { kinds.clear(), sorts.of.clear(), size = 0; }
};

inline uint64_t key_of(const void* type, uint32_t output, long version, bool newest, const Tensor& t) {
  uint64_t h = reinterpret_cast<uint64_t>(type) + output;
  mix(h, version * 2 + newest), mix(h, static_cast<uint64_t>(t.scalar_type()));
  mix(h, static_cast<uint64_t>(t.device().type()) * 256 + t.device().index());
  for (const int64_t v : t.sizes()) mix(h, v);
  for (const int64_t v : t.strides()) mix(h, v);
  return h;
}

// A function that calls autograd, by its code; what a rebuild needs of its call and no node saves.
struct Caller {
  Ref code;
  bool is_copied;  // a norm, of which a rebuild copies the weight
  enum Tells { kNothing, kNorm, kRowNorm, kBiasOfConvolution, kBiasOfLinear, kMore } tells;
};

// One forward pass.
struct State {
  std::shared_ptr<Memo> memo;
  Ref packing, pack, flags, before, provenance, ledger, values, sorter, told_of, ours, read, norms, row_norms, arguments, apply, call;
  Ref vain, smaller, edited, kept, planned;  // searches in vain (vain.py), and reasons
  Ref copied, convolutions, linear;  // codes: norms, and products whose bias may be frozen
  std::unordered_map<PyObject*, Caller> callers;
  Ref following, plan, calls;  // a plan (plans.py) or None, and what was saved so far
  Now now;
  long most_values = 0;  // the ledger looks for values that are gone once it has more, and returns the next limit
  long seen, smallest, largest, much_larger, alone;  // `alone`: references to a tensor that only autograd keeps
  uint64_t checked, called;  // next nodes for which flags and the call were read last
  Node* last = nullptr;          // the node that made what was packed last, while the next node was this:
  uint64_t last_of = UINT64_MAX;
  bool everything, reads_weights, flags_changed;
};
struct PassObject {
  PyObject_HEAD
  State* state;
};

inline PyObject* order_of(State* p) { return PyLong_FromLong(p->seen); }

inline bool flags_as_before(State* p) {
  if (p->flags_changed) return false;
  if (p->checked == p->now.next) return true;
  if (!are_flags(p->flags.get())) return p->flags_changed = true, false;
  p->checked = p->now.next;
  return true;
}

// The Python function that has called autograd.
inline PyFrameObject* caller() {
  PyFrameObject* const frame = PyEval_GetFrame();
  if (frame == nullptr) throw Unusual();
  return frame;
}
inline Ref code_of(PyFrameObject* frame) { return Ref(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame))); }
// Whether a `forward` has a local variable `scale`, as that of a frozen batch norm has. See calls.py.
inline bool may_be_frozen_norm(PyObject* code) {
  if (PyUnicode_CompareWithASCIIString(reinterpret_cast<PyCodeObject*>(code)->co_name, "forward") != 0) return false;
  static PyObject* const scale = PyUnicode_InternFromString("scale");
  for (const char* const kind : {"co_varnames", "co_cellvars", "co_freevars"}) {
    const Ref variables = checked(PyObject_GetAttrString(code, kind));
    if (PySequence_Contains(variables.get(), scale) != 0) return true;
  }
  return false;
}

inline const Caller& known(State* p, PyFrameObject* frame) {
  Ref code = code_of(frame);
  if (const auto before = p->callers.find(code.get()); before != p->callers.end()) return before->second;
  Caller made;
  const auto is_in = [&](const Ref& codes) {
    const int found = PySequence_Contains(codes.get(), code.get());
    if (found < 0) throw Unusual();
    return found == 1;
  };
  const bool more = is_in(p->read) || code.get() == p->apply.get() || may_be_frozen_norm(code.get());
  made.tells = is_in(p->norms) ? Caller::kNorm : is_in(p->row_norms) ? Caller::kRowNorm : is_in(p->convolutions) ? Caller::kBiasOfConvolution
               : is_in(p->linear) ? Caller::kBiasOfLinear : more ? Caller::kMore : Caller::kNothing;
  made.is_copied = is_in(p->copied);
  PyObject* const key = code.get();
  made.code = std::move(code);
  return p->callers.emplace(key, std::move(made)).first->second;
}

inline Ref locals_of(PyFrameObject* frame) {
  static PyObject* const f_locals = PyUnicode_InternFromString("f_locals");
  return get(reinterpret_cast<PyObject*>(frame), f_locals);  // a dict, from Python 3.13 on a proxy
}

// Whether a convolution or a linear layer has a trained bias, or none. Then its call shows nothing.
inline bool has_no_frozen_bias(PyFrameObject* frame, bool of_linear) {
  static PyObject *const own = PyUnicode_InternFromString("self"), *const bias_name = PyUnicode_InternFromString("bias");
  static PyObject* const parameters_name = PyUnicode_InternFromString("_parameters");
  const Ref given = locals_of(frame);
  const Ref layer = of_linear ? checked(PyObject_GetItem(given.get(), own)) : Ref();
  const Ref parameters = of_linear ? get(layer.get(), parameters_name) : Ref();
  const Ref bias = checked(PyObject_GetItem(of_linear ? parameters.get() : given.get(), bias_name));
  const Tensor* const known = tensor_of(bias.get());
  return bias.get() == Py_None || (known != nullptr && known->requires_grad());
}

// What a norm's call shows in `frame`; as _of_norm and _of_row_norm in calls.py.
inline Ref norm_call(State* p, PyFrameObject* frame, bool of_rows) {
  const Ref given = locals_of(frame);
  static PyObject* const keys[] = {
      PyUnicode_InternFromString("weight"), PyUnicode_InternFromString("bias"), PyUnicode_InternFromString("running_mean"),
      PyUnicode_InternFromString("running_var"), PyUnicode_InternFromString("training"),
      PyUnicode_InternFromString("use_input_stats"), PyUnicode_InternFromString("eps")};
  Ref found[std::size(keys)];
  PyObject* of[std::size(keys)];
  for (size_t i = 0; i < std::size(keys); ++i) {
    found[i] = Ref(PyObject_GetItem(given.get(), keys[i]));
    if (!found[i] && !PyErr_ExceptionMatches(PyExc_KeyError)) throw Unusual();
    if (!found[i]) PyErr_Clear();  // not an argument of this norm
    of[i] = found[i].get();
  }
  const Tensor* tensors[4];
  for (size_t i = 0; i < 4; ++i) {
    tensors[i] = tensor_of(of[i]);
    if (tensors[i] == nullptr && of[i] != Py_None && (i < (of_rows ? 1 : 2) || of[i] != nullptr)) throw Unusual();
    if (tensors[i] != nullptr && !plain(*tensors[i])) throw Unusual();
  }
  PyObject* const mode = of[4] != nullptr ? of[4] : of[5];
  const int trains = mode == nullptr ? 1 : PyObject_IsTrue(mode);
  if (trains < 0 || of[6] == nullptr) throw Unusual();
  const Tensor *const weight = tensors[0], *const bias = tensors[1];
  const auto frozen = [](const Tensor* v) { return v != nullptr && !v->requires_grad(); };
  const auto share = [](const Tensor* a, const Tensor* b) { return a != nullptr && b != nullptr && a->is_alias_of(*b); };
  bool moves_affine = false;
  for (const Tensor* moved : {tensors[2], tensors[3]}) moves_affine |= trains && (share(moved, weight) || share(moved, bias));
  Ref copy = bias == nullptr || of_rows ? borrowed(Py_None) : copy_of(*bias);  // a row norm's node saves the bias
  auto* const type = reinterpret_cast<PyTypeObject*>(p->arguments.get());
  Ref made = checked(type->tp_alloc(type, 5));
  PyTuple_SET_ITEM(made.get(), 0, borrowed(of[6]).release());
  PyTuple_SET_ITEM(made.get(), 1, copy.release());
  PyTuple_SET_ITEM(made.get(), 2, borrowed(!trains || frozen(weight) || frozen(bias) ? Py_True : Py_False).release());
  PyTuple_SET_ITEM(made.get(), 3, borrowed(moves_affine ? Py_True : Py_False).release());
  PyTuple_SET_ITEM(made.get(), 4, borrowed(Py_False).release());
  return out_of_circles(std::move(made));
}

// The call that saves the tensor, as Packing._call_of: None if its frame shows nothing.
inline PyObject* call_of(State* p) {
  if (p->called == p->now.next) return p->call.get();
  if (p->apply.get() == Py_None) throw Unusual();
  PyFrameObject* const frame = caller();
  const Caller::Tells tells = known(p, frame).tells;
  const bool of_linear = tells == Caller::kBiasOfLinear, biased = of_linear || tells == Caller::kBiasOfConvolution;
  const bool of_rows = tells == Caller::kRowNorm;
  if (tells == Caller::kNorm || of_rows) p->call = norm_call(p, frame, of_rows);
  else if (tells == Caller::kNothing || (biased && has_no_frozen_bias(frame, of_linear))) {
    p->call = borrowed(Py_None);
  } else {
    const Ref next = checked(PyLong_FromUnsignedLongLong(p->now.next));
    PyObject* const given[] = {p->packing.get(), reinterpret_cast<PyObject*>(frame), next.get()};
    p->call = checked(PyObject_VectorcallMethod(names()._call_of, given, 3, nullptr));
  }
  p->called = p->now.next;
  return p->call.get();
}

// Whether a norm is called, of which a rebuild copies the weight.
inline bool by_norm(State* p) { return known(p, caller()).is_copied; }

// As name_of in calls.py.
inline Ref name_of_caller() {
  const Ref code = code_of(caller());
  Ref name(PyObject_GetAttrString(code.get(), "co_qualname"));
  if (!name) PyErr_Clear(), name = checked(PyObject_GetAttrString(code.get(), "co_name"));
  return name;
}

}  // namespace leannorm
