// Python's side of the log: a pass is opened and closed, and two functions are its saved-tensor hooks.
#pragma once

#include "../flags.h"
#include "freed.h"
#include "limit.h"
#include "recorder.h"
#include "softmax_rows.h"

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
    if (const auto leaves = s->log->leaves.find(s->value); leaves != s->log->leaves.end()) {
      std::erase(leaves->second, &s->tensor);
      if (leaves->second.empty()) s->log->leaves.erase(leaves);
    }
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

// A parameter, or a view of one: it exists without autograd, also where it is frozen.
inline bool is_parameter(const Tensor& t) {
  const Tensor base = t.is_view() ? Tensor(t._base()) : t;
  if (!base.is_leaf() || base.requires_grad()) return base.is_leaf();
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(base));
  return PyType_IsSubtype(Py_TYPE(object.ptr()), reinterpret_cast<PyTypeObject*>(ParameterClass));
}

// Python's functions: with_flags(flags, saved) sets the forward pass's flags and rebuilds; others(packed) unpacks what small
// passes have packed; in_rows(tensor) says whether a log-softmax's gradient has its bits when it reads rows;
// unbuilt(saved, shape, dtype) makes what stands for such a log-softmax, or None.
struct Functions {
  py::object with_flags, others, in_rows, unbuilt;
};
inline Functions& python() {
  static auto* const functions = new Functions();
  return *functions;
}

// The pack hook.
inline PyObject* pack(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  const Tensor& t = THPVariable_Unpack(given);
  auto owned = py::reinterpret_steal<py::object>(new_saved());
  PyObject* const object = owned.ptr();
  auto& s = *reinterpret_cast<SavedObject*>(object);
  if (!t.is_inference()) s.counter = t.unsafeGetTensorImpl()->version_counter(), s.version = t._version();
  if (current) ++current->packs;
  if (!current || busy || (t.is_leaf() && t.requires_grad()) || !plain(t)) {
    if (current && current->limit && t.is_leaf()) current->limit->reads_parameter(t);
    s.tensor = t.grad_fn() ? t.detach() : t;
    return owned.release().ptr();
  }
  Log& log = *current;
  const Log::Lock lock(log);
  if (!log.limit) encode_freed(log);  // which decides later what is dropped
  int v = log.value_of(t);
  if (v < 0) v = log.new_memory(t, log.open.empty() ? -1 : log.open.back());
  if (Value& x = log.values[v]; x.code) x.held = over(t.storage(), x.made), x.code.reset(), x.copied = false;  // both would be kept
  if (log.values[v].copied) {  // for others; this node reads the memory itself, as in plain PyTorch
    s.tensor = t.grad_fn() ? alias_of(t) : t;
    return owned.release().ptr();
  }
  if (!log.values[v].made.is_of(t)) s.geometry = Geometry::of(t);
  s.log = current, s.value = v;
  Value& x = log.values[v];
  ++x.saves, ++x.refs, ++x.left, ++log.alive;
  if (!x.listed && !x.parameter) {
    x.parameter = is_parameter(t);
    if (!x.parameter) x.listed = true, x.number = static_cast<int>(log.listed.size()), log.listed.push_back(v);
  }
  const bool leaf = !t.grad_fn();  // autograd reads what it holds in the backward pass, also where its data is replaced
  if (leaf) s.tensor = t, log.leaves[v].push_back(&s.tensor);
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
  if (!leaf && log.limit) {
    log.limit->saved(log, x.storage_bytes);
    return owned.release().ptr();
  }
  const bool waits = !log.open.empty() && x.call == log.open.back();
  if (waits && !leaf && drops) log.calls[x.call].waiting.push_back(v);
  else if (!leaf && drops) decide(log, v);
  wait_for(log, v);
  if (leaf) return owned.release().ptr();
  if (may_be_in_rows(log, log.values[v])) {
    const Below below;
    const bool fits = python().in_rows(py::reinterpret_borrow<py::object>(given), log.python_flags).cast<bool>();
    log.values[v].in_rows = fits;
  }
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

inline Tensor rebuilt(SavedObject& s) {
  Log& log = *s.log;
  Value& x = log.values[s.value];
  const bool dropped = x.state == Value::kDropped, read_back = x.code != nullptr;
  Tensor t;
  if (x.shown.defined()) t = x.shown;
  else {
    t = x.held.defined() && !x.code ? x.held : Replay(log).value(s.value);  // a node's own tensor may be edited unseen, as in plain PyTorch
    TORCH_CHECK(!dropped || log.values[s.value].sample.matches(Sample::of(t)), "leannorm.lean(): an output of ",
                log.calls[log.values[s.value].call].rule->name, " of shape ", t.sizes(), " was rebuilt, and is not what the forward"
                " pass saved: what it was made of was edited where no operator was called (through its memory). Edit a copy of it,"
                " or leave lean() out of this part");
  }
  Replay(log).used(s.value);
  t = shown(t, s.geometry ? *s.geometry : log.values[s.value].made);
  return (dropped || read_back) && read_by_user() ? t.clone() : t;
}

inline py::object dtype_of(at::ScalarType dtype) { return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype))); }

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
    return python().with_flags(s.log->python_flags, py::reinterpret_borrow<py::object>(given)).release().ptr();
  if (!kNow && x.in_rows && x.state == Value::kDropped && !s.geometry && !x.rebuilt.defined() && !x.shown.defined()) {
    const py::object stand_in = python().unbuilt(py::reinterpret_borrow<py::object>(given), py::cast(std::vector<int64_t>(x.made.sizes.begin(), x.made.sizes.end())), dtype_of(x.made.dtype));
    if (!stand_in.is_none()) return py::object(stand_in).release().ptr();
  }
  const at::AutoGradMode mode(false);
  const auto limit = s.log->limit;
  py::object tensor = py::reinterpret_steal<py::object>(THPVariable_Wrap(rebuilt(s)));
  if (limit) limit->reads(s.log->values[s.value].storage_bytes);
  return tensor.release().ptr();
  END_HANDLE_TH_ERRORS
}
// For `Unbuilt`: a reader needs no rebuild, and what the rows are made of.
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
  return py::make_tuple(py::reinterpret_steal<py::object>(THPVariable_Wrap(source.rows)), casts).release().ptr();
  END_HANDLE_TH_ERRORS
}
inline PyMethodDef hooks[] = {{"skip", &skip, METH_O, nullptr}, {"rows_of", &rows_of, METH_O, nullptr}, {"pack", &pack, METH_O, nullptr}, {"unpack", &unpack<false>, METH_O, nullptr}, {"unpack_now", &unpack<true>, METH_O, nullptr}, {nullptr}};

// What a pass holds when it closes, to be read also when a backward pass has freed it.
struct Saved {
  struct Tensor {
    const Rule* by;  // none: nobody saw who made it
    const char* code;  // as what it is held, where it is in fewer bytes
    c10::SmallVector<int64_t, 5> sizes;
    at::ScalarType dtype;
    int64_t nbytes;
    bool dropped, by_node;
    Why why;
  };
  std::vector<Tensor> tensors;  // those that nodes have saved, then those that others are made of
  int64_t held = 0, dropped = 0;

  // `instead`: bytes of what is held in its place.
  void add(const Log& log, const Value& x, int64_t instead) {
    if (x.code) {
      instead = static_cast<int64_t>(x.held.nbytes());
      const auto sizes = x.held.sizes();
      tensors.push_back({nullptr, x.code->name(), {sizes.begin(), sizes.end()}, x.held.scalar_type(), instead, false, false, Why::kNone});
      held += instead;
      if (!x.listed) return;
    }
    const bool again = x.code || x.state == Value::kDropped;
    const int64_t nbytes = x.storage_bytes - std::min(instead, x.storage_bytes);
    tensors.push_back({x.call < 0 ? nullptr : log.calls[x.call].rule, nullptr, x.made.sizes, x.made.dtype, nbytes, again, !x.code && x.saves > 0, x.why});
    (again ? dropped : held) += nbytes;
  }
  py::list rows() const {
    py::list rows;
    for (const Tensor& t : tensors)
      rows.append(py::make_tuple(t.code != nullptr ? std::string(t.code) : t.by == nullptr ? std::string() : t.by->name,
                                 py::cast(std::vector<int64_t>(t.sizes.begin(), t.sizes.end())), dtype_of(t.dtype), t.nbytes, t.dropped,
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
  int64_t first_pack = 0;
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
    ++log->passes, first = follower.first = log->listed.size(), first_call = log->calls.size(), first_pack = log->packs;
    if (!ask.is_none()) log->times = follower.times = log->times ? log->times : std::make_shared<Times>();
    follower.policy = log->policy = policy, follower.ask = std::move(ask);
    log->following.push_back(&follower);
  }
  Pass(const Pass&) = delete;
  ~Pass() { close(); }
  void close() {
    if (!std::exchange(open, false)) return;
    const Log::Lock lock(*log);
    if (!log->limit) encode_freed(*log, /*all=*/true);
    std::erase(log->following, &follower);
    follower.forget_times(*log);
    if (!log->following.empty()) log->policy = log->following.back()->policy;
    if (--log->passes > 0) return;
    if (log->limit) log->limit->forward_ends(*log);
    at::removeCallback(log->callback);
    log->waiting = {}, log->leaves.clear();
    last_values = log->values.size(), last_calls = log->calls.size();
    log->closed = true, log->by_storage.clear(), log->memories.clear(), log->open.clear();
    if (current == log) current.reset();
  }
  bool packed() const { return log->packs > first_pack; }
  size_t seen() const { return log->listed.size() - std::min(first, log->listed.size()); }
  // What it has saved, and what of that is still there.
  Saved saved() const {
    const Log::Lock lock(*log);
    std::unordered_map<int, int64_t> instead;  // bytes of what is held for a value that is dropped: these two are its own
    const auto is_held_for_others = [](const Value& x) { return !x.listed && x.held.defined() && (x.call >= 0 || x.copied); };
    for (const Value& x : log->values)
      if (is_held_for_others(x) && x.instead >= 0) instead[x.instead] += static_cast<int64_t>(x.held.storage().nbytes());
    Saved made;
    for (size_t i = std::min(first, log->listed.size()); i < log->listed.size(); ++i) {
      const auto others = instead.find(log->listed[i]);
      if (const Value& x = log->values[log->listed[i]]; x.refs > 0) made.add(*log, x, others == instead.end() ? 0 : others->second);
    }
    for (const Value& x : log->values)
      if (is_held_for_others(x)) made.add(*log, x, 0);
    return made;
  }
};

inline void add_record(py::module_ module) {
  add_plans(module);
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
      .def(py::init([](bool products, bool everything, int sums, int runs, int row, py::object flags, py::object ask) {
             return std::make_unique<Pass>(Policy{products, everything, sums, runs, row}, std::move(flags), std::move(ask));
           }), py::arg("products"), py::arg("everything"), py::arg("sums"), py::arg("runs"), py::arg("row"), py::arg("flags"), py::arg("ask"))
      .def("close", &Pass::close)
      .def("saved", &Pass::saved)
      .def("packed", &Pass::packed)
      .def("seen", &Pass::seen)
      .def("set_limit", [](Pass& p, int64_t bytes, std::shared_ptr<Learned> learned) {
        p.log->limit = std::make_shared<Limit>(bytes, std::move(learned));
      })
      .def("missed", [](const Pass& p) { return p.log->limit ? p.log->limit->missed() : 0; })
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
  module.def("set_recorded", [](py::object set, py::object unpack, py::object in_rows, py::object unbuilt) {
    python() = {std::move(set), std::move(unpack), std::move(in_rows), std::move(unbuilt)};
  });
  module.def("forget_trials", [] { trust().forget(); });
}

}  // namespace leannorm::recording
