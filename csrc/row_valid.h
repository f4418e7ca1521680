// Rows that are padding: never read, and all their results are 0. The kernels are called on the rows between them, so
// that without padding the bits are those of a call without a mask.
#pragma once

#include <algorithm>
#include <cstring>

#include "rows.h"

namespace leannorm {

// `count` lines of zeros, `step` elements of `size` bytes apart.
inline void clear(void* p, int64_t size, int64_t first, int64_t step, int64_t count, int64_t length) {
  char* at = static_cast<char*>(p) + first * size;
  for (int64_t i = 0; i < count; ++i, at += step * size) std::memset(at, 0, length * size);
}

inline void clear_lines(const RowForward& a, int64_t size, int64_t row, int64_t count) {
  const int64_t n = a.shape.kept, wide = std::max<int64_t>(size, 4);
  clear(a.y, size, row * a.y_row, a.y_row, count, n);
  if (a.residual != nullptr) clear(a.total, size, row * n, n, count, n);
  for (void* statistic : {a.mean, a.rstd}) clear(statistic, wide, row * a.statistics_row, a.statistics_row, count, 1);
}
inline void clear_lines(const RowBackward& a, int64_t size, int64_t row, int64_t count) {
  clear(a.dx, size, row * a.dx_row, a.dx_row, count, a.shape.kept);
}

// Columns of a panel: `start` of x, `at` of the statistics.
inline void clear_columns(const RowForward& a, int64_t size, int64_t start, int64_t at, int64_t columns) {
  const RowShape& s = a.shape;
  clear(a.y, size, start, s.inner, s.kept, columns);
  if (a.residual != nullptr) clear(a.total, size, start, s.inner, s.kept, columns);
  for (void* statistic : {a.mean, a.rstd}) clear(statistic, std::max<int64_t>(size, 4), at, 0, 1, columns);
}
inline void clear_columns(const RowBackward& a, int64_t size, int64_t start, int64_t at, int64_t columns) {
  clear(a.dx, size, start, a.shape.inner, a.shape.kept, columns);
}

inline const void* moved(const void* p, int64_t bytes) { return p == nullptr ? p : static_cast<const char*>(p) + bytes; }
inline void* moved(void* p, int64_t bytes) { return p == nullptr ? p : static_cast<char*>(p) + bytes; }

// The same call on these columns, as one panel.
inline RowForward narrowed(RowForward a, int64_t size, int64_t start, int64_t at, int64_t columns) {
  a.x = moved(a.x, start * size), a.y = moved(a.y, start * size);
  a.residual = moved(a.residual, start * size), a.total = moved(a.total, start * size);
  a.mean = moved(a.mean, at * std::max<int64_t>(size, 4)), a.rstd = moved(a.rstd, at * std::max<int64_t>(size, 4));
  a.shape.panel = columns, a.shape.panels = 1, a.stream = false;
  return a;
}
inline RowBackward narrowed(RowBackward a, int64_t size, int64_t start, int64_t at, int64_t columns) {
  a.x = moved(a.x, start * size), a.dx = moved(a.dx, start * size);
  a.dy = moved(a.dy, start * size), a.dtotal = moved(a.dtotal, start * size);
  a.mean = moved(a.mean, at * std::max<int64_t>(size, 4)), a.rstd = moved(a.rstd, at * std::max<int64_t>(size, 4));
  a.shape.panel = columns, a.shape.panels = 1, a.stream = false;
  return a;
}

// body(first, count) for every stretch of valid rows, rest(first, count) for every other stretch.
template <class Body, class Rest>
inline void each_stretch(const char* valid, int64_t step, int64_t begin, int64_t end, Body body, Rest rest) {
  while (begin < end) {
    const bool there = valid[begin * step] != 0;
    int64_t stop = begin + 1;
    while (stop < end && (valid[stop * step] != 0) == there) ++stop;
    if (there) body(begin, stop - begin);
    else rest(begin, stop - begin);
    begin = stop;
  }
}

// kernel(args, begin, end) for the valid rows of the units begin..end-1; the others' results are cleared. `valid` has
// a byte per row, in the order of the statistics; null: all rows are valid.
template <class Args, class Kernel>
inline void on_valid(const Args& a, const char* valid, int64_t size, int64_t begin, int64_t end, Kernel kernel) {
  const RowShape& s = a.shape;
  if (valid == nullptr) return kernel(a, begin, end);
  if (s.inner == 1)
    return each_stretch(
        valid, a.statistics_row, begin, end,
        [&](int64_t row, int64_t count) { kernel(a, row, row + count); },
        [&](int64_t row, int64_t count) { clear_lines(a, size, row, count); });
  int64_t whole = begin;  // the panels from here on have no padding
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t outer = unit / s.panels, first = unit % s.panels * s.panel;
    const int64_t columns = std::min(s.panel, s.inner - first);
    const int64_t start = outer * s.kept * s.inner + first, at = outer * s.inner + first;
    if (std::memchr(valid + at, 0, columns) == nullptr) continue;
    if (whole < unit) kernel(a, whole, unit);
    whole = unit + 1;
    each_stretch(
        valid + at, 1, 0, columns,
        [&](int64_t j, int64_t count) { kernel(narrowed(a, size, start + j, at + j, count), 0, 1); },
        [&](int64_t j, int64_t count) { clear_columns(a, size, start + j, at + j, count); });
  }
  if (whole < end) kernel(a, whole, end);
}

}  // namespace leannorm
