// The saved-tensor hooks: a node keeps a tensor's value in the log instead of the tensor, and reads it back.
#pragma once

#include "freed.h"
#include "limit.h"
#include "recorder.h"
#include "softmax_rows.h"

#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>

#include <typeinfo>

namespace leannorm::recording {

// What a node keeps instead of a tensor: a value with the sizes and strides of a view, or the tensor itself.
struct SavedObject {
  PyObject_HEAD
  std::shared_ptr<Log> log;
  std::optional<Geometry> geometry;  // none: as the value was made
  std::optional<c10::VariableVersion> counter;
  Tensor tensor, original;  // the tensor itself, if it is kept; under verify, what a rebuild is compared with
  std::shared_ptr<const Other> other;
  py::object spec, layer;   // how ranks share the DTensor, if the value is its local tensor; the layer that saved it
  uint32_t version;
  int value, pass, backward_passes;  // backward_passes: how many the pass had seen when the tensor was saved
};

inline void check_version(const SavedObject& s) {
  if (!s.counter || s.counter->current_version() == s.version) return;
  const auto sizes = s.tensor.defined() ? s.tensor.sizes() : s.geometry ? c10::IntArrayRef(s.geometry->sizes) : c10::IntArrayRef(s.log->values[s.value].made.sizes);
  TORCH_CHECK(false, "one of the variables needed for gradient computation has been modified by an inplace operation: [tensor of shape ",
              sizes, "] is at version ", s.counter->current_version(), "; expected version ", s.version,
              " instead. leannorm.lean() needs it for the backward pass: edit a copy of it, or edit it after backward().");
}

inline std::atomic<int64_t> alive = 0;  // tensors that nodes have saved, in all passes

inline void forget_saved(PyObject* self) {
  --alive;
  auto* const s = reinterpret_cast<SavedObject*>(self);
  if (s->log && s->value >= 0) {
    const Log::Lock lock(*s->log);
    if (const auto leaves = s->log->leaves.find(s->value); leaves != s->log->leaves.end()) {
      std::erase(leaves->second, &s->tensor);
      if (leaves->second.empty()) s->log->leaves.erase(leaves);
    }
    --s->log->values[s->value].saves, --s->log->alive;
    Log::Alive& of_pass = s->log->alive_of[s->pass];
    --of_pass.now, of_pass.then -= s->backward_passes < of_pass.backward_passes;
    remove_reader(*s->log, s->value);
    if (s->log->alive == 0 && s->log->spent) s->log->spent->end();
  }
  s->~SavedObject();
  Py_TYPE(self)->tp_free(self);
}
inline PyTypeObject saved_type = {PyVarObject_HEAD_INIT(nullptr, 0) "leannorm.Saved", sizeof(SavedObject)};

inline PyObject* new_saved() {
  auto* const s = saved_type.tp_alloc(&saved_type, 0);
  if (s == nullptr) throw python_error();
  auto* const made = reinterpret_cast<SavedObject*>(s);
  new (&made->log) std::shared_ptr<Log>(), new (&made->geometry) std::optional<Geometry>(), new (&made->counter) std::optional<c10::VariableVersion>();
  new (&made->tensor) Tensor(), new (&made->original) Tensor(), new (&made->other) std::shared_ptr<const Other>(), new (&made->spec) py::object(), new (&made->layer) py::object();
  made->value = -1;
  ++alive;
  return s;
}

// Whether the tensor is a parameter, also a frozen one, or a view of one: that memory exists without autograd.
inline bool is_parameter(const Tensor& t) {
  const Tensor base = base_of(t);
  if (!base.is_leaf() || base.requires_grad()) return base.is_leaf();
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(base));
  PyTypeObject* const type = Py_TYPE(object.ptr());
  if (THPVariable_CheckTypeExact(type)) return type == reinterpret_cast<PyTypeObject*>(ParameterClass);  // isinstance() would run Python
  const int is = PyObject_IsInstance(object.ptr(), ParameterClass);
  if (is < 0) throw py::error_already_set();
  return is == 1;
}

// The functions that saving/cpp_log.py sets, and C++ calls.
struct OfPython {
  py::object others, nbytes;       // unpacks what small passes have packed; bytes of a tensor on this rank
  py::object in_rows, unbuilt;     // whether a log-softmax's gradient has the same bits by rows; a stand-in for a dropped tensor, or None
  std::unordered_set<std::string> read_rows, may_wait;  // nodes that get a stand-in for a log-softmax, and for a large tensor
  py::object local, spec, shared;  // a DTensor's local tensor, or None; how ranks share it; the DTensor of these two
  py::object compare;              // compare(rebuilt, original, name, layer) raises if they differ
};
inline OfPython& python() {
  static auto* const set = new OfPython();
  return *set;
}

// Gives the waiting values to the innermost pass's hooks, which run without the log's lock.
inline void hand_over(Log& log) {
  if (log.asked.empty() || log.to_move.empty()) return;
  const auto asked = log.asked.back();
  if (asked->hold.is_none()) return log.to_move.clear();
  {
    const Log::Lock lock(log);  // the log cannot see which memory a call writes through a transform's tensor
    if (std::any_of(log.open.begin(), log.open.end(), [&log](int one) { return !log.calls[one].rule->writes.empty(); })) return;
  }
  for (size_t i = 0; i < log.to_move.size();) {
    const int v = log.to_move[i];
    Tensor given;
    {
      const Log::Lock lock(log);
      const Value& x = log.values[v];
      if ((x.call >= 0 && std::find(log.open.begin(), log.open.end(), x.call) != log.open.end()) || log.memories[x.memory].writer >= 0) {
        ++i;  // the value is being written
        continue;
      }
      log.to_move.erase(log.to_move.begin() + static_cast<int64_t>(i));
      const int64_t item = static_cast<int64_t>(c10::elementSize(x.made.dtype));
      if (x.saves == 0 && log.following.back()->chooses) continue;  // the plan has no place for it
      if (x.refs == 0 || x.elsewhere || x.state != Value::kHeld || x.copied || x.lost || x.shown.defined() || !log.is_there(v) || x.storage_bytes % item != 0) continue;
      Geometry as = x.made;
      if (!as.fills(x.storage_bytes)) as.sizes = {x.storage_bytes / item}, as.strides = {1}, as.offset = 0;
      given = over(x.held.storage(), as);
    }
    Elsewhere made{py::none(), given.storage().getWeakStorageImpl()};
    {
      const Busy unseen;
      const at::AutoGradMode mode(false);
      made.bring = asked->hold(given);
    }
    if (made.bring.is_none()) continue;
    const Log::Lock lock(log);
    Value& x = log.values[v];
    if (x.refs == 0 || x.state != Value::kHeld) continue;
    if (!x.sample.taken) x.sample = sample_of(x, given);
    const Below below(x.made.fake);
    x.held = at::empty({0}, given.options()), x.elsewhere = of_python(std::move(made));
  }
}

// Saves the tensor by its value. `whole`: what the node saves, of which `t` is this rank's part.
inline void save(SavedObject& s, const Tensor& t, const Tensor& whole) {
  Log& log = *current;
  const Log::Lock lock(log);
  if (!log.limit) encode_freed(log);  // a limit decides later what is encoded
  int v = log.value_of(t);
  if (v < 0) v = log.new_memory(t, log.open.empty() || log.is_in_subclass() ? -1 : log.open.back());
  if (Value& x = log.values[v]; x.code) x.held = over(t.storage(), x.made), x.code.reset(), x.copied = false;  // otherwise both would be kept
  if (log.values[v].copied) {  // the copy is for rebuilds; this node reads the memory itself, as in plain PyTorch
    s.tensor = whole.grad_fn() ? alias_of(t) : t;
    return;
  }
  if (!log.values[v].made.is_of(t)) s.geometry = Geometry::of(t);
  if (!log.open.empty())
    for (Read& read : log.calls[log.open.back()].reads) read.saved |= read.value == v;
  s.log = current, s.value = v, s.pass = static_cast<int>(log.following.back()->number);
  s.backward_passes = log.alive_of[s.pass].backward_passes, ++log.alive_of[s.pass].now;
  Value& x = log.values[v];
  ++x.saves, ++x.refs, ++x.left, ++log.alive;
  x.waits = !log.limit && !s.spec && x.storage_bytes >= waits_from * (is_on_device(x.made) ? 8 : 1);
  if (!x.listed && !x.parameter) {
    x.parameter = is_parameter(whole);
    if (!x.parameter) x.listed = true, x.number = static_cast<int>(log.listed.size()), log.listed.push_back(v);
  }
  const bool movable = !x.parameter && !log.asked.back()->hold.is_none() && t.numel() >= log.policy.smallest && (whole.grad_fn() || !log.following.back()->chooses);
  const bool leaf = !whole.grad_fn() && !movable;  // autograd reads a leaf in the backward pass, even if its data was replaced
  if (leaf) s.tensor = t;
  if (leaf && !s.spec) log.leaves[v].push_back(&s.tensor);
  const bool planned = log.following.back()->has_place(log, x, whole), drops = !planned || log.following.back()->drops(log, x, t);
  if (log.may_plan) note_save(log, planned, v, whole);
  if (!drops) keep(log, v, t, log.following.back()->cause);
  const bool shows_more = s.geometry && s.geometry->extent() > x.made.extent();
  if (x.state == Value::kDropped) {
    if (shows_more && !leaf) s.tensor = alias_of(t);
    else if (!are_filled(log, v)) hold_again(log, v, alias_of(t));
    return;
  }
  if (!x.held.defined()) x.held = alias_of(t), x.state = Value::kHeld;
  if (shows_more) x.call = -1;  // it shows more memory than its call made
  if (movable && (!log.following.back()->chooses || log.following.back()->moves)) log.to_move.push_back(v);
  if (!leaf && log.limit && !is_on_device(x.made)) return log.limit->saved(log, x.storage_bytes);
  if (log.limit && is_on_device(x.made)) log.meets(kBeyondLimit);
  const bool waits = !log.open.empty() && x.call == log.open.back();
  x.takes = planned ? log.following.back()->takes : nullptr;
  const bool decides = !leaf && drops;
  if (waits && decides) log.calls[x.call].waiting.push_back(v);
  else if (decides) decide(log, v);
  if (Value& made = log.values[v]; made.why == Why::kNotAtHand && is_made_by_checkpoint(whole)) made.why = Why::kCheckpointed;
  wait_for(log, v);
  if (leaf || s.spec || !may_be_in_rows(log, log.values[v])) return;
  const Below below;
  const bool fits = python().in_rows(py::reinterpret_steal<py::object>(THPVariable_Wrap(whole)), log.first->flags).cast<bool>();
  log.values[v].in_rows = fits;
}

// What the pass reports of a tensor that is kept and that the log cannot read; null for a parameter.
inline std::shared_ptr<const Other> other_of(Log& log, PyObject* given) {
  const py::object told = log.asked.back()->other(py::handle(given));
  if (told.is_none()) return nullptr;
  const auto [sizes, place, nbytes] = py::cast<std::tuple<std::vector<int64_t>, int64_t, int64_t>>(told);
  const auto made = std::make_shared<const Other>(Other{sizes, THPVariable_Unpack(given).scalar_type(), place, nbytes});
  const Log::Lock lock(log);
  log.others.push_back(made);
  return made;
}

// The pack hook.
inline PyObject* pack(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  const Recording timed;
  const Tensor& t = THPVariable_Unpack(given);
  auto owned = py::reinterpret_steal<py::object>(new_saved());
  PyObject* const object = owned.ptr();
  auto& s = *reinterpret_cast<SavedObject*>(object);
  if (!t.is_inference()) s.counter = t.unsafeGetTensorImpl()->version_counter(), s.version = t._version();
  if (current) ++current->packs;
  Tensor local = t;  // this rank's part
  bool keeps = !current || busy || current->failed || (t.is_leaf() && t.requires_grad());
  if (!keeps && !plain(t)) {
    const auto own = current->subclasses && t.key_set().has(c10::DispatchKey::Python) ? python().local(py::handle(given)) : py::none();
    if (!own.is_none()) local = py::cast<Tensor>(own), s.spec = python().spec(py::handle(given));
    keeps = !plain(local);
    if (keeps) s.other = other_of(*current, given);
  }
  if (keeps) {
    if (current && current->limit && t.is_leaf()) current->limit->reads_parameter(t);
    if (current && !busy && t.is_leaf() && !t.device().is_cpu() && plain(t)) {
      const Log::Lock lock(*current);
      if (const int v = current->value_of(t); v >= 0) current->values[v].pinned = true;
    }
    s.tensor = t.grad_fn() ? t.detach() : t;
    return owned.release().ptr();
  }
  const auto asked = current->asked.back();
  if (!asked->layer.is_none()) s.original = alias_of(local), s.layer = asked->layer();
  const auto log = current;
  try {
    save(s, local, t);
  } catch (const std::exception&) {  // the node keeps the tensor, as in plain PyTorch
    log->meets(kFailed);
    log->failed = true, s.tensor = alias_of(local);
  }
  if (s.tensor.defined() && s.spec) s.tensor = t.grad_fn() ? t.detach() : t;
  hand_over(*log);
  return owned.release().ptr();
  END_HANDLE_TH_ERRORS
}

// Whether a user's autograd function reads the tensor, which may write into it.
inline bool read_by_user() {
  const auto node = torch::autograd::get_current_node();
  if (!node) return false;
  const char* const type = typeid(*node).name();
  if (std::strstr(type, "CppNode") != nullptr) return true;
  if (std::strstr(type, "PyNode") == nullptr) return false;
  const auto function = py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(node));
  const py::object forward = py::getattr(py::type::handle_of(function), "_forward_cls", py::none());
  const py::object module = py::getattr(forward, "__module__", py::str(""));
  return std::string(py::str(module)).rfind("leannorm.", 0) != 0;
}

// Whether the value is rebuilt from what a user's hooks returned, which may differ from what they were given.
inline bool is_of_others(const Log& log, int v) {
  std::unordered_set<int> looked;
  std::vector<int> left{v};
  while (!left.empty()) {
    const int one = left.back();
    left.pop_back();
    if (!looked.insert(one).second) continue;
    const Value& x = log.values[one];
    if (x.elsewhere && x.elsewhere->is_other) return true;
    if (x.state == Value::kDropped) for_inputs(log, log.calls[x.call], [&](int in) { left.push_back(in); });
  }
  return false;
}

// A copy with the same strides: kernels may compute other bits from another layout.
inline Tensor copy_for_user(const Tensor& t) {
  return t.is_non_overlapping_and_dense() ? t.clone() : copy_of(t, Geometry::of(t));
}

inline Tensor rebuilt(SavedObject& s) {
  Log& log = *s.log;
  Value& x = log.values[s.value];
  const bool dropped = x.state == Value::kDropped, read_back = x.code != nullptr;
  Tensor t;
  if (x.shown.defined()) t = x.shown;
  else if (x.elsewhere) {
    if (x.rebuilt.defined()) share(x.rebuilt, x.made, x.rebuilt_on);
    else x.rebuilt = Replay(log).brought(s.value), x.rebuilt_on = stream_of(x.made);
    t = x.rebuilt;
  }
  else {
    if (x.held.defined() && !x.code) share(x.held, x.made, x.on);
    t = x.held.defined() && !x.code ? x.held : Replay(log).value(s.value);  // a kept tensor is not checked: in plain PyTorch, too, an unseen edit of it is no error
    TORCH_CHECK(!dropped || s.original.defined() || log.values[s.value].sample.matches(t) || is_of_others(log, s.value), "leannorm.lean(): an output of ",
                log.calls[log.values[s.value].call].rule->name, " of shape ", t.sizes(), " was rebuilt, but is not what the forward"
                " pass saved: a tensor that it is computed from was edited outside of torch, for example through NumPy. Edit a"
                " copy of it, or leave lean() out of this part");
  }
  Replay(log).used(s.value);
  t = shown(t, s.geometry ? *s.geometry : log.values[s.value].made);
  if (dropped && s.original.defined())
    python().compare(t, s.original, log.calls[log.values[s.value].call].rule->name, s.layer);
  return (dropped || read_back || log.values[s.value].elsewhere) && read_by_user() ? copy_for_user(t) : t;
}

// A backward pass may begin before the open passes close. They note what it is going to free.
inline void backward_begins(Log& log) {
  const int task = torch::autograd::get_current_graph_task_id();
  const Log::Lock lock(log);
  if (task < 0 || task == log.task || log.packs == log.noted_packs) return;
  log.task = task, log.noted_packs = log.packs;
  for (Follower* const one : log.following) one->note();
}

// The saved tensor.
inline Tensor read(SavedObject& s) {
  const at::AutoGradMode mode(false);
  const auto spent = s.log->spent;
  const Adding time(spent && s.log->values[s.value].state == Value::kDropped ? &spent->rebuilding : nullptr);
  Tensor t = rebuilt(s);
  if (const auto limit = s.log->limit) limit->reads(s.log->values[s.value].storage_bytes);
  return t;
}

// A tensor without memory for the node that reads now, or None; `x` is the saved value.
inline py::object stand_in_for(const SavedObject& s, const Value& x, PyObject* given) {
  if (x.state != Value::kDropped || x.made.fake || s.original.defined() || x.shown.defined() || s.spec) return py::none();
  const bool in_rows = x.in_rows && !s.geometry && !x.rebuilt.defined() && flags_now() == s.log->flags;  // rows are computed under the current flags
  if (!in_rows && !x.waits) return py::none();
  const auto node = torch::autograd::get_current_node();
  if (!node || (in_rows ? python().read_rows : python().may_wait).count(node->name()) == 0) return py::none();
  const Geometry& as = s.geometry ? *s.geometry : x.made;
  const auto list = [](const auto& of) { return py::cast(std::vector<int64_t>(of.begin(), of.end())); };
  return python().unbuilt(py::handle(given), list(as.sizes), list(as.strides), dtype_of(as.dtype), py::cast(as.device));
}

// The tensor of a pair (tensor, version), which passes that are not recorded have packed; null if Python has to read it, or to
// raise autograd's error of an edit.
inline PyObject* kept_in(PyObject* given) {
  if (!PyTuple_CheckExact(given) || PyTuple_GET_SIZE(given) != 2) return nullptr;
  PyObject* const tensor = PyTuple_GET_ITEM(given, 0);
  const bool is_same = THPVariable_CheckExact(tensor) && THPVariable_Unpack(tensor)._version() == PyLong_AsLongLong(PyTuple_GET_ITEM(given, 1));
  return is_same ? Py_NewRef(tensor) : nullptr;
}

// The unpack hook.
inline PyObject* unpack(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  if (Py_TYPE(given) != &saved_type) {
    PyObject* const kept = kept_in(given);
    return kept != nullptr ? kept : PyObject_CallOneArg(python().others.ptr(), given);
  }
  auto& s = *reinterpret_cast<SavedObject*>(given);
  check_version(s);
  if (s.log && !s.log->closed) backward_begins(*s.log);
  if (s.tensor.defined()) return THPVariable_Wrap(s.tensor);
  const Log::Lock lock(*s.log);
  if (py::object made = stand_in_for(s, s.log->values[s.value], given); !made.is_none()) return made.release().ptr();
  const Tensor t = read(s);
  py::object tensor = s.spec ? python().shared(t, s.spec) : py::reinterpret_steal<py::object>(THPVariable_Wrap(t));
  return tensor.release().ptr();
  END_HANDLE_TH_ERRORS
}
// For saving/unbuilt.py: `read_now` returns the tensor, and whether nobody else has its memory; `skip` notes that a reader needs
// no rebuild, and `rows_of` returns what the rows are computed from, the casts in between, and where to note the time that they take.
inline PyObject* read_now(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  auto& s = *reinterpret_cast<SavedObject*>(given);
  const Log::Lock lock(*s.log);
  const Tensor t = read(s);
  const bool alone = s.log->values[s.value].state == Value::kDropped && t.use_count() == 1 && t.storage().use_count() == 1;
  return py::make_tuple(py::reinterpret_steal<py::object>(THPVariable_Wrap(t)), alone).release().ptr();
  END_HANDLE_TH_ERRORS
}
inline PyObject* skip(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  auto& s = *reinterpret_cast<SavedObject*>(given);
  const Log::Lock lock(*s.log);
  Replay(*s.log).used(s.value);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}
inline PyObject* rows_of(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  auto& s = *reinterpret_cast<SavedObject*>(given);
  const Log::Lock lock(*s.log);
  const at::AutoGradMode mode(false);
  const RowsSource source = source_of_rows(*s.log, s.value);
  Replay(*s.log).used(s.value);
  py::list casts;
  for (const at::ScalarType to : source.casts) casts.append(dtype_of(to));
  return py::make_tuple(py::reinterpret_steal<py::object>(THPVariable_Wrap(source.rows)), casts, s.log->spent).release().ptr();
  END_HANDLE_TH_ERRORS
}
inline PyMethodDef hooks[] = {{"skip", &skip, METH_O, nullptr}, {"rows_of", &rows_of, METH_O, nullptr}, {"pack", &pack, METH_O, nullptr}, {"unpack", &unpack, METH_O, nullptr}, {"read", &read_now, METH_O, nullptr}, {nullptr}};

}  // namespace leannorm::recording
