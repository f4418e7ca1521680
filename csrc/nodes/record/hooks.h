// Python's side of the log: a pass is opened and closed, and two functions are its saved-tensor hooks.
#pragma once

#include "../flags.h"
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
  Tensor tensor;
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
  new (&made->tensor) Tensor();
  made->value = -1;
  return s;
}

// The pack hook.
inline PyObject* pack(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  const Tensor& t = THPVariable_Unpack(given);
  auto owned = py::reinterpret_steal<py::object>(new_saved());
  PyObject* const object = owned.ptr();
  auto& s = *reinterpret_cast<SavedObject*>(object);
  if (!t.is_inference()) s.counter = t.unsafeGetTensorImpl()->version_counter(), s.version = t._version();
  if (!current || busy || (t.is_leaf() && t.requires_grad()) || !plain(t)) {
    s.tensor = t.grad_fn() ? t.detach() : t;
    return owned.release().ptr();
  }
  Log& log = *current;
  const Log::Lock lock(log);
  int v = log.value_of(t);
  if (v < 0) v = log.new_memory(t, log.open.empty() ? -1 : log.open.back());
  if (!log.values[v].made.is_of(t)) s.geometry = Geometry::of(t);
  s.log = current, s.value = v;
  Value& x = log.values[v];
  ++x.saves, ++x.refs, ++x.left, ++log.alive;
  if (!x.listed) {
    x.listed = true, x.number = static_cast<int>(log.listed.size()), x.weight = x.call < 0 && is_parameter(t);
    log.listed.push_back(v);
  }
  const bool leaf = !t.grad_fn();  // autograd reads what it holds in the backward pass, also where its data is replaced
  if (leaf) s.tensor = t;
  const bool planned = log.following.back()->has_place(log, x, t), drops = !planned || log.following.back()->drops(log, x, t);
  if (log.times) log.times->saved(log, planned, v, t);
  if (!drops) keep(log, v, t, log.following.back()->why);
  const bool shows_more = s.geometry && s.geometry->extent() > x.made.extent();
  if (x.state == Value::kDropped) {
    if (shows_more && !leaf) s.tensor = alias_of(t);
    return owned.release().ptr();
  }
  if (!x.held.defined()) x.held = alias_of(t), x.state = Value::kHeld;
  if (shows_more) x.call = -1;  // other memory than its call has made
  if (leaf || !drops) return owned.release().ptr();
  if (!log.open.empty() && x.call == log.open.back()) log.calls[x.call].waiting.push_back(v);
  else decide(log, v);
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

inline py::object& with_flags() {  // with_flags(flags, saved): Python sets the forward pass's flags and rebuilds
  static auto* const set = new py::object();
  return *set;
}
inline py::object& others() {  // unpacks what small passes have packed
  static auto* const unpack = new py::object();
  return *unpack;
}

inline Tensor rebuilt(SavedObject& s) {
  Log& log = *s.log;
  Value& x = log.values[s.value];
  const bool dropped = x.state == Value::kDropped;
  Tensor t;
  if (x.shown.defined()) t = x.shown;
  else {
    t = x.held.defined() ? x.held : Replay(log).value(s.value);  // a node's own tensor may be edited unseen, as in plain PyTorch
    TORCH_CHECK(!dropped || log.values[s.value].sample.matches(Sample::of(t)), "leannorm.lean(): an output of ",
                log.calls[log.values[s.value].call].rule->name, " of shape ", t.sizes(), " was rebuilt, and is not what the forward"
                " pass saved: what it was made of was edited where no operator was called (through its memory). Edit a copy of it,"
                " or leave lean() out of this part");
  }
  Replay(log).used(s.value);
  t = shown(t, s.geometry ? *s.geometry : log.values[s.value].made);
  return dropped && read_by_user() ? t.clone() : t;
}

// The unpack hook; `unpack_now` is called where the flags are the forward pass's.
template <bool kNow> PyObject* unpack(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  if (Py_TYPE(given) != &saved_type) return PyObject_CallOneArg(others().ptr(), given);
  auto& s = *reinterpret_cast<SavedObject*>(given);
  check_version(s);
  if (s.tensor.defined()) return THPVariable_Wrap(s.tensor);
  const Log::Lock lock(*s.log);
  const Value& x = s.log->values[s.value];
  if (!kNow && x.state == Value::kDropped && !x.rebuilt.defined() && flags_now() != s.log->flags)
    return with_flags()(s.log->python_flags, py::reinterpret_borrow<py::object>(given)).release().ptr();
  const at::AutoGradMode mode(false);
  return THPVariable_Wrap(rebuilt(s));
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
  // What is held though no node has saved it is there in the place of what is made again.
  void settle() {
    int64_t instead = 0;
    for (const Tensor& t : tensors) instead += t.by_node ? 0 : t.nbytes;
    for (Tensor& t : tensors) {
      const int64_t part = t.dropped ? std::min(instead, t.nbytes) : 0;
      t.nbytes -= part, dropped -= part, instead -= part;
    }
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
  size_t first_call = 0;
  Follower follower;
  bool open = true;

  Pass(const Policy& policy, py::object flags, py::object ask) {
    if (!log || log->closed) {
      log = std::make_shared<Log>();
      log->python_flags = std::move(flags);
      log->values.reserve(last_values), log->calls.reserve(last_calls);  // as many as the last pass had
      rules.forget_others();
      at::RecordFunctionCallback callback(&begin, &end);
      log->callback = at::addThreadLocalCallback(callback.needsInputs(true).needsOutputs(true).scopes({at::RecordScope::FUNCTION}));
      current = log;
    }
    const Log::Lock lock(*log);
    ++log->passes, first = follower.first = log->listed.size(), first_call = log->calls.size();
    if (!ask.is_none()) log->times = follower.times = log->times ? log->times : std::make_shared<Times>();
    follower.policy = log->policy = policy, follower.ask = std::move(ask);
    log->following.push_back(&follower);
  }
  Pass(const Pass&) = delete;
  ~Pass() { close(); }
  void close() {
    if (!std::exchange(open, false)) return;
    const Log::Lock lock(*log);
    std::erase(log->following, &follower);
    follower.forget_times(*log);
    if (!log->following.empty()) log->policy = log->following.back()->policy;
    if (--log->passes > 0) return;
    at::removeCallback(log->callback);
    last_values = log->values.size(), last_calls = log->calls.size();
    log->closed = true, log->by_storage.clear(), log->memories.clear(), log->open.clear();
    if (current == log) current.reset();
  }
  size_t seen() const { return log->listed.size() - std::min(first, log->listed.size()); }
  // What it has saved, and what of that is still there.
  Saved saved() const {
    const Log::Lock lock(*log);
    Saved made;
    for (size_t i = std::min(first, log->listed.size()); i < log->listed.size(); ++i)
      if (const Value& x = log->values[log->listed[i]]; x.refs > 0 && !x.weight) made.add(*log, x);
    for (const Value& x : log->values)
      if (!x.listed && x.held.defined() && (x.call >= 0 || x.copied)) made.add(*log, x);
    made.settle();
    return made;
  }
};

inline void add_record(py::module_ module) {
  add_plans(module);
  saved_type.tp_dealloc = &forget_saved, saved_type.tp_flags = Py_TPFLAGS_DEFAULT;
  if (PyType_Ready(&saved_type) < 0) throw py::error_already_set();
  for (auto* def = hooks; def->ml_name != nullptr; ++def)
    module.attr(("record_" + std::string(def->ml_name)).c_str()) = py::reinterpret_steal<py::object>(PyCFunction_New(def, nullptr));
  py::class_<Saved>(module, "RecordedTensors")
      .def_readonly("held", &Saved::held)
      .def_readonly("dropped", &Saved::dropped)
      .def("__len__", [](const Saved& s) { return s.tensors.size(); })
      .def("rows", &Saved::rows);
  py::class_<Pass>(module, "RecordedPass")
      .def(py::init([](bool products, bool everything, int sums, int runs, int row, py::object flags, py::object ask) {
             return std::make_unique<Pass>(Policy{products, everything, sums, runs, row}, std::move(flags), std::move(ask));
           }), py::arg("products"), py::arg("everything"), py::arg("sums"), py::arg("runs"), py::arg("row"), py::arg("flags"), py::arg("ask"))
      .def("close", &Pass::close)
      .def("saved", &Pass::saved)
      .def("seen", &Pass::seen)
      .def("places", [](const Pass& p) { return p.follower.place + 1; })
      .def("timeline", [](const Pass& p) {
        const Log::Lock lock(*p.log);
        return timeline_of(*p.log, p.follower, p.first_call);
      })
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
  module.def("set_recorded", [](py::object set, py::object unpack) { with_flags() = std::move(set), others() = std::move(unpack); });
  module.def("forget_trials", [] { trust().forget(); });
}

}  // namespace leannorm::recording
