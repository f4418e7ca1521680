// How a pass follows a plan, and the timeline of a pass from which a plan is made.
#pragma once

#include "walk.h"

#include <functional>

#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>

namespace leannorm::recording {

inline py::object dtype_of(at::ScalarType dtype) { return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype))); }

// ---------------------------------------------------------------- the plan

inline Policy by_plan(Policy policy) {
  policy.sums = policy.row = 1 << 20, policy.runs = 2048, policy.by_plan = true;
  return policy;
}

// The name, stored for as long as the process runs; null if it is empty.
inline const std::string* lasting(const std::string& name) {
  static auto* const names = new std::unordered_set<std::string>();
  return name.empty() ? nullptr : &*names->insert(name).first;
}

// A plan's decisions on the tensors that a pass saves, in order: a hash of each, whether it is dropped, whether it is moved
// if it is kept, why it is kept; if it is dropped, what is kept instead (`Value::takes`).
struct Places {
  struct Place {
    uint64_t sign;
    bool drops, moves;
    Cause cause;
    std::vector<int> takes;
  };
  std::vector<Place> list;
};

inline uint64_t sign_of(const std::string& kind, c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype, int64_t number) {
  uint64_t h = std::hash<std::string>()(kind) + static_cast<uint64_t>(dtype);
  const auto mix = [&h](int64_t v) { h = mixed(h, static_cast<uint64_t>(v)); };
  mix(number), mix(static_cast<int64_t>(sizes.size()));
  for (size_t i = 0; i < sizes.size(); ++i) mix(sizes[i]), mix(strides[i]);
  return h;
}

// How far one pass has followed its plan. If the pass differs from the plan, or there is none, Python decides:
// way.ask(place, (kind, sizes, strides, dtype, number)) -> `Answer` of saving/planned_pass.py.
struct Follower {
  Policy policy;
  std::shared_ptr<Places> plan;
  py::object way;  // a PlannedPass, or None: nothing is planned
  int place = -1;   // the last one
  size_t first = 0;  // the first of the log's listed values that the pass saved
  bool may_plan = false;  // a plan may be made from the pass
  Cause cause;
  bool chooses = false;  // the plan chooses what `Asked::hold` gets; otherwise that is all that is kept
  bool moves = true;     // its choice for the last place
  const std::vector<int>* takes = nullptr;  // likewise
  std::function<void()> note, renew;  // of the pass: called when a backward pass begins, and when another step follows it
  size_t number = 0;  // of the pass, among those of the log
  int64_t noted = 0;  // how many saved tensors the pass had when the backward pass began

  // Whether a backward pass has freed most of what it noted, so that what is saved from then on belongs to another step.
  bool is_over(const Log& log) const { return noted > 0 && log.alive_of[number].then * 8 < noted; }

  // The log notes what plans need while any open pass may have one.
  void set_may_plan(Log& log, bool may) {
    may_plan = may;
    log.may_plan = std::any_of(log.following.begin(), log.following.end(), [](const Follower* one) { return one->may_plan; });
  }
  // Whether `decide` has a choice, so that the plan has a place for the tensor.
  bool has_place(const Log& log, const Value& x, const Tensor& t) const {
    return !way.is_none() && t.grad_fn() && !x.parameter && x.made.numel() >= log.policy.smallest;
  }
  // Whether this value may be dropped. `t`: the tensor that is saved now.
  bool drops(Log& log, const Value& x, const Tensor& t) {
    static const std::string unknown;
    if (is_over(log)) renew();
    const auto at = static_cast<size_t>(++place);
    const int64_t number = x.number - static_cast<int64_t>(first);
    const std::string& kind = x.call < 0 ? unknown : log.calls[x.call].rule->name;
    takes = nullptr;
    if (plan && at < plan->list.size()) {
      const Places::Place& planned = plan->list[at];
      if (planned.sign == sign_of(kind, t.sizes(), t.strides(), t.scalar_type(), number))
        return cause = planned.cause, moves = planned.moves, takes = &planned.takes, planned.drops;
    }
    const auto tuple = [](c10::IntArrayRef of) { return py::tuple(py::cast(of.vec())); };
    const py::tuple answer = way.attr("ask")(place, py::make_tuple(kind, tuple(t.sizes()), tuple(t.strides()), dtype_of(t.scalar_type()), number));
    const auto [why, of] = answer[2].cast<std::pair<int, std::string>>();
    plan = answer[5].is_none() ? nullptr : answer[5].cast<std::shared_ptr<Places>>();
    cause = {static_cast<Why>(why), lasting(of)}, moves = answer[1].cast<bool>();
    if (plan) log.plans.insert(plan);
    if (plan && at < plan->list.size()) takes = &plan->list[at].takes;
    log.policy = answer[4].cast<bool>() ? by_plan(policy) : policy;
    if (at == 0 && plan) set_may_plan(log, false);
    return answer[0].cast<bool>();
  }
};

// Keeps a saved value as the plan says.
inline void keep(Log& log, int v, const Tensor& t, const Cause& cause) {
  if (log.values[v].state == Value::kDropped) hold_again(log, v, alias_of(t));
  log.values[v].why = cause.why, log.values[v].cause = cause;
}

// ---------------------------------------------------------------- the timeline

inline void note_gradient(Value& x, const Tensor& t) {
  if (!t.requires_grad()) return;
  const Tensor base = base_of(t);
  x.gradient |= base.is_leaf() && base.grad().defined() ? kWants | kHasGradient : kWants;
}
inline void note_save(Log& log, bool placed, int v, const Tensor& t) {
  note_gradient(log.values[v], t);
  const Follower* const by = log.following.back();
  log.saves.push_back({by, placed ? by->place : -1, v, log.open.empty() ? static_cast<int>(log.calls.size()) - 1 : log.open.back()});
}
// Whether saved objects keep the memory by tensors that others may have, too: that cannot be seen without Python.
inline bool has_leaves(const Log& log, const Memory& memory) { return log.leaves.count(memory.current) > 0; }
inline bool only_log_has(const Log& log, const Memory& memory) {
  const Value& x = log.values[memory.current];
  return x.held.defined() && !x.copied && !has_leaves(log, memory) && x.is_owned_by_log();
}
// Notes which memory the program has freed before this call begins.
inline void note_freed(Log& log, int call) {
  for (; log.known < log.memories.size(); ++log.known) log.living.push_back(static_cast<int>(log.known));
  std::erase_if(log.living, [&](int memory) {
    const bool gone = log.memories[memory].storage.expired() || only_log_has(log, log.memories[memory]);
    if (gone) log.memories[memory].died = call;
    return gone;
  });
}

// Which values are rebuilt, or could be: a plan may also drop a value that was kept only because its chain of calls is too
// long, if it keeps others instead. `taken`: values that this would keep although no node saves them.
inline std::vector<bool> makes_of(Log& log, std::vector<bool>& taken) {
  std::vector<bool> makes(log.values.size());
  for (size_t i = 0; i < makes.size(); ++i) {
    const auto v = static_cast<int>(i);
    Value& x = log.values[v];
    makes[i] = x.state == Value::kDropped;
    if (x.state != Value::kHeld || x.is_outside() || x.copied) continue;
    if (x.saves > 0 && x.why != Why::kTooDeep && x.why != Why::kNotAtHand && x.why != Why::kCheckpointed) continue;
    const Tensor was = std::exchange(x.held, {});
    Walk walk(log, v, 0, x.saves > 0 ? x.number : std::numeric_limits<int>::max());
    const bool can = walk.is_available(v);
    x.held = was;
    for (const int one : walk.taken) taken[one] = taken[one] || can;
    std::vector<int> left{v};
    while (can && !left.empty()) {
      const int one = left.back();
      left.pop_back();
      if (makes[one] || taken[one] || (one != v && log.values[one].held.defined())) continue;
      makes[one] = true;
      for_inputs(log, log.calls[log.values[one].call], [&](int in) { left.push_back(in); });
    }
  }
  return makes;
}

// By value, the one that is rebuilt by the same call (see `Fused`), and that it is made of; -1: none.
inline std::vector<int> follows_of(Log& log, const std::vector<bool>& makes) {
  std::vector<int> users(makes.size()), follows(makes.size(), -1);
  for (size_t v = 0; v < makes.size(); ++v)
    if (makes[v]) for_inputs(log, log.calls[log.values[v].call], [&](int in) { ++users[in]; });
  for (const Save& one : log.saves) ++users[one.value];
  for (size_t i = 0; i < makes.size(); ++i) {
    const auto v = static_cast<int>(i);
    const auto fused = makes[v] ? fused_of(log, v, [&](int u) { return makes[u] && users[u] == 1; }) : std::nullopt;
    if (!fused || trust().is_refused(fused->kind)) continue;
    follows[v] = fused->sum < 0 || fused->sum == v ? fused->norm : fused->sum;
  }
  return follows;
}

// The reason that is reported for a kept value.
inline Cause reason_of(const Value& x) {
  if (x.why == Why::kNotAtHand && x.cause.why != Why::kNone) return x.cause;
  return {x.why, x.why == x.cause.why && x.why != Why::kCollective ? x.cause.of : nullptr};
}

// The bytes that keeping the value takes. A widening cast is kept in the dtype of its source (`encode`).
inline int64_t bytes_when_kept(const Log& log, const Value& x) {
  if (x.code) return static_cast<int64_t>(x.held.nbytes());
  if (x.state != Value::kDropped || !log.memories[x.memory].storage.expired()) return x.storage_bytes;  // others have its memory
  const auto from = coding::narrow_source(log, x);
  return from && x.made.fills(x.storage_bytes) ? x.made.numel() * static_cast<int64_t>(c10::elementSize(*from)) : x.storage_bytes;
}

// The calls from `first` on, all values, what was saved, and the bytes of `others`, as saving/timeline.py reads them.
inline py::tuple timeline_of(Log& log, const Follower& of, size_t first, int64_t others) {
  const auto start = static_cast<int>(std::min(first, log.calls.size()));
  const auto bytes = [](const Geometry& g) { return g.numel() * static_cast<int64_t>(c10::elementSize(g.dtype)); };
  py::list calls, values, saves;
  const Policy before = std::exchange(log.policy, by_plan(log.policy));
  std::vector<bool> taken(log.values.size());
  const std::vector<bool> makes = makes_of(log, taken);
  log.policy = before;
  const std::vector<int> follows = follows_of(log, makes);
  for (size_t i = start; i < log.calls.size(); ++i) {
    const Call& call = log.calls[i];
    py::list reads;
    for (const Read& read : call.reads) reads.append(py::make_tuple(read.value, bytes(log.geometry_of(read)), read.wants, read.at));
    const bool known = call.rule != nullptr;
    calls.append(py::make_tuple(known ? call.rule->name : "", known ? operations(log, call) : 0, known ? groups_of(call) : 0, call.grad_mode,
                                reads, std::vector<int>(call.outs.begin(), call.outs.end())));
  }
  for (size_t v = 0; v < log.values.size(); ++v) {
    const Value& x = log.values[v];
    std::vector<int> inputs;
    if (makes[v]) for_inputs(log, log.calls[x.call], [&](int in) { inputs.push_back(in); });
    const bool copied = x.copied || (taken[v] && x.is_outside() && x.storage_bytes <= kCopied);  // or would be, as in `add_reader`
    const bool counts = (x.refs > 0 || taken[v]) && !x.parameter && (x.saves > 0 || x.takes_memory() || copied);
    const Cause cause = reason_of(x);
    values.append(py::make_tuple(x.memory, x.call < start ? -1 : x.call - start, x.storage_bytes, bytes_when_kept(log, x), bytes(x.made),
                                 static_cast<int64_t>(c10::elementSize(x.made.dtype)), at::isFloatingType(x.made.dtype),
                                 x.gradient, x.refs > 0, bool(makes[v]), x.state != Value::kDropped, counts, copied,
                                 py::make_tuple(static_cast<int>(cause.why), cause.of == nullptr ? "" : *cause.of), inputs, x.in_rows, x.waits, follows[v]));
  }
  for (const Save& one : log.saves)
    if (one.call >= start - 1) saves.append(py::make_tuple(one.by == &of ? one.place : -1, one.value, std::max(one.call - start, 0)));
  std::vector<int> died;
  constexpr int kAlive = -1, kUnknown = -2;  // as in logged.py
  for (const Memory& memory : log.memories)
    died.push_back(memory.died >= 0 ? std::max(memory.died - start, 0) : has_leaves(log, memory) ? kUnknown : kAlive);
  return py::make_tuple(calls, values, saves, died, others);
}

inline void add_plans(py::module_ module) {
  py::class_<Places, std::shared_ptr<Places>>(module, "Places")
      .def(py::init([](const py::iterable& calls, const std::vector<bool>& drops, const std::vector<bool>& moves, const std::vector<int>& whys, const std::vector<std::string>& of,
                       const std::vector<std::vector<int>>& takes) {
        auto made = std::make_shared<Places>();
        size_t i = 0;
        for (const auto one : calls) {
          const py::tuple call = py::reinterpret_borrow<py::tuple>(one);
          const auto dtype = reinterpret_cast<THPDtype*>(call[3].ptr())->scalar_type;
          const auto sizes = call[1].cast<std::vector<int64_t>>(), strides = call[2].cast<std::vector<int64_t>>();
          made->list.push_back({sign_of(call[0].cast<std::string>(), sizes, strides, dtype, call[4].cast<int64_t>()), drops.at(i), moves.at(i), {static_cast<Why>(whys.at(i)), lasting(of.at(i))}, takes.at(i)});
          ++i;
        }
        return made;
      }));
}

}  // namespace leannorm::recording
