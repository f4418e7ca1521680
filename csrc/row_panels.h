// Interleaved rows: element (k, j) of a panel is `inner` * k + j from its start.
#pragma once

#include "row_sums.h"

namespace leannorm::LEANNORM_ISA::rows {

constexpr int64_t kMostColumns = 1024;  // interleaved rows in a panel, at most

struct Panel {
  int64_t start, columns, statistics;  // of x and of mean and rstd

  Panel(const RowShape& s, int64_t unit) {
    const int64_t outer = unit / s.panels, first = unit % s.panels * s.panel;
    start = outer * s.kept * s.inner + first;
    columns = smaller(s.panel, s.inner - first);
    statistics = outer * s.inner + first;
  }
};

// One value for every column, where each vector of them is a line of the nearest cache.
template <class S> struct alignas(64) Columns {
  S of[kMostColumns];

  void copy(const S* from, int64_t columns) {
    for (int64_t j = 0; j < columns; ++j) of[j] = from[j];
  }
};

// Two sums for every column.
struct alignas(64) PanelSums {
  double first[kMostColumns], second[kMostColumns];

  template <class V> void add(int64_t at, Pair<Wide<V>> v) {
    constexpr int W = lanes<V>;
    store_wide(first + at, load_wide<V>(first + at, W) + v.first, W);
    store_wide(second + at, load_wide<V>(second + at, W) + v.second, W);
  }
};
static_assert(kMostColumns % (64 / sizeof(float)) == 0, "a column sum takes whole vectors");

// The two sums of each column; value(extent, k, j, lanes) returns the terms of one vector of row k of the panel, in
// the compute type or wide. They are added in that type for kShort rows, in float64 from there on.
template <class V, class Value>
inline void column_sums(int64_t kept, int64_t columns, PanelSums& sums, Value value) {
  constexpr int W = lanes<V>;
  const int64_t padded = (columns + W - 1) / W * W;
  for (int64_t j = 0; j < padded; ++j) sums.first[j] = sums.second[j] = 0;
  for (int64_t k = 0; k < kept; k += kShort) {
    const int64_t end = smaller(kept, k + kShort);
    int64_t j = 0;
    for (; j + 4 * W <= columns; j += 4 * W) {  // whole cache lines, in the order of memory
      decltype(value(Whole{}, k, j, W)) a{}, b{}, c{}, d{};
      for (int64_t at = k; at < end; ++at) {
        a = a + value(Whole{}, at, j, W);
        b = b + value(Whole{}, at, j + W, W);
        c = c + value(Whole{}, at, j + 2 * W, W);
        d = d + value(Whole{}, at, j + 3 * W, W);
      }
      sums.add<V>(j, widen(a));
      sums.add<V>(j + W, widen(b));
      sums.add<V>(j + 2 * W, widen(c));
      sums.add<V>(j + 3 * W, widen(d));
    }
    each_vector<W>(columns - j, [&](auto extent, int64_t i, int64_t count) {
      decltype(value(extent, k, j, count)) part{};
      for (int64_t at = k; at < end; ++at) part = part + value(extent, at, j + i, count);
      sums.add<V>(j + i, widen(part));
    });
  }
}

// Every row of a panel is on another page, which the machine's own prefetching does not cross: each vector prefetches
// the one that is read kShort rows later, and while a panel is written, its place in the next one and what is written
// some rows later.
inline int64_t rows_later(const RowShape& shape) { return kShort * shape.inner; }
template <class T> inline int64_t written_later(const RowShape& shape, int64_t columns) {
  return larger(1, kLookAhead<T> / columns) * shape.inner;
}
inline int64_t next_panel(const RowShape& shape, int64_t unit, int64_t end) {
  return Panel(shape, smaller(unit + 1, end - 1)).start - Panel(shape, unit).start;
}

// Sums of the deviations from `centre` and of their squares, of every column.
template <class T, bool kWide>
inline void deviations(const T* x, const RowShape& shape, int64_t columns, const ScalarOf<T>* centre,
                       PanelSums& sums) {
  using V = VectorOf<T>;
  const int64_t later = rows_later(shape);
  column_sums<V>(shape.kept, columns, sums, [&](auto extent, int64_t k, int64_t j, int64_t count) {
    using E = decltype(extent);
    const T* const p = x + k * shape.inner + j;
    if constexpr (!kWide) fetch_near(p + later);
    const V value = load<E>(p, count), from = load<E>(centre + j, count);
    if constexpr (kWide) {
      const Wide<V> d = widen(value) - widen(from);
      return Pair<Wide<V>>{d, d * d};
    } else {
      const V d = value - from;
      return Pair<V>{d, d * d};
    }
  });
}

// Mean (rounded, as it is kept) and rstd of every column. The first rows give a centre near the mean; the sum of the
// deviations from it corrects both. If it was not near, or squares left float32's range, the deviations are taken
// again, from the corrected mean and in float64.
template <class T>
inline void panel_moments(const T* x, const RowForward& a, int64_t columns, ScalarOf<T>* mean,
                          ScalarOf<T>* rstd) {
  using V = VectorOf<T>;
  using S = ScalarOf<T>;
  const int64_t kept = a.shape.kept, inner = a.shape.inner, few = smaller(kept, kShort);
  PanelSums sums;
  for (int64_t j = 0; j < columns; ++j) mean[j] = 0;
  if (!a.rms) {
    column_sums<V>(few, columns, sums, [&](auto extent, int64_t k, int64_t j, int64_t count) {
      return Pair<V>{load<decltype(extent)>(x + k * inner + j, count), V{}};
    });
    for (int64_t j = 0; j < columns; ++j) mean[j] = static_cast<S>(sums.first[j] / few);
  }
  deviations<T, false>(x, a.shape, columns, mean, sums);
  const auto near = [&] {
    bool all = true;
    for (int64_t j = 0; j < columns; ++j) {
      const double square = sums.second[j], rest = a.rms ? 0 : sums.first[j];
      const bool constant = square == 0 && sums.first[j] == 0 && first_of(x + j) == mean[j];
      all = all && (constant || (in_range(square) && 2 * rest * rest <= square * kept));
    }
    return all;
  };
  const auto mend = [&](int64_t j) { return a.rms ? 0 : sums.first[j] / kept; };
  if (!near()) {
    deviations<T, true>(x, a.shape, columns, mean, sums);
    for (int64_t j = 0; j < columns; ++j) mean[j] = static_cast<S>(mean[j] + mend(j));
    deviations<T, true>(x, a.shape, columns, mean, sums);
  }
  for (int64_t j = 0; j < columns; ++j) {
    rstd[j] = static_cast<S>(rstd_of(sums.second[j], mend(j), kept, a.eps));
    mean[j] = static_cast<S>(mean[j] + mend(j));
  }
}

template <class T, bool kStream>
inline void panel_forward_as(const RowForward& a, int64_t begin, int64_t end) {
  using V = VectorOf<T>;
  using S = ScalarOf<T>;
  constexpr int W = lanes<V>;
  const int64_t kept = a.shape.kept, inner = a.shape.inner;
  const S *weight = static_cast<const S*>(a.weight.p), *bias = static_cast<const S*>(a.bias.p), one = a.one;
  Columns<S> means, rstds;
  S *const mean = means.of, *const rstd = rstds.of;
  for (int64_t unit = begin; unit < end; ++unit) {
    const Panel panel(a.shape, unit);
    const T* x = static_cast<const T*>(a.x) + panel.start;
    T* y = static_cast<T*>(a.y) + panel.start;
    const T* const source = x;
    const int64_t next = next_panel(a.shape, unit, end), ahead = written_later<T>(a.shape, panel.columns);
    if (a.residual != nullptr) {
      const T* residual = static_cast<const T*>(a.residual) + panel.start;
      T* sum = static_cast<T*>(a.total) + panel.start;
      for (int64_t at = 0; at < kept * inner; at += inner) {
        each_vector<W>(panel.columns, [&](auto extent, int64_t j, int64_t count) {
          using E = decltype(extent);
          store<E>(sum + at + j, load<E>(x + at + j, count) + load<E>(residual + at + j, count), count);
        });
      }
      x = sum;
    }
    panel_moments(x, a, panel.columns, mean, rstd);
    for (int64_t j = 0; j < panel.columns; ++j) {
      static_cast<S*>(a.mean)[panel.statistics + j] = mean[j];
      static_cast<S*>(a.rstd)[panel.statistics + j] = rstd[j];
    }
    for (int64_t k = 0; k < kept; ++k) {
      const V w = splat<V>(weight == nullptr ? 1 : one + weight[k]), b = splat<V>(bias == nullptr ? 0 : bias[k]);
      const int64_t at = k * inner;
      each_vector<W>(panel.columns, [&](auto extent, int64_t j, int64_t count) {
        using E = decltype(extent);
        fetch(source + at + j + next);
        if constexpr (!kStream) fetch_to_write(y + at + j + ahead);
        V xhat = (load<E>(x + at + j, count) - load<E>(mean + j, count)) * load<E>(rstd + j, count);
        if (sizeof(T) == 2 && a.cast) xhat = rounded<T>(xhat);
        put<E, kStream>(y + at + j, xhat * w + b, count);
      });
    }
  }
}

template <class T> void panel_forward(const RowForward& a, int64_t begin, int64_t end) {
  if (a.stream) panel_forward_as<T, true>(a, begin, end);
  else panel_forward_as<T, false>(a, begin, end);
}

// With dweight null, the parameters' gradients are not computed.
template <class T, bool kStream>
inline void panel_backward_as(const RowBackward& a, int64_t begin, int64_t end, void* dweight, void* dbias) {
  using V = VectorOf<T>;
  using S = ScalarOf<T>;
  constexpr int W = lanes<V>;
  const int64_t kept = a.shape.kept, inner = a.shape.inner;
  const S *weight = static_cast<const S*>(a.weight.p), one = a.one;
  S *dw = static_cast<S*>(dweight), *db = static_cast<S*>(dbias);
  PanelSums sums;
  Columns<S> means, rstds, firsts, seconds;
  S *const mean = means.of, *const rstd = rstds.of, *const first = firsts.of, *const second = seconds.of;
  for (int64_t unit = begin; unit < end; ++unit) {
    const Panel panel(a.shape, unit);
    const T *x = static_cast<const T*>(a.x) + panel.start, *dy = static_cast<const T*>(a.dy) + panel.start;
    const T* dtotal = a.dtotal == nullptr ? nullptr : static_cast<const T*>(a.dtotal) + panel.start;
    T* dx = static_cast<T*>(a.dx) + panel.start;
    const int64_t later = rows_later(a.shape), next = next_panel(a.shape, unit, end),
                  ahead = written_later<T>(a.shape, panel.columns);
    means.copy(static_cast<const S*>(a.mean) + panel.statistics, panel.columns);
    rstds.copy(static_cast<const S*>(a.rstd) + panel.statistics, panel.columns);
    column_sums<V>(kept, panel.columns, sums, [&](auto extent, int64_t k, int64_t j, int64_t count) {
      using E = decltype(extent);
      const int64_t at = k * inner + j;
      fetch_near(x + at + later);
      fetch_near(dy + at + later);
      const V centred = load<E>(x + at, count) - load<E>(mean + j, count);
      const V h = load<E>(dy + at, count) * splat<V>(weight == nullptr ? 1 : one + weight[k]);
      return Pair<V>{h, h * (centred * load<E>(rstd + j, count))};
    });
    for (int64_t j = 0; j < panel.columns; ++j) {
      first[j] = static_cast<S>(a.rms ? 0 : sums.first[j] / kept);
      second[j] = static_cast<S>(sums.second[j] / kept);
    }
    for (int64_t k = 0; k < kept; ++k) {
      const V w = splat<V>(weight == nullptr ? 1 : one + weight[k]);
      const int64_t at = k * inner;
      Pair<V> parameters{};
      each_vector<W>(panel.columns, [&](auto extent, int64_t j, int64_t count) {
        using E = decltype(extent);
        fetch(x + at + j + next);
        fetch(dy + at + j + next);
        if constexpr (!kStream) fetch_to_write(dx + at + j + ahead);
        const V d = load<E>(dy + at + j, count), r = load<E>(rstd + j, count);
        const V xhat = (load<E>(x + at + j, count) - load<E>(mean + j, count)) * r;
        V v = r * (d * w - load<E>(first + j, count) - xhat * load<E>(second + j, count));
        if (dtotal != nullptr) v = v + load<E>(dtotal + at + j, count);
        put<E, kStream>(dx + at + j, v, count);
        parameters = parameters + Pair<V>{d * xhat, d};
      });
      if (dw == nullptr) continue;
      dw[k] += lane_sum(parameters.first);
      if (db != nullptr) db[k] += lane_sum(parameters.second);
    }
  }
}

template <class T>
void panel_backward(const RowBackward& a, int64_t begin, int64_t end, void* dweight, void* dbias) {
  if (a.stream) panel_backward_as<T, true>(a, begin, end, dweight, dbias);
  else panel_backward_as<T, false>(a, begin, end, dweight, dbias);
}

}  // namespace leannorm::LEANNORM_ISA::rows
