// Which nodes work in place, if they do not show it: seen when their operator was called. An addition's node is the
// same whether it made a new tensor or edited its first input.
#pragma once

#include "graph.h"

#include <ATen/SequenceNumber.h>

#include <algorithm>
#include <string_view>

namespace leannorm {

// What one thread has called while passes were open in it. The number of the next node identifies operators and
// nodes.
struct Edits {
  static constexpr size_t kMost = 1 << 16;
  std::vector<uint64_t> in_place;  // ascending
  uint64_t since = 0;
  int passes = 0;
  at::CallbackHandle handle = 0;

  void saw(const at::RecordFunction& call) {
    if (call.seqNr() < 0) return;  // below autograd
    const uint64_t number = call.seqNr();
    if (!in_place.empty() && in_place.back() == number) in_place.pop_back();  // that call has made no node
    const std::string_view name = call.name();
    if (name.empty() || name.back() != '_') return;
    if (in_place.size() == kMost) {  // a pass that was never closed in its thread
      since = in_place[kMost / 2];
      in_place.erase(in_place.begin(), in_place.begin() + kMost / 2);
    }
    in_place.push_back(number);
  }
};
inline thread_local Edits edits;

// The engine's threads inherit it with the state of the thread that called them.
inline std::unique_ptr<at::ObserverContext> see(const at::RecordFunction& call) {
  if (edits.passes > 0) edits.saw(call);
  return nullptr;
}

inline void watch_edits() {
  if (edits.passes++ > 0) return;
  edits.in_place.clear(), edits.since = at::sequence_number::peek();
  at::RecordFunctionCallback callback(&see);
  edits.handle = at::addThreadLocalCallback(callback.scopes({at::RecordScope::FUNCTION}));
}
inline void stop_watching() {
  if (edits.passes > 0 && --edits.passes == 0) at::removeCallback(edits.handle);
}

// Whether anyone else listens to operators in this thread, such as a profiler.
inline bool others_listen() {
  if (!at::hasCallbacks()) return false;
  const auto called = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
  if (!called.has_value()) return false;
  return std::any_of(called->callbacks_.begin(), called->callbacks_.end(), [](const auto& one) { return one.start_ != &see; });
}

enum class InPlace { kNo, kYes, kUnknown };
inline InPlace worked_in_place(const Node& node) {
  const bool watched = edits.passes > 0 && at::isRecordFunctionEnabled();
  const bool own = node.thread_id() == at::RecordFunction::currentThreadId() && node.sequence_nr() >= edits.since;
  if (!watched || !own) return InPlace::kUnknown;
  return std::binary_search(edits.in_place.begin(), edits.in_place.end(), node.sequence_nr()) ? InPlace::kYes : InPlace::kNo;
}
// worked_in_place(node): None if that was not seen.
inline std::optional<bool> asked_in_place(py::handle object) {
  const Node* const node = node_of(object.ptr());
  const InPlace told = node == nullptr ? InPlace::kUnknown : worked_in_place(*node);
  return told == InPlace::kUnknown ? std::nullopt : std::optional(told == InPlace::kYes);
}

}  // namespace leannorm
