// The first hook of lean(): a save that is like an earlier one becomes the same kind of value without Python. For an
// unusual tensor, and for whatever is not proved, Python's hook (saving/packing.py) does it, for that one tensor.
#pragma once

#include "edits.h"
#include "ledger.h"
#include "pass.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <optional>

namespace leannorm {

inline bool requires_no_more(const Tensor& t) { return t.layout() == at::kStrided && (t.is_cpu() || t.is_cuda()) && plain(t); }

inline Ref finished(State* p, Ref value) {
  set(value.get(), slots.provenance, p->provenance), set(value.get(), slots.order, checked(order_of(p)));
  use(value.get());
  return value;
}
inline void in_ledger(State* p, PyObject* value) {
  const Ref reference = out_of_circles(checked(PyWeakref_NewRef(value, nullptr)));
  set(p->ledger.get(), names()._closed, Py_None);
  if (PyList_Append(p->values.get(), reference.get()) != 0) throw Unusual();
  if (PyList_GET_SIZE(p->values.get()) > p->most_values)
    p->most_values = PyLong_AsLong(checked(PyObject_CallMethodNoArgs(p->ledger.get(), names().drop_dead)).get());
}

// As is_parameter of evidence.py, for a base.
inline bool is_leaf_or_parameter(at::TensorBase of) {
  const Tensor base(std::move(of));
  if (base.requires_grad() && base.is_leaf()) return true;
  const Ref object = checked(THPVariable_Wrap(base));
  if (!THPVariable_CheckExact(object.get())) throw Unusual();
  return Py_TYPE(object.get()) != reinterpret_cast<PyTypeObject*>(THPVariableClass);
}

// A view of a leaf that was edited before, such as a layer's transposed weight after the first step: nothing is
// checked.
inline bool views_edited_leaf(const Tensor& t, const Node* node, const NodeClass& of, long version) {
  if (version == 0 || !of.alias || !t.is_view() || node->next_edges().empty()) return false;
  return as<torch::autograd::AccumulateGrad>(node->next_edge(0).function.get()) != nullptr;
}

// Parameters, inputs, statistics.
inline Ref without_node(State* p, PyObject* object, const Tensor& t) {
  static PyObject* const unnamed = PyUnicode_InternFromString("");
  const long version = t._version();
  const bool large = t.numel() >= p->smallest, is_parameter = Py_TYPE(object) != reinterpret_cast<PyTypeObject*>(THPVariableClass);
  if (t.requires_grad()) {
    Ref value = new_value(object, version, Py_None, unnamed);
    if (t.dim() == 1 || p->reads_weights || !is_parameter || by_norm(p)) {
      set(value.get(), slots.sample, sample_of(t));
      pin(value.get(), t);
    }
    return finished(p, std::move(value));
  }
  // a mask, or integers: their values decide how they are kept; a mask was written (masks.py)
  const bool alone = Py_REFCNT(object) <= p->alone;
  const bool as_it_is = !large || (at::isFloatingType(t.scalar_type()) && (!alone || version == 0));
  if (!as_it_is) throw Unusual();
  Ref value = new_value(object, version, Py_None, unnamed);
  const bool integers = t.scalar_type() == at::kLong;  // such as the state of random numbers: no call shows them
  PyObject* const call = integers ? Py_None : call_of(p);
  set(value.get(), slots.call, call);
  if (large && alone) set(value.get(), slots.name, name_of_caller()), set(value.get(), slots.why, p->kept);
  const bool sampled = !integers && (call == Py_None || large || PyTuple_GET_ITEM(call, 2) == Py_True);
  if (sampled) set(value.get(), slots.sample, sample_of(t));
  if (sampled && !alone) pin(value.get(), t);
  value = finished(p, std::move(value));
  if (!is_parameter && !(t.is_view() && is_leaf_or_parameter(t._base()))) in_ledger(p, value.get());
  return value;
}

inline const NodeClass& class_of(State* p, const Node* node) {
  const Ref function = python_function(node);
  if (function) {
    const int ours = PyDict_Contains(p->ours.get(), reinterpret_cast<PyObject*>(Py_TYPE(function.get())));
    if (ours != 1) throw Unusual();  // a user's, whose class may be gone tomorrow
  }
  const void* const id = class_id(node, function.get());
  auto [at, is_new] = p->memo->classes.try_emplace(id);
  if (!is_new) return at->second;
  try {
    const Ref object = checked(torch::autograd::functionToPyObject(const_cast<Node*>(node)->getptr()));
    const Ref told = checked(PyObject_CallOneArg(p->told_of.get(), object.get()));
    const auto is = [&](int i) { return PyTuple_GET_ITEM(told.get(), i) == Py_True; };
    NodeClass& made = p->memo->classes[id];
    made.name = borrowed(PyTuple_GET_ITEM(told.get(), 0)), made.why = borrowed(PyTuple_GET_ITEM(told.get(), 1));
    made.usual = is(2), made.searched = is(3), made.alias = is(4), made.clone = is(5);
    made.widens = is(6), made.joins = is(7), made.may_edit = is(8);
    return made;
  } catch (...) {
    p->memo->classes.erase(id);
    throw;
  }
}

// Whether a tensor of this version has the node's output, unedited. Throws if it may not, and is false if a node may
// have worked in place and does not show it; as search.py.
inline bool as_made(State* p, Node* node, uint32_t output, long version, int depth = 0) {
  namespace of = torch::autograd::generated;
  if (version == 0) return true;
  if (node == nullptr || depth > 20 || node->next_edges().empty()) throw Unusual();
  Registered known = registered(node, output);
  if (known.value) {
    PyObject* const value = known.value.get();
    const bool made = get(value, slots.as_made).get() == Py_True;
    const bool was_packed = get(value, slots.step).get() == Py_None || get(value, slots.layout).get() != Py_None;
    if (was_packed && (made || depth == 0)) {
      if (made && number(value, slots.version) == version) return true;
      throw Unusual();
    }
  }
  const auto& [producer, number_there] = node->next_edge(0);
  if (class_of(p, node).alias) return as_made(p, producer.get(), number_there, version, depth + 1);
  const SavedVariable* result = nullptr;
  if (const auto* const relu = as<of::ReluBackward0>(node)) result = &relu->result_;
  if (const auto* const sigmoid = as<of::SigmoidBackward0>(node)) result = &sigmoid->result_;
  bool in_place = false;
  if (result != nullptr) in_place = is_absent(result);  // it is being saved
  else if (const Fields& fields = fields_of(node); !fields.names.empty() && fields.names[0] == std::string("self")) {
    const Ref source = packed_by_hook(fields.of[0](node));
    const bool there = source && is_value(source.get()) && get(source.get(), slots.memory).get() == Py_None;
    in_place = there && get(source.get(), slots.copied_to_edit).get() == Py_True;
  }
  bool tells = true;
  if (class_of(p, node).may_edit && !in_place) {
    const InPlace seen = worked_in_place(*node);
    in_place = seen == InPlace::kYes, tells = seen != InPlace::kUnknown;
  }
  if (!in_place && tells) throw Unusual();
  return as_made(p, producer.get(), number_there, version - 1, depth + 1) && tells;
}

inline bool laid_out_as(const Kind& kind, const Tensor& t) {
  if (kind.device != t.device()) return false;
  return kind.dtype == t.scalar_type() && t.sizes() == c10::IntArrayRef(kind.sizes) && t.strides() == c10::IntArrayRef(kind.strides);
}

// The same tensor again; null if no value is known.
inline Ref again(State* p, PyObject* object, const Tensor& t, Registered& known) {
  if (!known.value) {
    if (known.is_packed) throw Unusual();
    return Ref();
  }
  PyObject* const value = known.value.get();
  if (!is_value(value) || number(value, slots.version) != static_cast<long>(t._version()) || !is_current(value)) throw Unusual();
  const Ref layout = layouts.of(object, t), before = get(value, slots.layout);
  if (layout.get() != before.get() && PyObject_RichCompareBool(layout.get(), before.get(), Py_EQ) != 1) throw Unusual();
  const bool rebuilt = get(value, slots.step).get() != Py_None && get(value, slots.memory).get() == Py_None;
  if (rebuilt && !matches(get(value, slots.sample).get(), t)) throw Unusual();
  // two calls save it: the arguments of neither count for the other
  if (const Ref call = get(value, slots.call); call.get() != Py_None && call.get() != call_of(p)) set(value, slots.call, Py_None);
  use(value);
  return std::move(known.value);
}

inline Ref held(State* p, const Tensor& t, PyObject* name) {
  const Ref bare = checked(THPVariable_Wrap(t.detach()));
  return new_value(bare.get(), t._version(), Py_None, name);
}

// Whether it is made of what was copied for it. The ledger counts that.
inline bool has_copied_part(PyObject* root) {
  PyObject* const inputs = field_of(root, kInputs);
  for (Py_ssize_t i = 0; inputs != nullptr && i < PyTuple_GET_SIZE(inputs); ++i)
    if (is_copied_part(PyTuple_GET_ITEM(inputs, i))) return true;
  return false;
}

inline Ref rebuilt(State* p, const Kind& kind, Match& match, PyObject* object, const Tensor& t, const NodeClass& of) {
  const Ref order = checked(order_of(p));
  match.provenance = p->provenance.get(), match.order = order.get();
  const Ref step = match.step();
  const Template& how = kind.templates[0];
  Ref value = new_value(Py_None, t._version(), step.get(), of.name.get());
  static auto* const empties = new std::unordered_map<int, Tensor>();  // never destroyed: CUDA is gone before that
  Tensor& empty = (*empties)[static_cast<int>(t.scalar_type()) * 256 + (t.is_cpu() ? 255 : t.device().index())];
  if (!empty.defined()) empty = at::empty({0}, t.options().requires_grad(false));
  set(value.get(), slots.watch, out_of_circles(checked(THPVariable_Wrap(sharing_version(t, empty)))));
  set(value.get(), slots.sample, sample_of(t));
  set(value.get(), slots.shape, how.shape), set(value.get(), slots.dtype, how.dtype);
  set(value.get(), slots.seconds, kind.seconds);
  if (how.products != 0) set_number(value.get(), slots.products, how.products);
  match.record_made();
  PyObject* const root = root_of(value.get());
  if (has_copied_part(root)) {
    PyObject* const given[] = {p->ledger.get(), value.get(), object};
    checked(PyObject_VectorcallMethod(names().rebuilds, given, 3, nullptr));
  } else {
    set(root, slots.frees, checked(PyLong_FromSize_t(t.storage().nbytes())));
    in_ledger(p, value.get());
  }
  return value;
}

// Why a tensor is kept when the last pass searched for its like in vain, as packing.py; null if it must be searched.
struct Vain {
  Ref order, seen_as, why;

  void note(State* p, PyObject* value) const {
    if (!why) return;
    PyObject* const noted[] = {p->vain.get(), order.get(), seen_as.get(), value};
    checked(PyObject_VectorcallMethod(names().again, noted, 4, nullptr));
  }
};
inline Vain in_vain(State* p, PyObject* object, const Tensor& t, const NodeClass& of) {
  const Ref layout = layouts.of(object, t);
  Vain found{checked(order_of(p)), checked(PyTuple_Pack(2, of.name.get(), layout.get())), Ref()};
  PyObject* const asked[] = {p->vain.get(), found.order.get(), found.seen_as.get()};
  found.why = checked(PyObject_VectorcallMethod(names().told, asked, 3, nullptr));
  if (found.why.get() == Py_None) throw Unusual();
  return found;
}

// What a kept tensor gives access to (a view its base, a concatenation its parts) is registered; as _offers.
inline void offer(State* p, PyObject* value, PyObject* object, const Tensor& t, Node* node, const NodeClass& of) {
  if (!of.joins) {
    const Tensor base(t._base());
    const auto& producer = base.grad_fn();
    if (!producer || producer.get() == node) return;
    const Registered known = registered(producer.get(), base.output_nr());
    if (known.value) return;
    const NodeClass& by = class_of(p, producer.get());
    if (by.usual && !known.is_packed && base._version() == 0 && requires_no_more(base)) {
      const Ref whole = held(p, base, by.name.get()), order = checked(order_of(p));
      set(whole.get(), slots.provenance, p->provenance), set(whole.get(), slots.order, order);
      set(whole.get(), slots.seen_at, get(value, slots.seen_at)), set(whole.get(), slots.sample, sample_of(base));
      set(value, slots.whole, whole);
      return record(producer.get(), base.output_nr(), checked(PyWeakref_NewRef(whole.get(), nullptr)));
    }
  }
  set_number(p->packing.get(), names().seen, p->seen);
  const Ref of_python = checked(torch::autograd::functionToPyObject(node->getptr()));
  PyObject* const given[] = {p->packing.get(), value, object, of_python.get(), of.name.get()};
  checked(PyObject_VectorcallMethod(names()._offers, given, 5, nullptr));
}

// What the plan that the pass follows decides for a tensor; as Following.rebuilds. Throws if it was made for another.
struct Planned {
  Ref call;  // null without a plan
  bool rebuild = true;
  Ref why;  // it is kept unless it is rebuilt
};
inline Planned planned_of(State* p, PyObject* object, const Tensor& t, const NodeClass& of) {
  if (p->following.get() == Py_None || t.numel() < p->smallest) return {};
  const Ref made_for = get(p->plan.get(), names().made_for), rebuild = get(p->plan.get(), names().rebuild);
  const Ref calls = get(made_for.get(), names().calls), narrow = get(made_for.get(), names().narrow);
  const Py_ssize_t place = PyList_GET_SIZE(p->calls.get());
  if (place >= PyTuple_GET_SIZE(calls.get())) throw Unusual();
  const Ref layout = layouts.of(object, t), at = checked(PyLong_FromSsize_t(place));
  PyObject *const seen = layout.get(), *const before = PyTuple_GET_ITEM(calls.get(), place);
  const Ref number = checked(PyLong_FromLong(p->seen));
  const Ref call = checked(PyTuple_Pack(5, of.name.get(), PyTuple_GET_ITEM(seen, 0), PyTuple_GET_ITEM(seen, 1), PyTuple_GET_ITEM(seen, 2), number.get()));
  if (PyObject_RichCompareBool(call.get(), before, Py_EQ) != 1 || PySet_Contains(narrow.get(), at.get()) != 0) throw Unusual();
  const bool again = PyTuple_GET_ITEM(rebuild.get(), place) == Py_True;
  const Ref whys = again ? Ref() : get(made_for.get(), names().whys);
  PyObject* const why = again ? nullptr : PyDict_GetItemWithError(whys.get(), at.get());
  return {borrowed(before), again, borrowed(why == nullptr ? p->planned.get() : why)};
}
inline void note_call(State* p, const Planned& plan) {
  if (plan.call && PyList_Append(p->calls.get(), plan.call.get()) != 0) throw Unusual();
}
// If a step that reads this value must be compared, it finds the tensor, as long as that is alive; as
// Packing._remember.
inline void remember(State* p, PyObject* value, PyObject* object, bool is_held) {
  set(value, slots.place, checked(PyLong_FromSsize_t(PyList_GET_SIZE(p->calls.get()))));
  if (is_held) return;
  set(value, slots.seen, checked(PyWeakref_NewRef(object, nullptr)));
  const Ref recent = get(p->packing.get(), names().recent);
  checked(PyObject_CallMethodOneArg(recent.get(), names().append, object));
}

// The kind of this save, with what it matched; null if none is known.
inline std::shared_ptr<const Kind> kind_of(State* p, const Tensor& t, Node* node, std::optional<Match>& match) {
  const uint32_t output = t.output_nr(), version = t._version();
  const bool newest = node->sequence_nr() + 1 == p->now.next;
  const void* const type = class_id(node);
  const auto found = p->memo->kinds.find(key_of(type, output, version, newest, t));
  if (found == p->memo->kinds.end()) return nullptr;
  const auto kinds = found->second;  // kept: Python may learn more meanwhile
  for (const auto& kind : *kinds) {
    if (kind->type != type || kind->output != output || kind->version != version) continue;
    if (kind->newest != newest || !laid_out_as(*kind, t)) continue;
    match.emplace(p->now, *kind, t);
    if (match->holds()) return kind;
  }
  return nullptr;
}

// What a node has returned.
inline Ref of_node(State* p, PyObject* object, const Tensor& t, Node* node) {
  const uint32_t output = t.output_nr();
  const NodeClass& of = class_of(p, node);
  if (!of.usual) throw Unusual();
  Registered known = registered(node, output);
  const Planned plan = planned_of(p, object, t, of);
  if (Ref value = again(p, object, t, known)) return note_call(p, plan), std::move(value);
  const long version = t._version(), size = t.numel();
  const bool edited = views_edited_leaf(t, node, of, version);
  const bool is_sure = edited || as_made(p, node, output, version);
  const bool large = size >= p->smallest;
  const long whole = t.is_view() ? t.storage().nbytes() / t.element_size() : size;  // which a view would keep alive
  const bool worth = large && (p->everything || whole * p->much_larger > std::max(p->largest, size));
  Ref value, why;  // it is rebuilt, or kept for a reason
  Vain vain;
  std::shared_ptr<const Kind> kind;
  std::optional<Match> match;
  call_of(p);
  if (edited) why = borrowed(p->edited.get());
  else if (!(worth && of.searched)) why = borrowed(worth ? of.why.get() : large ? p->smaller.get() : nullptr);
  else if (plan.rebuild && is_sure && (kind = kind_of(p, t, node, match))) {
    if (kind->templates.empty()) why = borrowed(kind->why.get());
    else value = rebuilt(p, *kind, *match, object, t, of);
  } else if (of.widens) throw Unusual();
  else if (!plan.rebuild && of.alias && follows_rebuilt(node)) throw Unusual();
  else if (!plan.rebuild) why = borrowed(plan.why.get());
  else vain = in_vain(p, object, t, of), why = borrowed(vain.why.get());
  const Template* const how = value ? &kind->templates[0] : nullptr;
  if (!value) value = held(p, t, of.name.get());
  if (why) set(value.get(), slots.why, why);
  vain.note(p, value.get());
  if (edited || !is_sure) set(value.get(), slots.as_made, Py_False);
  const bool is_held = get(value.get(), slots.step).get() == Py_None;
  const bool counts = !(t.is_view() && is_leaf_or_parameter(t._base()));
  Ref sample = is_held ? sample_of(t) : get(value.get(), slots.sample);
  if (is_held) set(value.get(), slots.sample, sample);
  if (is_held && counts) in_ledger(p, value.get());
  if (large) p->largest = std::max(p->largest, size);
  set(value.get(), slots.layout, layouts.of(object, t));
  set(value.get(), slots.seen_at, checked(PyLong_FromUnsignedLongLong(p->now.next)));
  if (of.clone && node->sequence_nr() + 1 == p->now.next) set(value.get(), slots.copied_to_edit, Py_True);
  if (p->call.get() != Py_None) set(value.get(), slots.call, p->call);
  if (plan.call) remember(p, value.get(), object, is_held);
  record_packed(node, output, value.get(), sample.get());
  if (is_held && large && !edited && is_sure && (t.is_view() || of.joins)) offer(p, value.get(), object, t, node, of);
  if (how != nullptr) {
    if (!how->sort) how->sort = checked(PyObject_CallOneArg(p->sorter.get(), value.get()));
    else set(value.get(), slots.sort, how->sort);
  }
  note_call(p, plan);
  return finished(p, std::move(value));
}

// Whether it is an ordinary tensor, packed in the thread where this pass began.
inline bool is_usual(State* p, PyObject* object) {
  if (!THPVariable_CheckExact(object) || at::RecordFunction::currentThreadId() != p->now.thread) return false;
  if (at::impl::torch_function_mode_enabled() || c10::impl::TorchDispatchModeTLS::any_modes_set()) return false;
  return plain_thread() && requires_no_more(THPVariable_Unpack(object));
}

inline PyObject* by_packing(State* p, PyObject* object) {
  try {
    set_number(p->packing.get(), names().seen, p->seen - 1), set_number(p->packing.get(), names()._largest, p->largest);
    if (p->now.saved_too != nullptr) {
      const Ref next = checked(PyLong_FromUnsignedLongLong(p->now.next));
      const Ref node = checked(torch::autograd::functionToPyObject(p->now.saved_too->getptr()));
      set(p->packing.get(), names().last, checked(PyTuple_Pack(2, next.get(), node.get())));
    }
    Ref value = checked(PyObject_CallOneArg(p->pack.get(), object));
    p->largest = number(p->packing.get(), names()._largest);
    if (p->following.get() != Py_None) p->plan = get(p->following.get(), names().plan);
    return value.release();
  } catch (const Unusual&) {
    return nullptr;
  }
}

inline PyObject* pack(PyObject* self, PyObject* object) {
  HANDLE_TH_ERRORS
  const Unwatched unwatched;
  State* const p = reinterpret_cast<PassObject*>(self)->state;
  ++p->seen, p->now.saved_too = nullptr;
  try {
    const bool has_goal = p->following.get() != Py_None && p->plan.get() == Py_None;  // a plan is made from the pass
    if (!has_goal && is_usual(p, object)) {
      p->now.next = at::sequence_number::peek();
      const Tensor t = THPVariable_Unpack(object);
      if (flags_as_before(p)) {
        const auto& node = t.grad_fn();
        if (node && p->last_of == p->now.next) p->now.saved_too = p->last;
        if (node) p->last = node.get(), p->last_of = p->now.next;
        return (node ? of_node(p, object, t, node.get()) : without_node(p, object, t)).release();
      }
    }
  } catch (const Unusual&) {
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) return nullptr;
    PyErr_Clear();
  } catch (const std::exception&) {  // an operator's error: Python will raise it, or not need it
  }
  return by_packing(p, object);
  END_HANDLE_TH_ERRORS
}

}  // namespace leannorm
