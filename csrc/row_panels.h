// Rows that lie side by side: element (k, j) of a panel is `inner` * k + j from its start.
#pragma once

#include "row_sums.h"

namespace leannorm::LEANNORM_ISA::rows {

constexpr int64_t kMostColumns = 1024;  // rows side by side in a panel, at most

struct Panel {
  int64_t start, columns, statistics;  // of x and of mean and rstd

  Panel(const RowShape& s, int64_t unit) {
    const int64_t outer = unit / s.panels, first = unit % s.panels * s.panel;
    start = outer * s.kept * s.inner + first;
    columns = smaller(s.panel, s.inner - first);
    statistics = outer * s.inner + first;
  }
};

// Two sums for every column.
struct PanelSums {
  double first[kMostColumns], second[kMostColumns];

  template <class V> void add(int64_t at, Pair<Wide<V>> v) {
    constexpr int W = lanes<V>;
    store_wide(first + at, load_wide<V>(first + at, W) + v.first, W);
    store_wide(second + at, load_wide<V>(second + at, W) + v.second, W);
  }
};
static_assert(kMostColumns % (64 / sizeof(float)) == 0, "a column sum takes whole vectors");

// The two sums of each column; value(extent, k, j, lanes) gives the terms of one vector, as what it adds
// up to for kShort rows of the panel: in the compute type, or in float64 from the start.
template <class V, class Value>
inline void column_sums(int64_t kept, int64_t columns, PanelSums& sums, Value value) {
  constexpr int W = lanes<V>;
  const int64_t padded = (columns + W - 1) / W * W;
  for (int64_t j = 0; j < padded; ++j) sums.first[j] = sums.second[j] = 0;
  for (int64_t k = 0; k < kept; k += kShort) {
    const int64_t end = smaller(kept, k + kShort);
    each_vector<W>(columns, [&](auto extent, int64_t j, int64_t count) {
      decltype(value(extent, k, j, count)) part{};
      for (int64_t at = k; at < end; ++at) part = part + value(extent, at, j, count);
      sums.add<V>(j, widen(part));
    });
  }
}

// Mean (in `mean`, rounded) and rstd of every column.
template <class T>
inline void panel_moments(const T* x, const RowForward& a, int64_t columns, ScalarOf<T>* mean,
                          ScalarOf<T>* rstd) {
  using V = VectorOf<T>;
  using S = ScalarOf<T>;
  const int64_t kept = a.shape.kept, inner = a.shape.inner;
  PanelSums sums;
  for (int64_t j = 0; j < columns; ++j) mean[j] = 0;
  if (!a.rms) {
    column_sums<V>(kept, columns, sums, [&](auto extent, int64_t k, int64_t j, int64_t count) {
      return Pair<V>{load<decltype(extent)>(x + k * inner + j, count), V{}};
    });
    for (int64_t j = 0; j < columns; ++j) mean[j] = static_cast<S>(sums.first[j] / kept);
  }
  column_sums<V>(kept, columns, sums, [&](auto extent, int64_t k, int64_t j, int64_t count) {
    using E = decltype(extent);
    const V d = load<E>(x + k * inner + j, count) - load<E>(mean + j, count);
    return Pair<V>{d, d * d};
  });
  bool all_in_range = true;
  for (int64_t j = 0; j < columns; ++j) all_in_range = all_in_range && in_range(sums.second[j]);
  if (sizeof(S) == 4 && !all_in_range) {
    column_sums<V>(kept, columns, sums, [&](auto extent, int64_t k, int64_t j, int64_t count) {
      using E = decltype(extent);
      const Wide<V> d = widen(load<E>(x + k * inner + j, count)) - widen(load<E>(mean + j, count));
      return Pair<Wide<V>>{d, d * d};
    });
  }
  for (int64_t j = 0; j < columns; ++j) {
    const double rest = a.rms ? 0 : sums.first[j] / kept;
    mean[j] = static_cast<S>(mean[j] + rest);
    rstd[j] = static_cast<S>(rstd_of(sums.second[j], rest, kept, a.eps));
  }
}

template <class T> void panel_forward(const RowForward& a, int64_t begin, int64_t end) {
  using V = VectorOf<T>;
  using S = ScalarOf<T>;
  constexpr int W = lanes<V>;
  const int64_t kept = a.shape.kept, inner = a.shape.inner;
  const S *weight = static_cast<const S*>(a.weight), *bias = static_cast<const S*>(a.bias);
  for (int64_t unit = begin; unit < end; ++unit) {
    const Panel panel(a.shape, unit);
    const T* x = static_cast<const T*>(a.x) + panel.start;
    T* y = static_cast<T*>(a.y) + panel.start;
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
    S *mean = static_cast<S*>(a.mean) + panel.statistics, *rstd = static_cast<S*>(a.rstd) + panel.statistics;
    panel_moments(x, a, panel.columns, mean, rstd);
    for (int64_t k = 0; k < kept; ++k) {
      const V w = splat<V>(weight == nullptr ? 1 : weight[k]), b = splat<V>(bias == nullptr ? 0 : bias[k]);
      const int64_t at = k * inner;
      each_vector<W>(panel.columns, [&](auto extent, int64_t j, int64_t count) {
        using E = decltype(extent);
        const V xhat = (load<E>(x + at + j, count) - load<E>(mean + j, count)) * load<E>(rstd + j, count);
        store<E>(y + at + j, xhat * w + b, count);
      });
    }
  }
}

// With dweight null, the parameters' gradients are not computed.
template <class T>
void panel_backward(const RowBackward& a, int64_t begin, int64_t end, void* dweight, void* dbias) {
  using V = VectorOf<T>;
  using S = ScalarOf<T>;
  constexpr int W = lanes<V>;
  const int64_t kept = a.shape.kept, inner = a.shape.inner;
  const S* weight = static_cast<const S*>(a.weight);
  S *dw = static_cast<S*>(dweight), *db = static_cast<S*>(dbias);
  PanelSums sums;
  S first[kMostColumns], second[kMostColumns];
  for (int64_t unit = begin; unit < end; ++unit) {
    const Panel panel(a.shape, unit);
    const T *x = static_cast<const T*>(a.x) + panel.start, *dy = static_cast<const T*>(a.dy) + panel.start;
    const T* dtotal = a.dtotal == nullptr ? nullptr : static_cast<const T*>(a.dtotal) + panel.start;
    T* dx = static_cast<T*>(a.dx) + panel.start;
    const S *mean = static_cast<const S*>(a.mean) + panel.statistics,
            *rstd = static_cast<const S*>(a.rstd) + panel.statistics;
    column_sums<V>(kept, panel.columns, sums, [&](auto extent, int64_t k, int64_t j, int64_t count) {
      using E = decltype(extent);
      const V centred = load<E>(x + k * inner + j, count) - load<E>(mean + j, count);
      const V h = load<E>(dy + k * inner + j, count) * splat<V>(weight == nullptr ? 1 : weight[k]);
      return Pair<V>{h, h * (centred * load<E>(rstd + j, count))};
    });
    for (int64_t j = 0; j < panel.columns; ++j) {
      first[j] = static_cast<S>(a.rms ? 0 : sums.first[j] / kept);
      second[j] = static_cast<S>(sums.second[j] / kept);
    }
    for (int64_t k = 0; k < kept; ++k) {
      const V w = splat<V>(weight == nullptr ? 1 : weight[k]);
      const int64_t at = k * inner;
      Pair<V> parameters{};
      each_vector<W>(panel.columns, [&](auto extent, int64_t j, int64_t count) {
        using E = decltype(extent);
        const V d = load<E>(dy + at + j, count), r = load<E>(rstd + j, count);
        const V xhat = (load<E>(x + at + j, count) - load<E>(mean + j, count)) * r;
        V v = r * (d * w - load<E>(first + j, count) - xhat * load<E>(second + j, count));
        if (dtotal != nullptr) v = v + load<E>(dtotal + at + j, count);
        store<E>(dx + at + j, v, count);
        parameters = parameters + Pair<V>{d * xhat, d};
      });
      if (dw == nullptr) continue;
      dw[k] += static_cast<S>(total(widen(parameters.first)));
      if (db != nullptr) db[k] += static_cast<S>(total(widen(parameters.second)));
    }
  }
}

}  // namespace leannorm::LEANNORM_ISA::rows
