// Contiguous rows that do not follow each other: the heads of a projection's slice, for example.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "tensors.h"

namespace leannorm {

// Whether the axes start..stop-1 of x are contiguous.
inline bool is_line(const Tensor& x, int64_t start, int64_t stop) {
  const auto size = x.sizes(), stride = x.strides();
  int64_t expected = 1;
  for (int64_t d = stop; d-- > start; expected *= size[d])
    if (size[d] != 1 && stride[d] != expected) return false;
  return true;
}

// The rows of kTensors tensors of one shape and of their statistics, in the order of the first one's memory.
// Runs are the longest stretches over which every tensor continues with the same step.
template <int kTensors> class Runs {
 public:
  using Offsets = std::array<int64_t, kTensors + 1>;  // elements; the statistics' is the last

  Runs(const std::array<const Tensor*, kTensors>& tensors, int64_t start, int64_t stop) {
    const auto size = tensors[0]->sizes();
    std::vector<Axis> axes;
    int64_t statistics = 1;
    for (int64_t d = size.size(); d-- > 0;) {
      if ((start <= d && d < stop) || size[d] == 1) continue;
      Axis axis{size[d], {}};
      for (int t = 0; t < kTensors; ++t) axis.step[t] = tensors[t] == nullptr ? 0 : tensors[t]->strides()[d];
      axis.step[kTensors] = statistics;
      statistics *= size[d];
      axes.push_back(axis);
    }
    std::stable_sort(axes.begin(), axes.end(), [](const Axis& a, const Axis& b) { return a.step[0] < b.step[0]; });
    for (const Axis& axis : axes) {  // from the innermost on
      if (!axes_.empty() && goes_on(axes_.back(), axis)) axes_.back().size *= axis.size;
      else axes_.push_back(axis);
    }
    if (axes_.empty()) axes_.push_back({1, {}});
  }

  const Offsets& step() const { return axes_[0].step; }

  // The offset from a row to the same place in the next run; 0 if a run is long.
  int64_t ahead(int tensor) const {
    return axes_.size() > 1 && axes_[0].size <= kShortRun ? axes_[1].step[tensor] : 0;
  }

  // body(offsets, rows) for every run, or part of one, of the rows begin..end-1.
  template <class Body> void each(int64_t begin, int64_t end, Body body) const {
    std::vector<int64_t> index(axes_.size());
    Offsets at{};
    for (size_t i = 0, rest = begin; i < axes_.size(); ++i) {
      index[i] = rest % axes_[i].size;
      rest /= axes_[i].size;
      add(at, i, index[i]);
    }
    while (begin < end) {
      const int64_t rows = std::min(end - begin, axes_[0].size - index[0]);
      body(at, rows);
      begin += rows;
      add(at, 0, -index[0]);
      index[0] = 0;
      for (size_t i = 1; i < axes_.size(); ++i) {
        add(at, i, 1);
        if (++index[i] < axes_[i].size) break;
        add(at, i, -index[i]);
        index[i] = 0;
      }
    }
  }

 private:
  static constexpr int64_t kShortRun = 64;
  struct Axis {
    int64_t size;
    Offsets step;
  };

  static bool goes_on(const Axis& inner, const Axis& outer) {
    for (int t = 0; t <= kTensors; ++t)
      if (outer.step[t] != inner.size * inner.step[t]) return false;
    return true;
  }
  void add(Offsets& at, size_t axis, int64_t times) const {
    for (int t = 0; t <= kTensors; ++t) at[t] += times * axes_[axis].step[t];
  }

  std::vector<Axis> axes_;  // the innermost first
};

}  // namespace leannorm
