// A kind of save: what the Python search (saving/search.py) found for one tensor, and everything that it depends on.
// A later save for which the same is true gets the same step, without a search.
#pragma once

#include "leaves.h"
#include "sorts.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>

namespace leannorm {

constexpr int kMostChecks = 8, kMostFields = 9, kMostEdges = 6;

// Where the value behind an edge is: none, not asked for, a leaf, registered at its node (`at`: its sort), or made by
// a step of its own (`at`: the check of its node).
struct Edge {
  enum How { kNone, kAny, kLeaf, kValue, kMade } how;
  int64_t at;
};

// One node that the search read.
struct Check {
  const void* type;
  uint32_t output;
  bool newest;  // whether it was still saving when the search ran
  std::string told;
  Ref constants;  // their names; for a function in Python, everything that it has stored there
  std::vector<Edge> edges;
  std::vector<int64_t> fields;  // the sort of each, or -1 if it is not a value
};

// Where a step's input is found.
struct Source {
  enum How { kField, kEdge, kLeaf, kMade } how;
  int check, index;
};

// What a norm captures: nothing, the bias of the call, of `at` values (or none, if the call had none), a copy of what
// the node has saved in a field, the saved tensor itself, or a copy of the leaf behind an edge.
struct Part {
  enum How { kAbsent, kOfCall, kAbsentInCall, kCopy, kItself, kCopyOfLeaf } how;
  int at;
};

// A step, with what belongs to one tensor alone left open.
struct Template {
  int check;
  Ref step, name, shape, dtype;
  std::vector<Source> inputs;
  // captured: none, those of a batch norm (without or with a bias), those of the norm that `inputs` has instead of its
  // own, after `copies` copies, or parts, each of its own
  enum Captured { kNothing, kBatchNorm, kBatchNormWithBias, kOfNorm, kParts } captured;
  int copies, products;
  std::vector<Part> parts;
  int told_by;  // of kParts: the field that has the call, whose eps is the step's last constant; -1: none is asked
  mutable Ref sort;  // of the value that it makes, once that is known
};

struct Kind {
  const void* type;
  uint32_t output, version;
  bool newest;
  at::ScalarType dtype;
  at::Device device;
  std::vector<int64_t> sizes, strides;
  std::vector<Check> checks;
  std::vector<Template> templates;  // the tensor's own first; empty if it is kept
  std::vector<int> same;  // for each field and edge, the first that had the same value
  std::vector<size_t> first;  // of each check, its first place there
  Ref flags, why, seconds;
  bool is_view;
  // A copy within a view's step has the layout of the view's base: the check that made it (-1: none did) and its
  // layout.
  static constexpr int kNotAsked = -2;
  int base;
  std::vector<int64_t> base_sizes, base_strides;
};

// A copy of a small tensor, so that an optimizer step before the backward pass does not change it.
inline Ref copy_of(const Tensor& t) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return out_of_circles(checked(THPVariable_Wrap(t.clone())));
}

// Equal, as `exact` of graph.py: 0.0 is not -0.0, and neither 1 nor True is 1.0.
inline bool is_exactly(PyObject* a, PyObject* b) {
  if (Py_TYPE(a) != Py_TYPE(b)) return false;
  if (PyFloat_CheckExact(a)) return std::signbit(PyFloat_AS_DOUBLE(a)) == std::signbit(PyFloat_AS_DOUBLE(b)) && PyFloat_AS_DOUBLE(a) == PyFloat_AS_DOUBLE(b);
  if (PyTuple_Check(a)) {
    if (PyTuple_GET_SIZE(a) != PyTuple_GET_SIZE(b)) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(a); ++i)
      if (!is_exactly(PyTuple_GET_ITEM(a, i), PyTuple_GET_ITEM(b, i))) return false;
    return true;
  }
  if (PyDict_CheckExact(a)) {
    if (PyDict_GET_SIZE(a) != PyDict_GET_SIZE(b)) return false;
    PyObject *key, *value;
    for (Py_ssize_t at = 0; PyDict_Next(a, &at, &key, &value);) {
      PyObject* const other = PyDict_GetItemWithError(b, key);
      if (other == nullptr || !is_exactly(value, other)) return false;
    }
    return true;
  }
  const int same = a == b ? 1 : PyObject_RichCompareBool(a, b, Py_EQ);
  if (same < 0) throw Unusual();
  return same == 1;
}

// Whether a function in Python has the same attributes as before.
inline bool has_put(PyObject* function, PyObject* before) {
  static PyObject* const name = PyUnicode_InternFromString("__dict__");
  return is_exactly(get(function, name).get(), before);
}

// The nodes and values of one save, in the places that a kind names.
class Match {
 public:
  Match(const Now& now, const Kind& kind, const Tensor& t) : now_(now), kind_(kind), tensor_(t) {
    nodes_[0] = t.grad_fn().get(), found_.resize(kind.same.size());
  }

  // Whether everything that the search had found is true.
  bool holds() {
    if (kind_.flags.get() != now_.flags) return false;
    for (size_t i = 0; i < kind_.checks.size(); ++i)
      if (nodes_[i] == nullptr || !holds(i)) return false;
    return same_as_before() && has_base();
  }

  // The tensor's own step.
  Ref step() { return step_of(kind_.templates[0]); }

  // Call this once the step is used: values of steps within it are found at their nodes.
  void record_made() {
    for (auto& [check, value] : made_) {
      const Ref lookup = checked(PyWeakref_NewRef(value.get(), nullptr));
      record(nodes_[check], kind_.checks[check].output, lookup);
    }
  }
  PyObject *provenance = nullptr, *order = nullptr;

 private:
  bool holds(size_t i) {
    const Check& check = kind_.checks[i];
    Node* const node = nodes_[i];
    const Ref function = python_function(node);
    if (class_id(node, function.get()) != check.type || !now_.made(*node)) return false;
    if ((node->sequence_nr() + 1 == now_.next) != check.newest) return false;
    const auto& edges = node->next_edges();
    if (edges.size() != check.edges.size()) return false;
    const SavedOf all_saved(node, function.get());
    for (size_t k = 0; k < check.fields.size(); ++k) {
      const SavedVariable* const saved = all_saved[k];
      if (saved == nullptr) return false;
      Ref value = packed_by_hook(saved);
      const bool there = value && is_value(value.get());
      if (there && (get(value.get(), slots.memory).get() != Py_None || !is_current(value.get()))) return false;
      if (!there && !is_absent(saved)) return false;  // saved as it is, or by others' hooks
      if ((there ? sort_of(now_, value.get()) : -1) != check.fields[k]) return false;
      if (there) field(i, k) = std::move(value);
    }
    for (size_t k = 0; k < edges.size(); ++k)
      if (!holds(check.edges[k], edges[k].function.get(), edges[k].input_nr, i, k)) return false;
    if (function && !has_put(function.get(), check.constants.get())) return false;
    return all_told(node, check.constants.get()) == check.told;
  }
  bool holds(const Edge& edge, Node* producer, uint32_t output, size_t i, size_t k) {
    if (edge.how == Edge::kAny) return true;
    if (edge.how == Edge::kNone) return producer == nullptr;
    if (producer == nullptr) return false;
    if (edge.how == Edge::kLeaf) {
      const auto* const leaf = as<torch::autograd::AccumulateGrad>(producer);
      if (leaf == nullptr) return false;
      edge_value(i, k) = checked(THPVariable_Wrap(leaf->variable));
      return proves(now_, edge_value(i, k).get());
    }
    if (now_.from_here && !now_.made(*producer)) return false;
    Registered found = registered(producer, output);
    if (edge.how == Edge::kMade) {
      if (found.value || found.is_packed || output != kind_.checks[edge.at].output) return false;
      if (nodes_[edge.at] != nullptr) return nodes_[edge.at] == producer;  // a second edge to one node
      for (size_t of = 0; of < kind_.checks.size(); ++of)
        if (nodes_[of] == producer && kind_.checks[of].output == output) return false;  // there were two
      nodes_[edge.at] = producer;
      return true;
    }
    if (!found.value || !is_value(found.value.get())) return false;
    PyObject* const value = found.value.get();
    if (get(value, slots.memory).get() != Py_None || get(value, slots.as_made).get() != Py_True) return false;
    if (sort_of(now_, value) != edge.at || !is_current(value) || !is_read_below({nodes_[0], now_.saved_too}, value)) return false;
    edge_value(i, k) = std::move(found.value);
    return true;
  }

  // Whether the same of these values are identical. A product of a tensor with itself is not a product of two
  // tensors.
  bool same_as_before() const {
    for (size_t at = 0; at < found_.size(); ++at) {
      size_t first = at;
      for (size_t before = 0; before < at && first == at && found_[at]; ++before)
        if (found_[before].get() == found_[at].get()) first = before;
      if (static_cast<int>(first) != kind_.same[at]) return false;
    }
    return true;
  }
  bool has_base() const {
    if (kind_.base == Kind::kNotAsked) return true;
    const Tensor base = tensor_.is_view() ? Tensor(tensor_._base()) : Tensor();
    Node* const by = base.defined() ? base.grad_fn().get() : nullptr;
    const auto end = nodes_.begin() + kind_.checks.size(), at = by == nullptr ? end : std::find(nodes_.begin(), end, by);
    if (at == end) return kind_.base == -1;
    return at - nodes_.begin() == kind_.base && base.sizes() == c10::IntArrayRef(kind_.base_sizes) &&
           base.strides() == c10::IntArrayRef(kind_.base_strides);
  }
  Ref& field(size_t check, size_t at) { return found_[kind_.first[check] + at]; }
  Ref& edge_value(size_t check, size_t at) { return found_[kind_.first[check] + kind_.checks[check].fields.size() + at]; }

  Ref value_of(const Source& source) {
    if (source.how == Source::kField) return borrowed(field(source.check, source.index).get());
    if (source.how != Source::kMade) {
      PyObject* const at = edge_value(source.check, source.index).get();
      if (source.how == Source::kEdge) return borrowed(at);
      static PyObject* const unnamed = PyUnicode_InternFromString("");
      return with_provenance(new_value(at, tensor_of(at)->_version(), Py_None, unnamed));
    }
    const Template& how = kind_.templates[source.index];
    for (auto& [check, value] : made_)
      if (check == how.check) return borrowed(value.get());
    const Ref step = step_of(how);
    Ref value = new_value(Py_None, 0, step.get(), how.name.get());
    set(value.get(), slots.shape, how.shape), set(value.get(), slots.dtype, how.dtype);
    if (how.products != 0) set_number(value.get(), slots.products, how.products);
    made_.emplace_back(how.check, borrowed(value.get()));
    if (!how.sort) how.sort = checked(PyObject_CallOneArg(now_.sorter, value.get()));
    else set(value.get(), slots.sort, how.sort);
    return with_provenance(std::move(value));
  }
  Ref with_provenance(Ref value) {
    set(value.get(), slots.provenance, provenance), set(value.get(), slots.order, order);
    return value;
  }

  // From a template: `first` as its first input, then the others.
  Ref values_of(const Template& how, PyObject* first) {
    if (first != nullptr && how.inputs.size() == 1) return borrowed(first);
    const Py_ssize_t before = first == nullptr ? 0 : PyTuple_GET_SIZE(first);
    const size_t from = first == nullptr ? 0 : 1;
    Ref made = out_of_circles(checked(PyTuple_New(before + how.inputs.size() - from)));
    for (Py_ssize_t i = 0; i < before; ++i) PyTuple_SET_ITEM(made.get(), i, Py_NewRef(PyTuple_GET_ITEM(first, i)));
    for (size_t i = from; i < how.inputs.size(); ++i) {
      Ref value = value_of(how.inputs[i]);
      if (is_unproved_leaf(value.get())) throw Unusual();
      PyTuple_SET_ITEM(made.get(), before + i - from, value.release());
    }
    return made;
  }
  Ref step_of(const Template& how) {
    Ref inputs, captured;
    if (how.captured == Template::kOfNorm) {
      Ref value = value_of(how.inputs[0]);
      Ref norm = get(value.get(), slots.step);
      for (int i = 0; i < how.copies; ++i) {
        PyObject* const copied = PyTuple_GET_ITEM(PyTuple_GET_ITEM(norm.get(), kInputs), 0);
        norm = get(copied, slots.step);
      }
      PyObject* const flags = PyTuple_GET_ITEM(norm.get(), kFlags);
      if (flags != PyTuple_GET_ITEM(how.step.get(), kFlags)) throw Unusual();
      captured = borrowed(PyTuple_GET_ITEM(norm.get(), kCaptured));
      inputs = values_of(how, PyTuple_GET_ITEM(norm.get(), kInputs));
    } else {
      inputs = values_of(how, nullptr);
      if (how.captured == Template::kNothing) captured = borrowed(PyTuple_GET_ITEM(how.step.get(), kCaptured));
      else captured = how.captured == Template::kParts ? parts(how) : statistics(how);
    }
    auto* const type = reinterpret_cast<PyTypeObject*>(classes().step);
    const Py_ssize_t size = PyTuple_GET_SIZE(how.step.get());
    const auto [depth, runs] = depth_and_runs(inputs.get());
    Ref made = checked(type->tp_alloc(type, size));
    for (Py_ssize_t i = 0; i < size; ++i) {
      PyObject* field = PyTuple_GET_ITEM(how.step.get(), i);
      if (i == kInputs) field = inputs.get();
      else if (i == kCaptured) field = captured.get();
      else if (i == kDepth) field = depth.get();
      else if (i == kRunsOf) field = runs.get();
      Py_INCREF(field);
      PyTuple_SET_ITEM(made.get(), i, field);
    }
    return out_of_circles(std::move(made));
  }
  // Of a step with these inputs; as Step.told. Throws if there are too many.
  std::pair<Ref, Ref> depth_and_runs(PyObject* inputs) const {
    long depth = 1, runs = 1;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(inputs); ++i) {
      PyObject* const value = PyTuple_GET_ITEM(inputs, i);
      const Ref step = get(value, slots.step);
      if (step.get() == Py_None) continue;
      depth = std::max(depth, 1 + PyLong_AsLong(PyTuple_GET_ITEM(step.get(), kDepth)));
      if (get(value, slots.layout).get() == Py_None) runs += PyLong_AsLong(PyTuple_GET_ITEM(step.get(), kRunsOf));
    }
    if (depth > now_.most_in_a_row || runs > now_.most_runs) throw Unusual();
    return {checked(PyLong_FromLong(depth)), checked(PyLong_FromLong(runs))};
  }
  // A leaf that a node saved without a sample: its present values may not be those that the node has read.
  static bool is_unproved_leaf(PyObject* value) {
    if (get(value, slots.sample).get() != Py_None || number(value, slots.users) == 0) return false;
    const Ref tensor = get(value, slots.tensor);
    const Tensor* const leaf = tensor_of(tensor.get());
    return leaf != nullptr && leaf->is_cpu() && leaf->requires_grad();  // tensors on a device are not sampled
  }

  // The tensor of a value that is kept, unedited; undefined if there is none.
  static Tensor look(PyObject* value) {
    if (value == nullptr) return Tensor();
    const Ref held = as_pinned(value);
    const Tensor* const v = tensor_of(held.get());
    if (v == nullptr || get(value, slots.step).get() != Py_None || !is_current(value)) throw Unusual();
    if (!matches(get(value, slots.sample).get(), *v)) throw Unusual();
    return *v;
  }
  // What the call that saved this field showed: eps, bias, reads_buffers, moves_affine, causal (calls.py).
  Ref call_told_by(const Template& how, int at) {
    PyObject* const value = field(how.check, at).get();
    if (value == nullptr) throw Unusual();
    Ref call = get(value, slots.call);
    if (!PyTuple_Check(call.get()) || PyTuple_GET_SIZE(call.get()) != 5) throw Unusual();
    if (PyTuple_GET_ITEM(call.get(), 3) != Py_False) throw Unusual();
    return call;
  }
  // A norm's weight and bias, and statistics that it reads again.
  Ref parts(const Template& how) {
    const Ref call = how.told_by < 0 ? borrowed(Py_None) : call_told_by(how, how.told_by);
    PyObject* const constants = PyTuple_GET_ITEM(how.step.get(), kConstants);
    PyObject* const eps = PyTuple_GET_ITEM(constants, PyTuple_GET_SIZE(constants) - 1);
    if (how.told_by >= 0 && PyObject_RichCompareBool(PyTuple_GET_ITEM(call.get(), 0), eps, Py_EQ) != 1) throw Unusual();
    Ref made = checked(PyTuple_New(how.parts.size()));
    for (size_t i = 0; i < how.parts.size(); ++i) {
      const auto& [from, at] = how.parts[i];
      const bool of_call = from == Part::kOfCall || from == Part::kAbsentInCall;
      Ref part = borrowed(of_call ? PyTuple_GET_ITEM(call.get(), 1) : Py_None);
      if (from == Part::kOfCall) {  // instance norm folds the batch into channels, and repeats its bias
        const Tensor* const bias = tensor_of(part.get());
        if (bias == nullptr || bias->numel() != at) throw Unusual();
      } else if (from == Part::kCopy || from == Part::kItself) {
        PyObject* const saved = field(how.check, at).get();
        const Tensor t = look(saved);
        part = from == Part::kCopy ? copy_of(t) : get(saved, slots.tensor);
      } else if (from == Part::kCopyOfLeaf) {
        const Tensor* const leaf = tensor_of(edge_value(how.check, at).get());
        if (leaf == nullptr) throw Unusual();
        part = copy_of(*leaf);
      }
      if ((part.get() == Py_None) != (from == Part::kAbsent || from == Part::kAbsentInCall)) throw Unusual();
      PyTuple_SET_ITEM(made.get(), i, part.release());
    }
    return made;
  }
  // scale and shift of a batch norm, whose statistics show the call
  Ref statistics(const Template& how) {
    const Ref* const fields = &field(how.check, 0);  // input, weight, result1, result2
    const Tensor weight = look(fields[1].get()), mean = look(fields[2].get()), rstd = look(fields[3].get());
    const Ref call = call_told_by(how, 2);
    PyObject* const given = PyTuple_GET_ITEM(call.get(), 1);
    const Tensor* const bias = tensor_of(given);
    const bool as_before = how.captured == Template::kBatchNormWithBias ? bias != nullptr : given == Py_None;
    if (!as_before || (bias != nullptr && bias->numel() != mean.numel())) throw Unusual();
    const auto [scale, shift] = scale_and_shift_of(mean, rstd, weight, bias == nullptr ? Tensor() : *bias);
    Ref first = checked(THPVariable_Wrap(scale));
    if (weight.defined()) first = out_of_circles(std::move(first));  // otherwise the node saved it, others may keep it
    const Ref second = out_of_circles(checked(THPVariable_Wrap(shift)));
    return out_of_circles(checked(PyTuple_Pack(2, first.get(), second.get())));
  }

  const Now& now_;
  const Kind& kind_;
  const Tensor& tensor_;
  std::array<Node*, kMostChecks> nodes_{};
  c10::SmallVector<Ref, 24> found_;  // for each check, in the order of `same`: its fields, then its edges
  std::vector<std::pair<int, Ref>> made_;
};

}  // namespace leannorm
