// Copies of what rebuilds need and others may write: of small tensors that existed before the pass, such as weights, because
// an optimizer may change them, and of memory that a call is about to write.
#pragma once

#include "replay.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty_like.h>

#include <map>

namespace leannorm::recording {

// Copies a value whose memory is about to be written, if others are rebuilt from it.
inline void copy_before_write(Log& log, int v) {
  Value& value = log.values[v];
  if (!value.held.defined() || value.copied || value.refs <= value.saves) return;
  const Tensor now = value.elsewhere ? Replay(log).brought(v) : value.held;
  if (!value.elsewhere || !value.elsewhere->is_other) value.held = copy_of(now, value.made), value.copied = true;
}

// Copies one small tensor. Those on a device are copied together when the pass ends, by one call.
inline void copy_small(Log& log, int v) {
  Value& x = log.values[v];
  if (is_on_device(x.made) && !log.gathers) return log.to_copy.push_back(v);
  x.held = copy_of(x.held, x.made), x.copied = true;
}
inline void copy_all_small(Log& log) {
  std::map<c10::Device, std::vector<int>, bool (*)(c10::Device, c10::Device)> of_device([](c10::Device a, c10::Device b) { return a.str() < b.str(); });
  for (const int v : log.to_copy) {
    const Value& x = log.values[v];
    auto& same = of_device[x.made.device];
    const bool is_known = std::find(same.begin(), same.end(), v) != same.end();
    if (!is_known && !x.pinned && x.refs > 0 && x.held.defined() && !x.copied && !x.lost && log.is_there(v) && log.is_unedited(x)) same.push_back(v);
  }
  log.to_copy.clear();
  for (const auto& [device, same] : of_device) {
    const Below below;
    std::vector<Tensor> from, to;
    for (const int v : same) {
      const Value& x = log.values[v];
      Geometry bytes = x.made;
      bytes.sizes = {x.storage_bytes}, bytes.strides = {1}, bytes.offset = 0, bytes.dtype = at::kByte;
      from.push_back(over(x.held.storage(), bytes)), to.push_back(at::empty_like(from.back()));
    }
    if (!same.empty()) at::_foreach_copy_(to, from);
    for (size_t i = 0; i < same.size(); ++i) {
      Value& x = log.values[same[i]];
      x.held = over(to[i].storage(), x.made), x.copied = true, x.on = stream_of(x.made);
    }
  }
}

}  // namespace leannorm::recording
