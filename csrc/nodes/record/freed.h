// Values whose memory only the log owns are encoded in fewer bytes.
#pragma once

#include "walk.h"

#include <torch/csrc/autograd/python_variable.h>

namespace leannorm::recording {

inline Py_ssize_t references_of(const Tensor& t) {  // including the one that is taken here
  return Py_REFCNT(py::reinterpret_steal<py::object>(THPVariable_Wrap(t)).ptr());
}
// Whether no Python code has this tensor, and only so many owners in C++ do. The test creates its Python object if there is
// none. torch counts that as one more owner, and itself has one reference to it or none, depending on the release.
inline bool has_owners(const Tensor& t, size_t owners) {
  static const Py_ssize_t when_alone = references_of(at::empty({1}));
  return references_of(t) == when_alone && t.use_count() <= owners + 1;
}

// Whether a copy can replace the memory: it is unchanged since it was saved, torch's own allocator made it
// (`may_be_coded`), and its only owners are the log's alias and the leaves that saved objects keep, which have no other
// owner themselves. Anything else that could read or write it (a tensor, a view, an array, a running operator) would be
// one more owner.
inline bool is_ours_alone(Log& log, int v) {
  const Value& x = log.values[v];
  if (!x.held.defined() || x.copied || x.lost || x.shown.defined() || !log.is_there(v)) return false;
  if (x.counter.current_version() != x.version) return false;
  std::map<c10::TensorImpl*, size_t> leaves;
  if (const auto held = log.leaves.find(v); held != log.leaves.end())
    for (const Tensor* const leaf : held->second) ++leaves[leaf->unsafeGetTensorImpl()];
  if (!x.is_owned_by_log(leaves.size())) return false;
  if (!leaves.empty())
    for (const Tensor* const leaf : log.leaves[v])
      if (!has_owners(*leaf, leaves[leaf->unsafeGetTensorImpl()])) return false;
  return true;
}

// Encodes the waiting values that are due, or `all` of them when the pass ends. If a value's memory still has another owner, it
// is tried again after four times as many packed tensors as before. Returns whether any was encoded.
inline bool encode_freed(Log& log, bool all = false) {
  bool any = false;
  while (!log.waiting.empty() && (all || log.waiting.top().due <= log.packs)) {
    Waiting one = log.waiting.top();
    log.waiting.pop();
    const Value& x = log.values[one.value];
    if (!x.held.defined() || x.copied) continue;  // it was freed or dropped, or is a copy already
    if (is_ours_alone(log, one.value)) {
      const auto leaves = log.leaves.find(one.value);
      const bool is_encoded = encode(log, one.value);
      any |= is_encoded;
      if (!is_encoded || leaves == log.leaves.end()) continue;
      const std::vector<Tensor*> of = std::move(leaves->second);
      log.leaves.erase(leaves);
      for (Tensor* const leaf : of) leaf->reset();
    } else if (!all) {
      one.gap *= 4, one.due = log.packs + one.gap;
      log.waiting.push(one);
    }
  }
  return any;
}

}  // namespace leannorm::recording
