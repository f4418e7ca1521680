// Opens and closes a pass of the log, reports what it saved, and declares what Python calls.
#pragma once

#include "first.h"
#include "watch.h"

#include <unordered_set>

namespace leannorm::recording {

// What a pass keeps when it closes, for reports after a backward pass has freed it too.
struct Saved {
  struct Tensor {
    const Rule* by;  // the operator that made it; null: no call was seen
    const char* code;  // the name of its code, if it has fewer bytes
    c10::SmallVector<int64_t, 5> sizes;
    at::ScalarType dtype;
    int64_t nbytes;
    bool dropped, by_node;
    Cause why;
  };
  std::vector<Tensor> tensors;  // those that nodes have saved, then those from which others are rebuilt
  int64_t held = 0, dropped = 0;

  // `instead`: bytes of what is kept instead of the value.
  void add(const Log& log, const Value& x, int64_t instead) {
    if (x.code) {
      instead = static_cast<int64_t>(x.held.nbytes());
      const auto sizes = x.held.sizes();
      tensors.push_back({nullptr, x.code->name(), {sizes.begin(), sizes.end()}, x.held.scalar_type(), instead, false, false, {}});
      held += instead;
      if (!x.listed) return;
    }
    const bool again = x.code || x.state == Value::kDropped;
    const int64_t nbytes = x.storage_bytes - std::min(instead, x.storage_bytes);
    tensors.push_back({x.call < 0 ? nullptr : log.calls[x.call].rule, nullptr, x.made.sizes, x.made.dtype, nbytes, again, !x.code && x.saves > 0, reason_of(x)});
    (again ? dropped : held) += nbytes;
  }
  // `counts`: whether its bytes count, which they do not if an earlier tensor has the same memory.
  void add(const Other& other, bool counts) {
    tensors.push_back({nullptr, nullptr, {other.sizes.begin(), other.sizes.end()}, other.dtype, counts ? other.nbytes : 0, false, false, Why::kNone});
    held += tensors.back().nbytes;
  }
  py::list rows() const {
    py::list rows;
    for (const Tensor& t : tensors)
      rows.append(py::make_tuple(t.code != nullptr ? std::string(t.code) : t.by == nullptr ? std::string() : t.by->name,
                                 py::cast(std::vector<int64_t>(t.sizes.begin(), t.sizes.end())), dtype_of(t.dtype), t.nbytes, t.dropped,
                                 static_cast<int>(t.why.why), t.by_node, t.why.of == nullptr ? "" : *t.why.of));
    return rows;
  }
};

// A pass, open or closed. Passes of one thread that are open at once, such as one within another, share one log, so that all
// of them see each write.
struct Pass {
  static inline thread_local size_t last_values = 0, last_calls = 0;

  std::shared_ptr<Log> log = current;
  size_t first = 0;  // the first of the log's listed values that this pass saved
  size_t first_call = 0, first_other = 0;
  int64_t first_pack = 0;
  Follower follower;
  bool open = true;
  std::shared_ptr<Asked> asked;
  // What the pass had saved when a backward pass began before it closed.
  struct Then {
    Saved saved;
    size_t seen;
    int places;
    py::object timeline;
  };
  std::optional<Then> then;

  Pass(const Policy& policy, Asked of, py::object way, bool subclasses, bool gathers) : asked(of_python(std::move(of))) {
    if (!log || log->closed) {
      log = std::make_shared<Log>();
      log->first = asked, log->subclasses = subclasses, log->gathers = gathers;
      log->values.reserve(last_values), log->calls.reserve(last_calls);  // as many as the last pass had
      rules.forget_others();
      at::RecordFunctionCallback callback(&begin, &end);
      log->callback = at::addThreadLocalCallback(callback.needsInputs(true).needsOutputs(true).scopes({at::RecordScope::FUNCTION}));
      current = log;
    }
    const Log::Lock lock(*log);
    hand_over(*log);
    log->asked.push_back(asked);
    ++log->passes, first = follower.first = log->listed.size(), first_call = log->calls.size(), first_pack = log->packs, first_other = log->others.size();
    const bool planned = !way.is_none();
    follower.chooses = planned && way.attr("moves").cast<bool>();
    follower.policy = log->policy = policy, follower.way = std::move(way);
    log->following.push_back(&follower);
    follower.set_may_plan(*log, planned);
    if (planned && !std::exchange(log->measures, true)) log->spent = std::make_shared<Spent>();
    follower.number = log->alive_of.size(), log->alive_of.emplace_back();
    follower.note = [this] { note(); };
    follower.renew = [this] { renew(); };
  }
  Pass(const Pass&) = delete;
  ~Pass() { close(); }
  void close() {
    if (!std::exchange(open, false)) return;
    hand_over(*log);
    const Log::Lock lock(*log);
    log->asked.erase(std::find(log->asked.begin(), log->asked.end(), asked));
    if (!log->limit) encode_freed(*log, /*all=*/true);
    if (log->passes == 1) copy_all_small(*log);
    if (!log->limit) note_those_alone();  // under a limit, what was not dropped has no reason
    std::erase(log->following, &follower);
    follower.set_may_plan(*log, false);
    if (!log->following.empty()) log->policy = log->following.back()->policy;
    if (--log->passes > 0) return;
    if (log->limit) log->limit->forward_ends(*log);
    at::removeCallback(log->callback);
    expose(log);
    log->waiting = {}, log->leaves.clear();
    last_values = log->values.size(), last_calls = log->calls.size();
    log->closed = true, log->by_storage.clear(), log->fresh.clear(), log->memories.clear(), log->open.clear(), log->to_move.clear();
    if (current == log) current.reset();
  }
  void note() {
    then.reset();
    then = Then{saved(), seen(), places(), follower.may_plan ? timeline() : py::none()};
    Log::Alive& alive = log->alive_of[follower.number];
    follower.noted = alive.then = alive.now, ++alive.backward_passes;
  }
  // All that the pass saved has been freed, and the program saves more: Python ends this step, and another one begins.
  void renew() {
    if (log->spent) log->spent->is_one = false;
    follower.way.attr("renew")(py::cast(this));
    first = std::min(first + then->seen, log->listed.size() - 1), then.reset();
    first_other = log->others.size();
    first_call = log->open.empty() ? log->calls.size() : static_cast<size_t>(log->open.front());
    follower.first = first, follower.noted = 0, follower.place = -1, follower.plan.reset(), log->policy = follower.policy;
    follower.set_may_plan(*log, true);
  }
  // Gives a reason to values without a gradient that only autograd has, such as the workspace of a recurrent layer.
  void note_those_alone() {
    for (size_t i = std::min(first, log->listed.size()); i < log->listed.size(); ++i) {
      Value& x = log->values[log->listed[i]];
      const bool unsaid = x.saves > 0 && x.call >= 0 && x.state == Value::kHeld && x.why == Why::kNone;
      if (unsaid && x.made.numel() >= log->policy.smallest && x.made.dtype != at::kLong && is_ours_alone(*log, log->listed[i])) x.why = Why::kAlone;
    }
  }
  bool packed() const { return log->packs > first_pack; }
  bool is_over() const { return then && follower.is_over(*log); }
  size_t seen() const { return is_over() ? then->seen : log->listed.size() - std::min(first, log->listed.size()); }
  int places() const { return is_over() ? then->places : follower.place + 1; }
  py::object timeline() const {
    const Log::Lock lock(*log);
    return is_over() ? then->timeline : timeline_of(*log, follower, first_call, bytes_of_others());
  }
  // By call of the pass, its name and the seconds that it took; 0 where that is not known.
  std::vector<std::pair<std::string, float>> seconds() const {
    const Log::Lock lock(*log);
    std::vector<std::pair<std::string, float>> made;
    for (size_t i = first_call; i < log->calls.size(); ++i)
      made.emplace_back(log->calls[i].rule ? log->calls[i].rule->name : "", i < log->seconds.size() ? log->seconds[i] : 0);
    return made;
  }
  std::string device() const {  // of the largest tensor that the pass has saved
    const Value* most = nullptr;
    for (size_t i = std::min(first, log->listed.size()); i < log->listed.size(); ++i)
      if (const Value& x = log->values[log->listed[i]]; most == nullptr || x.storage_bytes > most->storage_bytes) most = &x;
    return most == nullptr ? "cpu" : most->made.device.str();
  }
  // What the pass has saved and nodes still need, or needed when the backward pass began that has freed it.
  Saved saved() const {
    const Log::Lock lock(*log);
    if (is_over()) return then->saved;
    std::unordered_map<int, int64_t> instead;  // by dropped value: bytes of what is kept instead, which count as its own
    const auto is_held_for_others = [](const Value& x) { return !x.listed && x.held.defined() && (x.takes_memory() || x.copied); };
    for (const Value& x : log->values)
      if (is_held_for_others(x) && x.instead >= 0) instead[x.instead] += static_cast<int64_t>(x.held.storage().nbytes());
    Saved made;
    for (size_t i = std::min(first, log->listed.size()); i < log->listed.size(); ++i) {
      const auto others = instead.find(log->listed[i]);
      if (const Value& x = log->values[log->listed[i]]; x.refs > 0) made.add(*log, x, others == instead.end() ? 0 : others->second);
    }
    for (const Value& x : log->values)
      if (is_held_for_others(x)) made.add(*log, x, 0);
    for_others([&made](const Other& other, bool counts) { made.add(other, counts); });
    return made;
  }
  int64_t bytes_of_others() const {
    int64_t bytes = 0;
    for_others([&bytes](const Other& other, bool counts) { bytes += counts ? other.nbytes : 0; });
    return bytes;
  }

 private:
  template <class Visit> void for_others(const Visit& visit) const {
    std::unordered_set<int64_t> places{0};
    for (size_t i = std::min(first_other, log->others.size()); i < log->others.size(); ++i)
      if (const auto other = log->others[i].lock()) visit(*other, other->place == 0 || places.insert(other->place).second);
  }
};

inline void add_record(py::module_ module) {
  add_plans(module), add_first(module);
  saved_type.tp_dealloc = &forget_saved, saved_type.tp_flags = Py_TPFLAGS_DEFAULT;
  if (PyType_Ready(&saved_type) < 0) throw py::error_already_set();
  for (auto* def = hooks; def->ml_name != nullptr; ++def)
    module.attr(("record_" + std::string(def->ml_name)).c_str()) = py::reinterpret_steal<py::object>(PyCFunction_New(def, nullptr));
  own_unpack = py::object(module.attr("record_unpack")).release().ptr();
  py::class_<Spent, std::shared_ptr<Spent>>(module, "Spent").def("shares", &Spent::shares).def_readwrite("rebuilding", &Spent::rebuilding);
  py::class_<Learned, std::shared_ptr<Learned>>(module, "Learned").def(py::init<>());
  module.def("bytes_in_use", &bytes_in_use);
  module.def("trim_heap", &trim_heap);
  module.def("alive", [] { return alive.load(); });
  py::class_<Saved>(module, "RecordedTensors")
      .def_readonly("held", &Saved::held)
      .def_readonly("dropped", &Saved::dropped)
      .def("__len__", [](const Saved& s) { return s.tensors.size(); })
      .def("rows", &Saved::rows);
  py::class_<Pass>(module, "RecordedPass")
      .def(py::init([](const std::tuple<bool, bool, int, int, int, int64_t, bool>& policy, py::object way, py::object flags, py::object layer,
                       py::object hold, py::object owns, py::object other, bool subclasses, bool gathers) {
             const auto [products, everything, sums, runs, row, smallest, by_plan] = policy;
             return std::make_unique<Pass>(Policy{products, everything, sums, runs, row, smallest},
                                           Asked{std::move(flags), std::move(layer), std::move(hold), std::move(owns), std::move(other)}, std::move(way), subclasses, gathers);
           }))
      .def("close", &Pass::close)
      .def("saved", &Pass::saved)
      .def_property_readonly("packed", &Pass::packed)
      .def_property_readonly("met", [](const Pass& p) { return p.asked->met; })
      .def_property_readonly("seen", &Pass::seen)
      .def("set_limit", [](Pass& p, int64_t bytes, std::shared_ptr<Learned> learned) {
        if (p.log->limit && p.log->limit->is_below(bytes)) return;  // an outer pass has a lower one
        p.log->limit = std::make_shared<Limit>(bytes, std::move(learned));
      })
      .def_property_readonly("missed", [](const Pass& p) { return p.log->limit ? p.log->limit->missed() : 0; })
      .def_property_readonly("device", &Pass::device)
      .def_property_readonly("places", &Pass::places)
      .def("timeline", &Pass::timeline)
      .def("seconds", &Pass::seconds)
      .def_property_readonly("spent", [](const Pass& p) { return p.log->spent; });
  module.def("set_operator", [](const std::string& name, int kind, int formula, std::vector<int> writes, int gate, bool fills, bool moves, const std::string& instead,
                                const std::vector<std::pair<int, int>>& sources, std::string act) {
    Row row{static_cast<Kind>(kind), static_cast<Formula>(formula), std::move(writes), gate, fills, moves, instead, {}, std::move(act)};
    for (const auto& [of, at] : sources) row.sources.push_back({static_cast<decltype(Source::of)>(of), at});
    table()[name] = std::move(row);
  });
  module.def("set_recorded", [](py::object others, py::object nbytes, py::object local, py::object spec, py::object shared, py::object compare) {
    auto& set = python();
    set.others = std::move(others), set.nbytes = std::move(nbytes), set.local = std::move(local), set.spec = std::move(spec), set.shared = std::move(shared), set.compare = std::move(compare);
  });
  module.def("set_stand_ins", [](py::object in_rows, py::object unbuilt, const std::vector<std::string>& read_rows, const std::vector<std::string>& may_wait) {
    auto& set = python();
    set.in_rows = std::move(in_rows), set.unbuilt = std::move(unbuilt);
    set.read_rows.insert(read_rows.begin(), read_rows.end()), set.may_wait.insert(may_wait.begin(), may_wait.end());
  });
  module.def("set_waits_from", [](int64_t bytes) { return waits_from.exchange(bytes); });
  module.def("set_varying", [](const std::vector<std::string>& names) { varying().insert(names.begin(), names.end()); });
  module.def("set_capturing", [](py::object asked) { asks_capturing() = std::move(asked); });
  module.def("set_fakes", [](const py::type& type, py::object make) { fakes() = {reinterpret_cast<PyTypeObject*>(type.ptr()), std::move(make)}; });
  module.def("exposed", [] { return watched().left.load(); });
  module.def("forget_trials", [] { trust().forget(); });
}

}  // namespace leannorm::recording
