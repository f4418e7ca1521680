// Rows that are lines of memory.
#pragma once

#include "row_moments.h"

namespace leannorm::LEANNORM_ISA::rows {

// kRows rows at once: while the sums of one come together, which takes long, the next one is read.
template <class T, int kRows, bool kStream> inline void line_forward_rows(const RowForward& a, int64_t row) {
  using V = VectorOf<T>;
  using S = ScalarOf<T>;
  constexpr int W = lanes<V>;
  const int64_t n = a.shape.kept;
  const S *weight = static_cast<const S*>(a.weight), *bias = static_cast<const S*>(a.bias);
  const T *const source = static_cast<const T*>(a.x) + row * a.x_row, *x = source;
  T* y = static_cast<T*>(a.y) + row * a.y_row;
  if (a.residual != nullptr) {
    const T* residual = static_cast<const T*>(a.residual) + row * n;
    T* sum = static_cast<T*>(a.total) + row * n;
    each_vector<W>(kRows * n, [&](auto extent, int64_t i, int64_t count) {
      using E = decltype(extent);
      store<E>(sum + i, load<E>(source + i, count) + load<E>(residual + i, count), count);
    });
    x = sum;
  }
  S mean[kRows], rstd[kRows], centre[kRows];
  for (int k = 0; k < kRows; ++k) centre[k] = a.rms ? 0 : line_centre(x + k * a.x_row, n);
  for (int k = 0; k < kRows; ++k) {
    const LineMoments moments = line_moments(x + k * a.x_row, n, centre[k], a.eps, a.rms);
    static_cast<S*>(a.mean)[(row + k) * a.statistics_row] = mean[k] = moments.mean;
    static_cast<S*>(a.rstd)[(row + k) * a.statistics_row] = rstd[k] = moments.rstd;
  }
  const int64_t next = a.x_ahead != 0 ? a.x_ahead : larger(kRows * a.x_row, kLookAhead<T>);
  for (int k = 0; k < kRows; ++k, x += a.x_row, y += a.y_row) {
    const T* const coming = source + k * a.x_row + next;
    const V m = splat<V>(mean[k]), r = splat<V>(rstd[k]);
    each_vector<W>(n, [&](auto extent, int64_t i, int64_t count) {
      using E = decltype(extent);
      fetch_near(coming + i);
      if constexpr (!kStream) fetch_to_write(y + i + kLookAhead<T>);
      V v = (load<E>(x + i, count) - m) * r;
      if (sizeof(T) == 2 && a.cast) v = rounded<T>(v);
      if (weight != nullptr) v = v * load<E>(weight + i, count);
      if (bias != nullptr) v = v + load<E>(bias + i, count);
      put<E, kStream>(y + i, v, count);
    });
  }
}

template <class T, bool kStream> inline void line_forward_as(const RowForward& a, int64_t begin, int64_t end) {
  int64_t row = begin;
  if (a.shape.kept < kLongLine)
    for (; row + 2 <= end; row += 2) line_forward_rows<T, 2, kStream>(a, row);
  for (; row < end; ++row) line_forward_rows<T, 1, kStream>(a, row);
}

template <class T> void line_forward(const RowForward& a, int64_t begin, int64_t end) {
  if (!a.stream) return line_forward_as<T, false>(a, begin, end);
  line_forward_as<T, true>(a, begin, end);
  settle();
}

// What one row's gradient needs: dx = rstd * (dy * weight - first - xhat * second) + dtotal.
template <class V> struct LineGrad { V mean, rstd, first, second; };

template <class T> inline LineGrad<VectorOf<T>> line_grad(const RowBackward& a, int64_t row) {
  using V = VectorOf<T>;
  using S = ScalarOf<T>;
  const int64_t n = a.shape.kept;
  const T *x = static_cast<const T*>(a.x) + row * a.x_row, *dy = static_cast<const T*>(a.dy) + row * a.dy_row;
  const S* weight = static_cast<const S*>(a.weight);
  const S mean = static_cast<const S*>(a.mean)[row * a.statistics_row];
  const S rstd = static_cast<const S*>(a.rstd)[row * a.statistics_row];
  const V m = splat<V>(mean), r = splat<V>(rstd);
  const auto sums = line_sums<V>(n, [&](auto extent, int64_t i, int64_t count) {
    using E = decltype(extent);
    V h = load<E>(dy + i, count);
    if (weight != nullptr) h = h * load<E>(weight + i, count);
    return Pair<V>{h, h * ((load<E>(x + i, count, m) - m) * r)};
  });
  return {m, r, splat<V>(a.rms ? 0 : sums.first / n), splat<V>(sums.second / n)};
}

// kRows rows at once, so that the parameters' gradients are loaded and stored once for all of them.
template <class T, int kRows, bool kParameters, bool kStream>
inline void line_backward_rows(const RowBackward& a, int64_t row, void* dweight, void* dbias) {
  using V = VectorOf<T>;
  using S = ScalarOf<T>;
  const int64_t n = a.shape.kept;
  const T *x = static_cast<const T*>(a.x) + row * a.x_row, *dy = static_cast<const T*>(a.dy) + row * a.dy_row;
  const T* dtotal = a.dtotal == nullptr ? nullptr : static_cast<const T*>(a.dtotal) + row * a.dtotal_row;
  T* dx = static_cast<T*>(a.dx) + row * a.dx_row;
  const S* weight = static_cast<const S*>(a.weight);
  S *dw = static_cast<S*>(dweight), *db = static_cast<S*>(dbias);
  const int64_t next = a.x_ahead != 0 ? a.x_ahead : larger(kRows * a.x_row, kLookAhead<T>);
  const int64_t next_dy = a.dy_ahead != 0 ? a.dy_ahead : larger(kRows * a.dy_row, kLookAhead<T>);
  LineGrad<V> grad[kRows];
  for (int k = 0; k < kRows; ++k) grad[k] = line_grad<T>(a, row + k);
  each_vector<lanes<V>>(n, [&](auto extent, int64_t i, int64_t count) {
    using E = decltype(extent);
    const V w = weight == nullptr ? splat<V>(1) : load<E>(weight + i, count);
    V sum_dw{}, sum_db{};
#pragma GCC unroll 4
    for (int k = 0; k < kRows; ++k) {
      const LineGrad<V>& g = grad[k];
      const T *const xj = x + k * a.x_row + i, *const dyj = dy + k * a.dy_row + i;
      T* const dxj = dx + k * a.dx_row + i;
      fetch_near(xj + next);
      fetch_near(dyj + next_dy);
      if constexpr (!kStream) fetch_to_write(dxj + kLookAhead<T>);
      const V d = load<E>(dyj, count), xhat = (load<E>(xj, count) - g.mean) * g.rstd;
      V v = g.rstd * (d * w - g.first - xhat * g.second);
      if (dtotal != nullptr) v = v + load<E>(dtotal + k * a.dtotal_row + i, count);
      put<E, kStream>(dxj, v, count);
      if constexpr (kParameters) {
        sum_dw = sum_dw + d * xhat;
        sum_db = sum_db + d;
      }
    }
    if constexpr (kParameters) {
      store<E>(dw + i, load<E>(dw + i, count) + sum_dw, count);
      if (db != nullptr) store<E>(db + i, load<E>(db + i, count) + sum_db, count);
    }
  });
}

template <class T, bool kParameters, bool kStream>
inline void line_backward_as(const RowBackward& a, int64_t begin, int64_t end, void* dweight, void* dbias) {
  int64_t row = begin;
  // Long rows leave no room for the parameters in the nearest cache; short ones are best read one by one.
  if (a.shape.kept >= kLongLine)
    for (; row + 4 <= end; row += 4) line_backward_rows<T, 4, kParameters, kStream>(a, row, dweight, dbias);
  for (; row < end; ++row) line_backward_rows<T, 1, kParameters, kStream>(a, row, dweight, dbias);
}

template <class T>
void line_backward(const RowBackward& a, int64_t begin, int64_t end, void* dweight, void* dbias) {
  if (dweight == nullptr) return line_backward_as<T, false, false>(a, begin, end, dweight, dbias);
  if (!a.stream) return line_backward_as<T, true, false>(a, begin, end, dweight, dbias);
  line_backward_as<T, true, true>(a, begin, end, dweight, dbias);
  settle();
}

}  // namespace leannorm::LEANNORM_ISA::rows
