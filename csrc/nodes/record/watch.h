// Watches writes after a pass. A dropped value may be rebuilt from memory that other code also has, and may edit in plain
// PyTorch, such as a tensor that a branch saved, once that branch's backward pass is done. The callback costs 0.3 microseconds
// per operator, and torch collects each operator's arguments and names each node for it, so it is set only while there is such
// memory.
#pragma once

#include "freed.h"
#include "recorder.h"

#include <torch/csrc/autograd/engine.h>

namespace leannorm::recording {

inline void make_safe(Log& log, int v, c10::StorageImpl* memory) {
  Value& x = log.values[v];
  if (!x.exposed) return;
  const bool is_it = x.elsewhere ? x.elsewhere->memory._unsafe_get_target() == memory
                                 : x.held.defined() && x.held.storage().unsafeGetStorageImpl() == memory;
  if (!is_it) return;
  const Tensor was = x.held;
  copy_before_write(log, v);
  if (const auto away = log.values[v].elsewhere) away->settle();
  if (Value& made = log.values[v]; made.copied && !made.elsewhere) made.shown = was;  // nodes that saved it read the edit, if autograd does not see it
  hide(log, log.values[v]);
}

inline std::unique_ptr<at::ObserverContext> see_write(const at::RecordFunction& fn);

inline bool is_watch(const at::RecordFunctionCallbacksEntry& one) { return one.callback_.start() == &see_write; }
// Removes the callback by its function: the engine gives its own threads the caller's callbacks, where no handle is valid.
inline void stop_watching_writes() {
  auto tls = at::get_record_function_tls_();
  std::erase_if(tls.sorted_tls_callbacks_, is_watch);
  at::set_record_function_tls_(tls);
}
inline void watch_writes() {
  const auto& tls = at::get_record_function_tls_().sorted_tls_callbacks_;
  if (std::any_of(tls.begin(), tls.end(), is_watch)) return;
  at::RecordFunctionCallback callback(&see_write);
  at::addThreadLocalCallback(callback.needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

inline std::unique_ptr<at::ObserverContext> see_write(const at::RecordFunction& fn) {
  if (busy) return nullptr;
  if (watched().left == 0) {
    if (torch::autograd::get_current_graph_task_id() < 0) stop_watching_writes();
    return nullptr;
  }
  const Rule* const rule = rules.of(fn);
  if (rule == nullptr || rule->reshapes) return nullptr;
  for_written(*rule, fn.inputs(), [](const Tensor& t) {
    if (!plain(t, /*in_any_bits=*/true)) return;
    auto* const memory = t.storage().unsafeGetStorageImpl();
    std::vector<std::pair<std::shared_ptr<Log>, int>> found;
    {
      const std::lock_guard lock(watched().mutex);
      std::erase_if(watched().all, [](const auto& one) { return one->left == 0; });
      for (const auto& one : watched().all)
        if (const auto known = one->values.find(memory); known != one->values.end())
          if (auto log = one->log.lock()) found.emplace_back(std::move(log), known->second);
    }
    for (const auto& [log, v] : found) {
      const Log::Lock lock(*log);
      make_safe(*log, v, memory);
    }
  });
  return nullptr;
}

// Finds the memory that a closed log needs and that other code has too. Four kinds are left out. What a call's own node saved:
// editing that is an error in plain PyTorch while the call's result is in use. Statistics that only a norm's node has saved:
// only torch reads them. Parameters: they are edited only after the backward pass. Gathered weights: they are freed and get the
// same contents again, and a copy would be made while they are freed.
inline void expose(const std::shared_ptr<Log>& log) {
  auto made = std::make_shared<Exposed>();
  const auto look = [&](int v) {
    Value& x = log->values[v];
    if (x.exposed || x.state != Value::kHeld || x.copied || x.lost || x.code || x.refs <= x.saves || x.weight || !x.held.defined()) return;
    c10::StorageImpl* memory = x.elsewhere ? x.elsewhere->memory._unsafe_get_target() : x.held.storage().unsafeGetStorageImpl();
    const size_t owners = x.elsewhere ? x.elsewhere->memory.use_count() : x.held.storage().use_count() - 1;
    if (owners == 0 || (log->gathers && x.call < 0 && gathered(*log, x.held) > 0) || !made->values.emplace(memory, v).second) return;
    x.exposed = true;
  };
  const auto has_own = [&](const Call& call, int v) { return call.grad_mode && log->values[v].saves == 1 && is_ours_alone(*log, v); };
  for (const Call& call : log->calls) {
    const bool again = std::any_of(call.outs.begin(), call.outs.end(), [&](int out) { return log->values[out].state == Value::kDropped; });
    if (!again) continue;
    for (const Read& read : call.reads)
      if (!read.saved && is_read(*log, call, read)) look(read.value);
    for (const int out : results_read(call))
      if (const int v = result_of(*log, call, out); v >= 0 && !has_own(call, v)) look(v);
  }
  if (made->values.empty()) return;
  made->log = log, made->left = static_cast<int>(made->values.size());
  watched().left += made->left, log->exposed = made;
  {
    const std::lock_guard lock(watched().mutex);
    watched().all.push_back(std::move(made));
  }
  watch_writes();
}

}  // namespace leannorm::recording
