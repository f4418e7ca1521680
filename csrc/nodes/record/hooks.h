// Python's side of the log: a pass is opened and closed, and two functions are its saved-tensor hooks.
#pragma once

#include "../flags.h"
#include "limit.h"
#include "recorder.h"

#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>

#include <typeinfo>

namespace leannorm::recording {

// What a node keeps in the place of a tensor: a value as a view shows it, or a tensor that is kept as it is.
struct SavedObject {
  PyObject_HEAD
  std::shared_ptr<Log> log;
  std::optional<Geometry> geometry;  // none: as the value was made
  std::optional<c10::VariableVersion> counter;
  Tensor tensor, original;  // kept as it is; under verify, what a rebuild is compared with
  py::object spec, layer;   // how ranks share the DTensor whose local tensor the value is; the layer that saved it
  uint32_t version;
  int value;
};

inline void check_version(const SavedObject& s) {
  if (!s.counter || s.counter->current_version() == s.version) return;
  const auto sizes = s.tensor.defined() ? s.tensor.sizes() : s.geometry ? c10::IntArrayRef(s.geometry->sizes) : c10::IntArrayRef(s.log->values[s.value].made.sizes);
  TORCH_CHECK(false, "one of the variables needed for gradient computation has been modified by an inplace operation: [tensor of shape ",
              sizes, "] is at version ", s.counter->current_version(), "; expected version ", s.version,
              " instead. leannorm.lean() needs it for the backward pass: edit a copy of it, or edit it after backward().");
}

inline void forget_saved(PyObject* self) {
  auto* const s = reinterpret_cast<SavedObject*>(self);
  if (s->log && s->value >= 0) {
    const Log::Lock lock(*s->log);
    --s->log->values[s->value].saves, --s->log->alive;
    release(*s->log, s->value);
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
  new (&made->tensor) Tensor(), new (&made->original) Tensor(), new (&made->spec) py::object(), new (&made->layer) py::object();
  made->value = -1;
  return s;
}

// What saving/recorded.py does for C++.
struct OfPython {
  py::object with_flags;       // with_flags(flags, saved) sets the forward pass's flags and rebuilds
  py::object others;           // unpacks what small passes have packed
  py::object local, spec, shared;  // a DTensor's local tensor, or None; how ranks share it; the DTensor of the two
  py::object compare;          // compare(rebuilt, original, name, layer) raises where they differ
  py::object parameter;        // the class
};
inline OfPython& python() {
  static auto* const set = new OfPython();
  return *set;
}

// May a user's hooks hold it? No parameters, frozen ones neither.
inline bool is_movable(const Log& log, const Tensor& t) {
  if (log.asked.back()->hold.is_none() || t.numel() < log.policy.smallest || is_of_leaf(t)) return false;
  const auto of = py::reinterpret_steal<py::object>(THPVariable_Wrap(t.is_view() ? Tensor(t._base()) : t));
  return !py::isinstance(of, python().parameter);
}

// Values that wait for it are handed to the innermost pass's hooks, which run without the log's lock.
inline void hand_over(Log& log) {
  if (log.asked.empty() || log.to_move.empty()) return;
  const auto asked = log.asked.back();
  if (asked->hold.is_none()) return log.to_move.clear();
  for (size_t i = 0; i < log.to_move.size();) {
    const int v = log.to_move[i];
    Tensor given;
    {
      const Log::Lock lock(log);
      const Value& x = log.values[v];
      if ((x.call >= 0 && std::find(log.open.begin(), log.open.end(), x.call) != log.open.end()) || log.memories[x.memory].writer >= 0) {
        ++i;  // it is being written
        continue;
      }
      log.to_move.erase(log.to_move.begin() + static_cast<int64_t>(i));
      const int64_t item = static_cast<int64_t>(c10::elementSize(x.made.dtype));
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
    if (!x.sample.taken) x.sample = Sample::of(given);
    const Below below;
    x.held = at::empty({0}, given.options()), x.elsewhere = of_python(std::move(made));
  }
}

// Save the tensor by its value.
inline void save(SavedObject& s, const Tensor& t, const Tensor& whole) {
  Log& log = *current;
  const Log::Lock lock(log);
  int v = log.value_of(t);
  if (v < 0) v = log.new_memory(t, log.open.empty() || log.is_in_subclass() ? -1 : log.open.back());
  if (log.values[v].copied) {  // for others; this node reads the memory itself, as in plain PyTorch
    s.tensor = whole.grad_fn() ? alias_of(t) : t;
    return;
  }
  if (!log.values[v].made.is_of(t)) s.geometry = Geometry::of(t);
  s.log = current, s.value = v;
  Value& x = log.values[v];
  ++x.saves, ++x.refs, ++x.left, ++log.alive;
  if (!x.listed && !is_of_leaf(whole)) x.listed = true, log.listed.push_back(v);
  const bool movable = is_movable(log, whole);
  if (!whole.grad_fn() && !movable) s.tensor = t;  // autograd reads what it holds in the backward pass, also where its data is replaced
  const bool shows_more = s.geometry && s.geometry->extent() > x.made.extent();
  if (x.state == Value::kDropped) {
    if (shows_more && !s.tensor.defined()) s.tensor = alias_of(t);
    else if (!are_filled(log, v)) hold_again(log, v, alias_of(t));
    return;
  }
  if (!x.held.defined()) x.held = alias_of(t), x.state = Value::kHeld;
  if (shows_more) x.call = -1;  // other memory than its call has made
  if (movable) log.to_move.push_back(v);
  if (s.tensor.defined()) return;
  if (log.limit) log.limit->saved(log, x.storage_bytes);
  else if (!log.open.empty() && x.call == log.open.back()) log.calls[x.call].waiting.push_back(v);
  else decide(log, v);
}

// The pack hook.
inline PyObject* pack(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  const Tensor& t = THPVariable_Unpack(given);
  auto owned = py::reinterpret_steal<py::object>(new_saved());
  PyObject* const object = owned.ptr();
  auto& s = *reinterpret_cast<SavedObject*>(object);
  if (!t.is_inference()) s.counter = t.unsafeGetTensorImpl()->version_counter(), s.version = t._version();
  Tensor local = t;  // of this rank
  bool keeps = !current || busy || (t.is_leaf() && t.requires_grad());
  if (!keeps && !plain(t)) {
    const auto own = current->subclasses && t.key_set().has(c10::DispatchKey::Python) ? python().local(py::handle(given)) : py::none();
    if (!own.is_none()) local = py::cast<Tensor>(own), s.spec = python().spec(py::handle(given));
    keeps = !plain(local);
  }
  if (keeps) {
    if (current && current->limit && t.is_leaf()) current->limit->reads_parameter(t);
    s.tensor = t.grad_fn() ? t.detach() : t;
    return owned.release().ptr();
  }
  const auto asked = current->asked.back();
  if (!asked->layer.is_none()) s.original = alias_of(local), s.layer = asked->layer();
  const auto log = current;
  save(s, local, t);
  if (s.tensor.defined() && s.spec) s.tensor = t.grad_fn() ? t.detach() : t;
  hand_over(*log);
  return owned.release().ptr();
  END_HANDLE_TH_ERRORS
}

// Is the reader a function of a user's, which may write into what it is given?
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

// Is it made of what a user's hooks have brought from elsewhere, as they give it?
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

inline Tensor rebuilt(SavedObject& s) {
  Log& log = *s.log;
  Value& x = log.values[s.value];
  const bool dropped = x.state == Value::kDropped;
  Tensor t;
  if (x.shown.defined()) t = x.shown;
  else if (x.elsewhere) t = x.rebuilt.defined() ? x.rebuilt : x.rebuilt = Replay(log).brought(s.value);
  else {
    t = x.held.defined() ? x.held : Replay(log).value(s.value);  // a node's own tensor may be edited unseen, as in plain PyTorch
    TORCH_CHECK(!dropped || s.original.defined() || log.values[s.value].sample.matches(Sample::of(t)) || is_of_others(log, s.value), "leannorm.lean(): an output of ",
                log.calls[log.values[s.value].call].rule->name, " of shape ", t.sizes(), " was rebuilt, and is not what the forward"
                " pass saved: what it was made of was edited where no operator was called (through its memory). Edit a copy of it,"
                " or leave lean() out of this part");
  }
  Replay(log).used(s.value);
  t = shown(t, s.geometry ? *s.geometry : log.values[s.value].made);
  if (dropped && s.original.defined())
    python().compare(t, s.original, log.calls[log.values[s.value].call].rule->name, s.layer);
  return (dropped || log.values[s.value].elsewhere) && read_by_user() ? t.clone() : t;
}

// The unpack hook; `unpack_now` is called where the flags are the forward pass's.
template <bool kNow> PyObject* unpack(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  if (Py_TYPE(given) != &saved_type) return PyObject_CallOneArg(python().others.ptr(), given);
  auto& s = *reinterpret_cast<SavedObject*>(given);
  check_version(s);
  if (s.tensor.defined()) return THPVariable_Wrap(s.tensor);
  const Log::Lock lock(*s.log);
  const Value& x = s.log->values[s.value];
  if (!kNow && x.state == Value::kDropped && !x.rebuilt.defined() && flags_now() != s.log->flags)
    return python().with_flags(s.log->first->flags, py::handle(given)).release().ptr();
  const at::AutoGradMode mode(false);
  const Tensor t = rebuilt(s);
  const auto limit = s.log->limit;
  py::object tensor = s.spec ? python().shared(t, s.spec) : py::reinterpret_steal<py::object>(THPVariable_Wrap(t));
  if (limit) limit->reads(s.log->values[s.value].storage_bytes);
  return tensor.release().ptr();
  END_HANDLE_TH_ERRORS
}
inline PyMethodDef hooks[] = {{"pack", &pack, METH_O, nullptr}, {"unpack", &unpack<false>, METH_O, nullptr}, {"unpack_now", &unpack<true>, METH_O, nullptr}, {nullptr}};

// What a pass holds when it closes, to be read also when a backward pass has freed it.
struct Saved {
  struct Tensor {
    const Rule* by;  // none: nobody saw who made it
    c10::SmallVector<int64_t, 5> sizes;
    at::ScalarType dtype;
    int64_t nbytes;
    bool dropped, by_node;
    Why why;
  };
  std::vector<Tensor> tensors;  // those that nodes have saved, then those that others are made of
  int64_t held = 0, dropped = 0;

  void add(const Log& log, const Value& x) {
    const bool again = x.state == Value::kDropped;
    tensors.push_back({x.call < 0 ? nullptr : log.calls[x.call].rule, x.made.sizes, x.made.dtype, x.storage_bytes, again, x.saves > 0, x.why});
    (again ? dropped : held) += x.storage_bytes;
  }
  py::list rows() const {
    py::list rows;
    for (const Tensor& t : tensors)
      rows.append(py::make_tuple(t.by == nullptr ? std::string() : t.by->name, py::cast(std::vector<int64_t>(t.sizes.begin(), t.sizes.end())),
                                 py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(t.dtype))), t.nbytes, t.dropped,
                                 static_cast<int>(t.why), t.by_node));
    return rows;
  }
};

// A pass that is open, or was. Passes of one thread that are open at once, such as one around another's, share one log:
// each write is seen by all.
struct Pass {
  static inline thread_local size_t last_values = 0, last_calls = 0;

  std::shared_ptr<Log> log = current;
  size_t first = 0;  // of what the log lists: the first that this pass saved
  bool open = true;
  std::shared_ptr<Asked> asked;

  Pass(const Policy& policy, Asked of, bool subclasses, bool gathers) : asked(of_python(std::move(of))) {
    if (!log || log->closed) {
      log = std::make_shared<Log>();
      log->policy = policy, log->first = asked, log->subclasses = subclasses, log->gathers = gathers;
      log->values.reserve(last_values), log->calls.reserve(last_calls);  // as many as the last pass had
      rules.forget_others();
      at::RecordFunctionCallback callback(&begin, &end);
      log->callback = at::addThreadLocalCallback(callback.needsInputs(true).needsOutputs(true).scopes({at::RecordScope::FUNCTION}));
      current = log;
    }
    const Log::Lock lock(*log);
    hand_over(*log);
    log->asked.push_back(asked);
    ++log->passes, first = log->listed.size();
  }
  void close() {
    if (!std::exchange(open, false)) return;
    hand_over(*log);
    const Log::Lock lock(*log);
    log->asked.erase(std::find(log->asked.begin(), log->asked.end(), asked));
    if (--log->passes > 0) return;
    if (log->limit) log->limit->forward_ends(*log);
    at::removeCallback(log->callback);
    last_values = log->values.size(), last_calls = log->calls.size();
    log->closed = true, log->by_storage.clear(), log->memories.clear(), log->open.clear(), log->to_move.clear();
    if (current == log) current.reset();
  }
  size_t seen() const { return log->listed.size() - std::min(first, log->listed.size()); }
  // What it has saved, and what of that is still there.
  Saved saved() const {
    const Log::Lock lock(*log);
    Saved made;
    for (size_t i = std::min(first, log->listed.size()); i < log->listed.size(); ++i)
      if (log->values[log->listed[i]].refs > 0) made.add(*log, log->values[log->listed[i]]);
    for (const Value& x : log->values)
      if (!x.listed && x.held.defined() && (x.call >= 0 || x.copied)) made.add(*log, x);
    return made;
  }
};

inline void add_record(py::module_ module) {
  saved_type.tp_dealloc = &forget_saved, saved_type.tp_flags = Py_TPFLAGS_DEFAULT;
  if (PyType_Ready(&saved_type) < 0) throw py::error_already_set();
  for (auto* def = hooks; def->ml_name != nullptr; ++def)
    module.attr(("record_" + std::string(def->ml_name)).c_str()) = py::reinterpret_steal<py::object>(PyCFunction_New(def, nullptr));
  py::class_<Learned, std::shared_ptr<Learned>>(module, "Learned").def(py::init<>()).def_property_readonly("beyond", [](const Learned& l) { return l.beyond.load(); });
  module.def("bytes_in_use", [] {
    const InUse now = InUse::now();
    return py::make_tuple(now.allocated, now.free, InUse::read_resident());
  });
  py::class_<Saved>(module, "RecordedTensors")
      .def_readonly("held", &Saved::held)
      .def_readonly("dropped", &Saved::dropped)
      .def("__len__", [](const Saved& s) { return s.tensors.size(); })
      .def("rows", &Saved::rows);
  py::class_<Pass>(module, "RecordedPass")
      .def(py::init([](bool products, bool everything, int sums, int runs, int row, py::object flags, py::object layer, py::object hold,
                       py::object owns, bool subclasses, bool gathers) {
             return std::make_unique<Pass>(Policy{products, everything, sums, runs, row},
                                           Asked{std::move(flags), std::move(layer), std::move(hold), std::move(owns)}, subclasses, gathers);
           }), py::arg("products"), py::arg("everything"), py::arg("sums"), py::arg("runs"), py::arg("row"), py::arg("flags"),
           py::arg("layer"), py::arg("hold"), py::arg("owns"), py::arg("subclasses"), py::arg("gathers"))
      .def("close", &Pass::close)
      .def("saved", &Pass::saved)
      .def("seen", &Pass::seen)
      .def("set_limit", [](Pass& p, int64_t bytes, std::shared_ptr<Learned> learned) {
        p.log->limit = std::make_shared<Limit>(bytes, std::move(learned));
      })
      .def("missed", [](const Pass& p) { return p.log->limit ? p.log->limit->missed() : 0; })
      .def("calls", [](const Pass& p) {
        std::vector<std::string> names;
        for (const Call& call : p.log->calls) names.push_back(call.rule ? call.rule->name : "");
        return names;
      });
  module.def("set_operator", [](const std::string& name, int kind, int formula, std::vector<int> writes, int gate, bool fills, const std::string& instead,
                                const std::vector<std::pair<int, int>>& sources) {
    Row row{static_cast<Kind>(kind), static_cast<Formula>(formula), std::move(writes), gate, fills, instead};
    for (const auto& [of, at] : sources) row.sources.push_back({static_cast<decltype(Source::of)>(of), at});
    table()[name] = std::move(row);
  });
  module.def("set_recorded", [](py::object flags, py::object others, py::object local, py::object spec, py::object shared, py::object compare, py::object parameter) {
    python() = {std::move(flags), std::move(others), std::move(local), std::move(spec), std::move(shared), std::move(compare), std::move(parameter)};
  });
  module.def("forget_trials", [] { trust().forget(); });
}

}  // namespace leannorm::recording
