// Writes the log: a thread-local callback of torch's RecordFunction sees each operator call with its arguments before it
// runs, and with its results afterwards.
#pragma once

#include "others.h"
#include "plan.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

namespace leannorm::recording {

inline thread_local Rules rules;
inline thread_local int parts = 0;  // how many operators the call that began last has used below autograd

// What recording takes is no time of the operator that is recorded, or that saves.
struct Recording {
  const std::shared_ptr<Log> log = current && current->measures ? current : nullptr;
  const double start = log ? clock_now() : 0;
  Recording() = default;
  Recording(const Recording&) = delete;
  ~Recording() {
    if (!log) return;
    const double taken = clock_now() - start;
    log->in_hooks += taken, log->spent->recording += taken;
  }
};

struct Opened : at::ObserverContext {
  std::shared_ptr<Log> log;
  int call = 0;
  double start = 0;  // in seconds, the time in hooks subtracted
  bool hides = false;  // whether no callback sees the calls within this one
};

inline void read_tensor(Log& log, Call& call, int at, int place, const Tensor& t) {
  if (!t.defined()) return;
  if (call.rule->formula == Formula::kMatrix) {  // a jagged tensor has no number for each size
    const bool has_sizes = t.dim() > 0 && !t.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
    call.whole.push_back(has_sizes ? t.size(-1) : 1);
  }
  if (!plain(t)) {
    call.usable = false, call.of_subclass |= t.key_set().has(c10::DispatchKey::Python);
    return;
  }
  const size_t known = log.values.size();
  const int v = log.value_or_new(t);
  Value& x = log.values[v];
  const bool is_new = log.values.size() > known;
  const bool is_empty = x.storage_bytes == 0 && x.made.numel() == 0;  // as the cache of a language model is at first
  const bool is_freed_later = is_new && t.dim() == 1 && x.storage_bytes <= kCopied && gathered(log, t) > 0;  // as a norm's weight may be
  if (is_freed_later || (is_empty && x.state == Value::kFree))
    x.held = copy_of(t, x.made), x.sample = Sample::of(x.held), x.copied = true, x.state = Value::kHeld;
  if (is_new) {
    const Tensor base = base_of(t);
    x.weight = base.is_leaf() && base.requires_grad();
  }
  int geometry = -1;
  if (!log.values[v].made.is_of(t)) {
    geometry = static_cast<int>(log.geometries.size());
    log.geometries.push_back(Geometry::of(t));
    if (log.geometries.back().extent() > log.values[v].made.extent()) {  // more memory than its call made
      if (log.values[v].state == Value::kDropped) call.usable = false;
      else log.values[v].call = -1;
    }
  }
  if (log.may_plan) note_gradient(log.values[v], t);
  call.reads.push_back({at, place, v, geometry, /*saved=*/false, /*wants=*/t.requires_grad()});
}

inline bool reads_subclass(c10::ArrayRef<const IValue> inputs) {
  const auto is = [](const Tensor& t) { return t.defined() && t.key_set().has(c10::DispatchKey::Python); };
  for (const IValue& v : inputs) {
    if (v.isTensor() && is(v.toTensor())) return true;
    if (v.isTensorList())
      for (const Tensor& t : v.toTensorVector()) if (is(t)) return true;
  }
  return false;
}

// Notes that this call is going to write the memory of `t`.
inline void about_to_write(Log& log, int number, Call& call, const Tensor& t) {
  if (!plain(t, /*in_any_bits=*/true)) return;
  const int v = log.value_or_new(t);
  if (const Value& x = log.values[v]; !call.rule->reshapes && x.held.defined() && !x.copied && x.refs > x.saves) {
    if (x.call < 0 && gathered(log, t) > 0) return;
    copy_before_write(log, v);
  }
  if (const auto away = log.values[v].elsewhere; away && !call.rule->reshapes) away->settle();
  Memory& memory = log.memories[log.values[v].memory];
  call.writing.push_back(log.values[v].memory);
  memory.sent |= call.rule->sends;
  memory.writer = number, memory.counter = t.unsafeGetTensorImpl()->version_counter(), memory.version = t._version();
}

// Visits the tensors that the call writes.
template <class Visit> void for_written(const Rule& rule, c10::ArrayRef<const IValue> inputs, const Visit& visit) {
  if (rule.gate >= 0 && !(rule.gate < static_cast<int>(inputs.size()) && inputs[rule.gate].isBool() && inputs[rule.gate].toBool())) return;
  for (const int at : rule.writes) {
    if (at >= static_cast<int>(inputs.size())) continue;
    const IValue& v = inputs[at];
    if (v.isTensor()) visit(v.toTensor());
    else if (v.isTensorList()) {
      for (const Tensor& t : v.toTensorVector()) visit(t);
    } else if (v.isList()) {
      for (const IValue& list : v.toListRef())
        if (list.isTensorList())
          for (const Tensor& t : list.toTensorVector()) visit(t);
    }
  }
}

// Whether it is a Python number for which torch has made a tensor, which nothing else reads or writes.
inline bool is_number(const IValue& v) { return v.isTensor() && v.toTensor().defined() && v.toTensor().unsafeGetTensorImpl()->is_wrapped_number(); }

// The tensor that the log keeps of it: a copy, since a call may write into torch's own, and one for all equal numbers.
inline const Tensor& number_of(const Tensor& t) {
  static thread_local std::unordered_map<std::string, Tensor> known;
  constexpr size_t kMost = 4096;
  if (known.size() >= kMost) known.clear();
  std::string value(static_cast<const char*>(t.const_data_ptr()), t.nbytes());
  value.push_back(static_cast<char>(t.scalar_type()));
  Tensor& kept = known[std::move(value)];
  if (!kept.defined()) kept = copy_of(t, Geometry::of(t)), kept.unsafeGetTensorImpl()->set_wrapped_number(true);
  return kept;
}

inline void read_arguments(Log& log, Call& call, c10::ArrayRef<const IValue> inputs) {
  call.args.reserve(inputs.size());
  int at = 0;
  for (const IValue& v : inputs) {
    if (is_number(v)) call.args.emplace_back(number_of(v.toTensor()));
    else if (v.isTensor()) read_tensor(log, call, at, 0, v.toTensor()), call.args.emplace_back();
    else if (v.isTensorList()) {
      for (const Tensor& t : v.toTensorVector()) read_tensor(log, call, at, 0, t), call.usable &= t.defined();
      call.args.emplace_back(c10::List<Tensor>());
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> empty;
      for (const std::optional<Tensor> t : v.toOptionalTensorList()) {
        if (t.has_value()) read_tensor(log, call, at, static_cast<int>(empty.size()), *t);
        empty.push_back(std::nullopt);
      }
      call.args.emplace_back(std::move(empty));
    } else {
      const bool holds = v.isGenerator() || v.isObject() || v.isPyObject() || (v.isList() && v.toListRef().size() && v.toListRef()[0].isTensorList());
      call.usable &= !holds;
      holds ? call.args.emplace_back() : call.args.emplace_back(v);
    }
    ++at;
  }
}

inline std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& fn);
inline std::unique_ptr<at::ObserverContext> see_write(const at::RecordFunction& fn);

constexpr int kParts = 2;  // to hide fewer takes longer than to see them

// Whether observation may pause while this call runs, so that torch does not collect the arguments of the operators that it uses.
// Each condition is one under which somebody needs to see them: autocast's casts and transforms' calls are logged themselves.
inline bool may_hide(const Call& call, const c10::impl::LocalDispatchKeySet& keys) {
  constexpr c10::DispatchKeySet transforms({c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode,
                                            c10::DispatchKey::FuncTorchVmapMode, c10::DispatchKey::Functionalize, c10::DispatchKey::Python});
  if (!call.rule->whole || call.rule->parts < kParts || !call.usable || keys.included_.has_any(transforms)) return false;
  if (!keys.excluded_.has_all(c10::autocast_dispatch_keyset) || are_hooks_of_others()) return false;
  if (at::hasGlobalCallbacks()) return false;
  const auto& callbacks = at::get_record_function_tls_().sorted_tls_callbacks_;
  return std::all_of(callbacks.begin(), callbacks.end(), [](const auto& one) { return one.callback_.start() == &begin || one.callback_.start() == &see_write; });
}

// torch::empty and the like run below autograd, where no call is logged. Of them the log only learns that the
// memory is new: the tensor that the program gets has another version counter.
constexpr int kOfNewMemory = -1;
inline std::unique_ptr<at::ObserverContext> for_new_memory() {
  auto opened = std::make_unique<Opened>();
  opened->log = current, opened->call = kOfNewMemory;
  return opened;
}
inline void read_new_memory(const at::RecordFunction& fn, Log& log) {
  const Log::Lock lock(log);
  if (log.closed || fn.outputs().size() != 1 || !fn.outputs()[0].isTensor()) return;
  const Tensor& t = fn.outputs()[0].toTensor();
  if (t.defined() && plain(t)) log.fresh.emplace(t.storage().unsafeGetStorageImpl(), t.storage().getWeakStorageImpl());
}

inline std::unique_ptr<at::ObserverContext> read_call(const at::RecordFunction& fn) {
  Rule* const rule = rules.of(fn);
  if (rule == nullptr) return nullptr;
  if (rules.is_compiled(rule)) return current->meets(kCompiled), nullptr;
  if (rule->sends) {
    const Log::Lock lock(*current);
    for (const int call : current->open) current->calls[call].sends = true;
  }
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  const bool inference = c10::InferenceMode::is_enabled();  // inference mode excludes autograd too
  const bool is_part = keys.excluded_.has(c10::DispatchKey::AutogradFunctionality) && !inference;  // of a logged call
  if (is_part) ++parts;
  if (rule->kind == Kind::kSkip && !(current->subclasses && reads_subclass(fn.inputs()))) return nullptr;
  if (is_part && !rule->ours && !current->is_in_call_of_calls()) return current->open.empty() && rule->writes.empty() ? for_new_memory() : nullptr;
  Log& log = *current;
  const Log::Lock lock(log);
  constexpr size_t kMany = 4096;
  if (log.alive == 0 && log.open.empty() && log.calls.size() > kMany) log.start_over();
  const int number = static_cast<int>(log.calls.size());
  if (log.may_plan) note_freed(log, number);
  log.calls.emplace_back();
  log.calls.back().rule = rule, log.calls.back().usable = false;  // until all of its arguments have been read
  Call call;
  call.rule = rule, call.grad_mode = c10::GradMode::is_enabled(), call.outer = log.is_in_subclass() ? log.open.back() : -1;
  call.in_checkpoint = runs_in_checkpoint();
  const auto flags = log.number_of_flags();
  call.flags = flags.value_or(0), call.of_mode = are_modes();
  call.usable = flags.has_value() && !inference && !call.of_mode;
  read_arguments(log, call, fn.inputs());
  const bool hides = may_hide(call, keys);
  if (rule->kind != Kind::kSkip) for_written(*rule, fn.inputs(), [&](const Tensor& t) { about_to_write(log, number, call, t); });
  log.calls[number] = std::move(call);
  log.open.push_back(number);
  auto opened = std::make_unique<Opened>();
  opened->log = current, opened->call = number, opened->hides = hides;
  if (hides) at::enableRecordFunction(false);
  parts = 0;
  return opened;
}

inline void made_by(Log& log, int number, int out, const Tensor& t) {
  if (!plain(t)) return;
  const int v = log.value_of(t);
  Call& call = log.calls[number];
  if (v < 0) {
    const int fresh = log.new_memory(t, number);
    log.values[fresh].out = out;
    if (log.may_plan) note_gradient(log.values[fresh], t);
    call.outs.push_back(fresh);
  } else if (log.values[v].call == number && std::find(call.outs.begin(), call.outs.end(), v) == call.outs.end()) {
    log.values[v].out = out, log.values[v].made = Geometry::of(t);  // saved before the call ended
    call.outs.push_back(v);
  }
}

inline bool is_differentiable(const std::vector<IValue>& results) {
  return std::any_of(results.begin(), results.end(), [](const IValue& v) { return v.isTensor() && v.toTensor().requires_grad(); });
}

inline void read_results(const at::RecordFunction& fn, Opened* const opened) {
  Log& log = *opened->log;
  const Log::Lock lock(log);
  const int number = opened->call;
  const bool is_known = number < static_cast<int>(log.calls.size());
  if (is_known) {
    auto& most = log.calls[number].rule->parts;
    most = std::max<int>(most, std::exchange(parts, 0));
  }
  if (is_known && log.measures) {
    log.seconds.resize(log.calls.size());
    const double taken = clock_now() - log.in_hooks - opened->start;
    log.seconds[number] = static_cast<float>(taken), log.in_hooks += taken;  // it is no time of a call around it
  }
  const bool is_there = is_known && !log.closed;
  for (const int memory : is_there ? log.calls[number].writing : decltype(Call::writing)())
    if (Value& x = log.values[log.memories[memory].current]; log.is_in_mode(memory, x)) x.version = x.counter.current_version();
  while (!log.open.empty() && log.open.back() >= number) log.open.pop_back();
  if (!is_there) return;
  if (fn.outputs().empty()) log.calls[number].usable = false;  // it raised an error, or has no result
  for (const int memory : log.calls[number].writing)
    if (log.memories[memory].writer == number) log.written(memory);
  int out = 0;
  for (const IValue& result : fn.outputs()) {
    if (result.isTensor()) made_by(log, number, out, result.toTensor());
    else if (result.isTensorList()) {
      int within = Replay::kInList;
      for (const Tensor& t : result.toTensorVector()) made_by(log, number, within++, t);
    }
    ++out;
  }
  if (log.calls[number].grad_mode && !log.calls[number].outs.empty() && are_hooks_of_others() && is_differentiable(fn.outputs())) log.meets(kOthersHooks);
  const auto waiting = std::exchange(log.calls[number].waiting, {});
  for (const int v : waiting) {
    if (log.failed) return;
    log.failed = true;  // until it is decided
    decide(log, v);
    log.failed = false;
  }
}

// The program goes on where its call cannot be recorded: what the call makes or writes is then like what was there before.
template <class Run> auto isolated(Log& log, const Run& run) -> decltype(run()) {
  try {
    return run();
  } catch (const std::exception&) {
    log.meets(kFailed);
    return decltype(run())();
  }
}
inline std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& fn) {
  if (!current || busy) return nullptr;
  std::unique_ptr<at::ObserverContext> made;
  {
    const Recording timed;
    made = isolated(*current, [&fn] { return read_call(fn); });
  }
  if (made && current->measures) static_cast<Opened*>(made.get())->start = clock_now() - current->in_hooks;
  return made;
}
inline void end(const at::RecordFunction& fn, at::ObserverContext* context) {
  auto* const opened = static_cast<Opened*>(context);
  if (!opened) return;
  if (opened->hides) at::enableRecordFunction(true);
  const Recording timed;
  isolated(*opened->log, [&] { opened->call == kOfNewMemory ? read_new_memory(fn, *opened->log) : read_results(fn, opened); });
}

}  // namespace leannorm::recording
