// Values whose memory the log alone holds are held in fewer bytes.
#pragma once

#include "walk.h"

#include <torch/csrc/autograd/python_variable.h>

namespace leannorm::recording {

inline Py_ssize_t references_of(const Tensor& t) {  // one of them is taken here
  return Py_REFCNT(py::reinterpret_steal<py::object>(THPVariable_Wrap(t)).ptr());
}
// Does no Python code have this tensor, and of C++ only these owners? A Python object is made where there is none: torch
// counts it as one owner more, and keeps one reference to it or none, by its release.
inline bool has_owners(const Tensor& t, size_t owners) {
  static const Py_ssize_t when_alone = references_of(at::empty({1}));
  return references_of(t) == when_alone && t.use_count() <= owners + 1;
}

// The evidence that a copy may take the place of the memory: it is as it was saved, torch's own allocator made it
// (`may_be_coded`), and its owners are counted. They are the log's alias and the leaves that saved objects hold, which
// have no other owner themselves. Whoever else could read or write it (a tensor, a view, an array, an operator that
// runs) would be one more.
inline bool is_ours_alone(Log& log, int v) {
  const Value& x = log.values[v];
  if (!x.held.defined() || x.copied || x.lost || x.shown.defined() || !log.is_there(v)) return false;
  const size_t objects = x.made.fake ? 1 : 0;  // of a fake tensor Python's object is always there, and its storage's
  if (x.counter.current_version() != x.version || x.held.use_count() > 1 + objects) return false;
  std::map<c10::TensorImpl*, size_t> leaves;
  if (const auto held = log.leaves.find(v); held != log.leaves.end())
    for (const Tensor* const leaf : held->second) ++leaves[leaf->unsafeGetTensorImpl()];
  if (x.held.storage().use_count() > 1 + leaves.size() + objects) return false;
  if (!leaves.empty())
    for (const Tensor* const leaf : log.leaves[v])
      if (!has_owners(*leaf, leaves[leaf->unsafeGetTensorImpl()])) return false;
  return true;
}

// Look at those whose turn it is; `all` of them where the pass ends. Whose memory is still somebody's is looked at again,
// each time four times later.
inline void encode_freed(Log& log, bool all = false) {
  while (!log.waiting.empty() && (all || log.waiting.top().due <= log.packs)) {
    Waiting one = log.waiting.top();
    log.waiting.pop();
    const Value& x = log.values[one.value];
    if (!x.held.defined() || x.copied) continue;  // it has gone, or was dropped
    if (is_ours_alone(log, one.value)) {
      const auto leaves = log.leaves.find(one.value);
      if (!encode(log, one.value) || leaves == log.leaves.end()) continue;
      const std::vector<Tensor*> of = std::move(leaves->second);
      log.leaves.erase(leaves);
      for (Tensor* const leaf : of) leaf->reset();
    } else if (!all) {
      one.gap *= 4, one.due = log.packs + one.gap;
      log.waiting.push(one);
    }
  }
}

}  // namespace leannorm::recording
