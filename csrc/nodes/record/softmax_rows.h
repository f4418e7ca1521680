// A dropped log-softmax whose gradient may read it some rows at a time (saving/rows.py): what its rows are computed from.
#pragma once

#include "replay.h"

namespace leannorm::recording {

constexpr int64_t kFewestInRows = 1 << 18;  // elements

// Whether the value is a log-softmax that is large enough, with contiguous rows.
inline bool may_be_in_rows(const Log& log, const Value& x) {
  if (x.call < 0 || x.made.numel() < kFewestInRows || log.calls[x.call].rule->name != "aten::_log_softmax") return false;
  const Call& call = log.calls[x.call];
  if (call.flags != 0) return false;  // unlike the call, its rows would be computed under the log's flags
  const int64_t dims = static_cast<int64_t>(x.made.sizes.size()), dim = call.args[1].toInt();
  return dims >= 2 && (dim == -1 || dim == dims - 1) && !call.args[2].toBool() && x.made.offset == 0 && x.made.extent() == x.storage_bytes &&
         x.made.numel() * static_cast<int64_t>(c10::elementSize(x.made.dtype)) == x.storage_bytes;
}

inline bool is_contiguous(const Geometry& g) {
  int64_t stride = 1;
  for (size_t i = g.sizes.size(); i-- > 0; stride *= g.sizes[i])
    if (g.sizes[i] != 1 && g.strides[i] != stride) return false;
  return g.offset == 0;
}

// What the log-softmax is computed from: a tensor with its rows, and the dtypes to which each row is cast. A cast that has no
// other reader is done row by row instead of being rebuilt as a whole.
struct RowsSource {
  Tensor rows;
  std::vector<at::ScalarType> casts;
};
inline RowsSource source_of_rows(Log& log, int v) {
  Replay replay(log);
  const Read read = log.calls[log.values[v].call].reads[0];
  const Geometry shape = log.geometry_of(read);
  const int in = read.value;
  const Value& x = log.values[in];
  const bool alone = is_contiguous(x.made) && is_contiguous(shape) && shape.dtype == x.made.dtype && shape.numel() == x.made.numel() && !x.rebuilt.defined();
  const auto in_rows = [&](const Tensor& t) { return t.view(shape.sizes); };
  RowsSource made;
  if (alone && x.code && (x.code->kind == Code::kUpperHalves || x.code->kind == Code::kCast)) {
    made = {in_rows(x.held), {x.made.dtype}};
  } else if (alone && x.state == Value::kDropped && x.refs == 1 && log.calls[x.call].rule->name == "aten::_to_copy" && log.calls[x.call].reads.size() == 1) {
    const Read cast = log.calls[x.call].reads[0];
    const Geometry& narrow = log.geometry_of(cast);
    if (is_contiguous(narrow) && narrow.numel() == shape.numel()) {
      made = {in_rows(shown(replay.value(cast.value), narrow)), {shape.dtype}};
      replay.used(cast.value);
    }
  }
  if (!made.rows.defined()) made = {shown(replay.value(in), shape), {}};
  replay.used(in);
  return made;
}

}  // namespace leannorm::recording
