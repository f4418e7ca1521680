// Rows that are lines of memory, up to kTogether of them at a time: sums over each, then all of them by blocks of
// columns, so that what they share stays in registers.
#pragma once

#include "row_moments.h"

namespace leannorm::LEANNORM_ISA::rows {

constexpr int kBlock = kBytes == 64 ? 4 : 2;  // vectors: their sums, too, must find registers

// As many rows as fill half of the nearest cache; of long ones one, where even the second cache holds few.
template <class T> inline int64_t lines_together(int64_t n, int64_t least) {
  const int64_t bytes = n * sizeof(T);
  return bytes > (32 << 10) ? 1 : larger(least, smaller(kTogether, (16 << 10) / bytes));
}

// The line that a row meets.
template <class T> struct Line {
  using S = ScalarOf<T>;
  const char* p;
  bool narrow;

  Line(const Lines& of, int64_t row) : p(static_cast<const char*>(of.p)), narrow(of.narrow) {
    p += row * of.row * static_cast<int64_t>(narrow ? sizeof(T) : sizeof(S));
  }
  template <class E> LEANNORM_INLINE VectorOf<T> at(int64_t i, int64_t n) const {
    if (sizeof(T) < sizeof(S) && narrow) return load<E>(reinterpret_cast<const T*>(p) + i, n);
    return load<E>(reinterpret_cast<const S*>(p) + i, n);
  }
  // one + the line; 1 where there is none.
  template <class E> LEANNORM_INLINE VectorOf<T> factor(VectorOf<T> one, int64_t i, int64_t n) const {
    return p == nullptr ? splat<VectorOf<T>>(1) : one + at<E>(i, n);
  }
};

template <class T> inline void add_residual(const RowForward& a, int64_t row, int rows) {
  using V = VectorOf<T>;
  const int64_t n = a.shape.kept;
  for (int64_t k = row; k < row + rows; ++k) {
    const T *const x = static_cast<const T*>(a.x) + k * n, *const residual = static_cast<const T*>(a.residual) + k * n;
    T* const total = static_cast<T*>(a.total) + k * n;
    const Line<T> gate(a.gate, k);
    each_vector<lanes<V>>(n, [&](auto extent, int64_t i, int64_t count) {
      using E = decltype(extent);
      fetch_near(residual + rows * n + i);
      const V added = load<E>(residual + i, count), sum = load<E>(x + i, count);
      store<E>(total + i, gate.p == nullptr ? sum + added : fma(added, gate.template at<E>(i, count), sum), count);
    });
  }
}

template <class T, bool kStream> inline void line_forward_rows(const RowForward& a, int64_t row, int rows) {
  using V = VectorOf<T>;
  using S = ScalarOf<T>;
  constexpr int W = lanes<V>;
  const int64_t n = a.shape.kept, x_row = a.x_row, y_row = a.y_row, next = a.x_ahead != 0 ? a.x_ahead : rows * x_row;
  const T *const source = static_cast<const T*>(a.x) + row * x_row, *x = source;
  T* const y = static_cast<T*>(a.y) + row * y_row;
  if (a.residual != nullptr) {
    add_residual<T>(a, row, rows);
    x = static_cast<const T*>(a.total) + row * n;
  }
  LineMoments moments;
  line_moments(x, x_row, rows, n, a.eps, a.rms, moments);
  S mean[kTogether], rstd[kTogether];
  for (int k = 0; k < rows; ++k) {
    static_cast<S*>(a.mean)[(row + k) * a.statistics_row] = mean[k] = moments.mean[k];
    static_cast<S*>(a.rstd)[(row + k) * a.statistics_row] = rstd[k] = moments.rstd[k];
  }
  const Line<T> weight(a.weight, row), bias(a.bias, row);
  const V one = splat<V>(a.one);
  const bool rounds = sizeof(T) == 2 && a.cast;
  each_block<W, kBlock>(n, [&](auto extent, auto vectors, int64_t at, int64_t count) LEANNORM_BODY {
    using E = decltype(extent);
    constexpr int N = decltype(vectors)::value;
    V w[N], b[N];
#pragma GCC unroll 4
    for (int c = 0; c < N; ++c) {
      w[c] = weight.template factor<E>(one, at + c * W, count);
      b[c] = bias.p == nullptr ? -V{} : bias.template at<E>(at + c * W, count);
    }
    for (int64_t k = 0, i = at, j = at; k < rows; ++k, i += x_row, j += y_row) {
      const V m = all<V>(mean[k]), r = all<V>(rstd[k]);
#pragma GCC unroll 4
      for (int c = 0; c < N; ++c) {
        fetch_near(source + i + c * W + next);
        if constexpr (!kStream) fetch_to_write(y + j + c * W + rows * y_row);
        V xhat = (load<E>(x + i + c * W, count) - m) * r;
        if (rounds) xhat = rounded<T>(xhat);
        put<E, kStream>(y + j + c * W, fma(xhat, w[c], b[c]), count);
      }
    }
  });
}

template <class T> void line_forward(const RowForward& a, int64_t begin, int64_t end) {
  const bool own = a.weight.row != 0 || a.bias.row != 0;
  for (int64_t row = begin, most = own ? 1 : lines_together<T>(a.shape.kept, 1); row < end; row += most) {
    const int rows = smaller(most, end - row);
    if (a.stream) line_forward_rows<T, true>(a, row, rows);
    else line_forward_rows<T, false>(a, row, rows);
  }
  if (a.stream) settle();
}

// What one row's gradient needs: dx = rstd * (dy * weight + first + xhat * second) + dtotal.
template <class S> struct LineGrad { S mean, rstd, first, second; };

template <class T>
inline void line_grads(const RowBackward& a, int64_t row, int rows, LineGrad<ScalarOf<T>>* to) {
  using V = VectorOf<T>;
  using S = ScalarOf<T>;
  const int64_t n = a.shape.kept;
  const Line<T> weight(a.weight, row);
  const V one = splat<V>(a.one);
  const double share = -1.0 / n;
  for (int k = 0; k < rows; ++k) {
    const T* const x = static_cast<const T*>(a.x) + (row + k) * a.x_row;
    const T* const dy = static_cast<const T*>(a.dy) + (row + k) * a.dy_row;
    const S mean = static_cast<const S*>(a.mean)[(row + k) * a.statistics_row];
    const S rstd = static_cast<const S*>(a.rstd)[(row + k) * a.statistics_row];
    const V m = all<V>(mean);
    const Pair<double> sums = line_sum<V>(n, [&](auto extent, int64_t i, int64_t count) LEANNORM_BODY {
      using E = decltype(extent);
      const V h = load<E>(dy + i, count) * weight.template factor<E>(one, i, count);
      return Pair<V>{h, load<E>(x + i, count, m) - m};
    });
    to[k] = {mean, rstd, S(a.rms ? 0 : sums.first * share), S(sums.second * share * rstd)};
  }
}

template <class T, bool kParameters, bool kStream>
inline void line_backward_rows(const RowBackward& a, int64_t row, int rows, void* dweight, void* dbias) {
  using V = VectorOf<T>;
  using S = ScalarOf<T>;
  LineGrad<S> grads[kTogether];
  line_grads<T>(a, row, rows, grads);
  const int64_t x_row = a.x_row, dy_row = a.dy_row, dx_row = a.dx_row;
  const int64_t next = a.x_ahead != 0 ? a.x_ahead : rows * x_row, next_dy = a.dy_ahead != 0 ? a.dy_ahead : rows * dy_row;
  const T *const x = static_cast<const T*>(a.x) + row * x_row, *const dy = static_cast<const T*>(a.dy) + row * dy_row;
  const T* const dtotal = a.dtotal == nullptr ? nullptr : static_cast<const T*>(a.dtotal) + row * a.dtotal_row;
  T* const dx = static_cast<T*>(a.dx) + row * dx_row;
  const Line<T> weight(a.weight, row);
  const V one = splat<V>(a.one);
  S *const dw = static_cast<S*>(dweight), *const db = static_cast<S*>(dbias);
  each_block<lanes<V>, kBlock>(a.shape.kept, [&](auto extent, auto vectors, int64_t at, int64_t count) LEANNORM_BODY {
    using E = decltype(extent);
    constexpr int W = lanes<V>, N = decltype(vectors)::value;
    V w[N], sum_dw[N], sum_db[N];
#pragma GCC unroll 4
    for (int c = 0; c < N; ++c) {
      w[c] = weight.template factor<E>(one, at + c * W, count);
      sum_dw[c] = sum_db[c] = V{};
      if constexpr (kParameters) {
        if (!a.own) sum_dw[c] = load<E>(dw + at + c * W, count);
        if (db != nullptr) sum_db[c] = load<E>(db + at + c * W, count);
      }
    }
    for (int64_t k = 0, i = at, j = at, o = at; k < rows; ++k, i += x_row, j += dy_row, o += dx_row) {
      const LineGrad<S>& g = grads[k];
      const V m = all<V>(g.mean), r = all<V>(g.rstd), first = all<V>(g.first), second = all<V>(g.second);
      V v[N];
#pragma GCC unroll 4
      for (int c = 0; c < N; ++c) {
        fetch_near(x + i + c * W + next);
        fetch_near(dy + j + c * W + next_dy);
        if constexpr (!kStream) fetch_to_write(dx + o + c * W + rows * dx_row);
        const V d = held(load<E>(dy + j + c * W, count)), xhat = (load<E>(x + i + c * W, count) - m) * r;
        v[c] = r * fma(xhat, second, fma(d, w[c], first));
        if constexpr (kParameters) {
          sum_dw[c] = fma(d, xhat, sum_dw[c]);
          sum_db[c] = sum_db[c] + d;
        }
      }
      if (dtotal != nullptr) {
#pragma GCC unroll 4
        for (int c = 0; c < N; ++c) v[c] = v[c] + load<E>(dtotal + k * a.dtotal_row + at + c * W, count);
      }
#pragma GCC unroll 4
      for (int c = 0; c < N; ++c) put<E, kStream>(dx + o + c * W, v[c], count);
    }
    if constexpr (kParameters) {
#pragma GCC unroll 4
      for (int c = 0; c < N; ++c) {
        const int64_t i = at + c * W, line = row * a.shape.kept + i;
        if (!a.own) store<E>(dw + i, sum_dw[c], count);
        else if (sizeof(T) < sizeof(S) && a.weight.narrow) put<E, kStream>(static_cast<T*>(dweight) + line, sum_dw[c], count);
        else put<E, kStream>(dw + line, sum_dw[c], count);
        if (db != nullptr) store<E>(db + i, sum_db[c], count);
      }
    }
  });
}

template <class T, bool kParameters, bool kStream>
inline void line_backward_as(const RowBackward& a, int64_t begin, int64_t end, void* dweight, void* dbias) {
  for (int64_t row = begin, most = a.own ? 1 : lines_together<T>(a.shape.kept, 4); row < end; row += most)
    line_backward_rows<T, kParameters, kStream>(a, row, smaller(most, end - row), dweight, dbias);
}

template <class T>
void line_backward(const RowBackward& a, int64_t begin, int64_t end, void* dweight, void* dbias) {
  if (dweight == nullptr) return line_backward_as<T, false, false>(a, begin, end, dweight, dbias);
  if (!a.stream) return line_backward_as<T, true, false>(a, begin, end, dweight, dbias);
  line_backward_as<T, true, true>(a, begin, end, dweight, dbias);
  settle();
}

}  // namespace leannorm::LEANNORM_ISA::rows
