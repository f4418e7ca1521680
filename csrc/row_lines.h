// Contiguous rows, up to kTogether of them at a time: sums over each, then what is computed from them.
#pragma once

#include "row_moments.h"

namespace leannorm::LEANNORM_ISA::rows {

constexpr int kBlock = kBytes == 64 ? 4 : 2;  // vectors, whose sums must fit in registers, too

// As many rows as fill half of the nearest cache; a single one if even the second cache holds only few.
template <class T> inline int64_t lines_together(int64_t n, int64_t least) {
  const int64_t bytes = n * sizeof(T);
  return bytes > (32 << 10) ? 1 : larger(least, smaller(kTogether, (16 << 10) / bytes));
}

// The line of a parameter for a row.
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
  // one + the line; 1 if there is none.
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
  const V one = splat<V>(a.one);
  const bool rounds = sizeof(T) == 2 && a.cast;
  for (int64_t k = 0, i = 0, j = 0; k < rows; ++k, i += x_row, j += y_row) {
    const Line<T> weight(a.weight, row + k), bias(a.bias, row + k);
    const V m = all<V>(mean[k]), r = all<V>(rstd[k]);
    each_block<W, 4>(n, [&](auto extent, auto vectors, int64_t at, int64_t count) LEANNORM_BODY {
      using E = decltype(extent);
      constexpr int N = decltype(vectors)::value;
      V v[N];
#pragma GCC unroll 4
      for (int c = 0; c < N; ++c) {
        const int64_t in = i + at + c * W, out = j + at + c * W;
        if (begins_line<T>(c * W)) {
          fetch_near(source + in + next);
          if constexpr (!kStream) fetch_to_write(y + out + rows * y_row);
        }
        v[c] = (load<E>(x + in, count) - m) * r;
        if (rounds) v[c] = rounded<T>(v[c]);
      }
      if (weight.p != nullptr || bias.p != nullptr) {
#pragma GCC unroll 4
        for (int c = 0; c < N; ++c)
          v[c] = fma(v[c], weight.template factor<E>(one, at + c * W, count),
                     bias.p == nullptr ? -V{} : bias.template at<E>(at + c * W, count));
      }
#pragma GCC unroll 4
      for (int c = 0; c < N; ++c) put<E, kStream>(y + j + at + c * W, v[c], count);
    });
  }
}

template <class T> void line_forward(const RowForward& a, int64_t begin, int64_t end) {
  const int64_t few = larger(2, (2 << 10) / (a.shape.kept * sizeof(T)));  // past the caches: in small blocks
  const int64_t together = lines_together<T>(a.shape.kept, 1), most = a.stream ? smaller(together, few) : together;
  for (int64_t row = begin; row < end; row += most) {
    const int rows = smaller(most, end - row);
    if (a.stream) line_forward_rows<T, true>(a, row, rows);
    else line_forward_rows<T, false>(a, row, rows);
  }
}

// What one row's gradient needs: dx = rstd * (dy * weight + first + xhat * second) + dtotal.
template <class S> struct LineGrad { S mean, rstd, first, second; };

// The sums of h = dy * weight and of h * (x - mean) over a row.
template <class T>
LEANNORM_ONCE Pair<double> line_grad_sums(const T* dy, const T* x, ScalarOf<T> mean, int64_t n, const Line<T>& weight,
                                          ScalarOf<T> one) {
  using V = VectorOf<T>;
  const V m = all<V>(mean), o = all<V>(one);
  const Line<T> own = weight;  // in registers: through the reference it would be read for every vector
  const auto sum = [&](auto weighted) LEANNORM_BODY {
    return line_sum<V>(n, [&](auto extent, int64_t i, int64_t count) LEANNORM_BODY {
      using E = decltype(extent);
      V h = load<E>(dy + i, count);
      if constexpr (decltype(weighted)::value) h = h * (o + own.template at<E>(i, count));
      return Pair<V>{h, load<E>(x + i, count, m) - m};
    });
  };
  return own.p == nullptr ? sum(std::false_type{}) : sum(std::true_type{});
}

template <class T>
inline void line_grads(const RowBackward& a, int64_t row, int rows, LineGrad<ScalarOf<T>>* to) {
  using S = ScalarOf<T>;
  const int64_t n = a.shape.kept;
  const double share = -1.0 / n;
  const Line<T> weight(a.weight, row);
  for (int k = 0; k < rows; ++k) {
    const T* const x = static_cast<const T*>(a.x) + (row + k) * a.x_row;
    const T* const dy = static_cast<const T*>(a.dy) + (row + k) * a.dy_row;
    const S mean = static_cast<const S*>(a.mean)[(row + k) * a.statistics_row];
    const S rstd = static_cast<const S*>(a.rstd)[(row + k) * a.statistics_row];
    const Pair<double> sums = line_grad_sums<T>(dy, x, mean, n, weight, a.one);
    to[k] = {mean, rstd, S(a.rms ? 0 : sums.first * share), S(sums.second * share * rstd)};
  }
}

// Where a row's share of the parameters' gradients goes: nowhere, added to one line for all rows (the weight's, or
// both parameters'), or to a line of its own.
enum class Shares { none, weight, both, own };

// dx of `rows` rows by blocks of columns, so that what they have in common stays in registers.
template <class T, Shares kShares, bool kStream>
inline void line_backward_rows(const RowBackward& a, int64_t row, int rows, const LineGrad<ScalarOf<T>>* grads,
                               void* dweight, void* dbias) {
  using V = VectorOf<T>;
  using S = ScalarOf<T>;
  constexpr int W = lanes<V>;
  constexpr bool kAdds = kShares == Shares::weight || kShares == Shares::both;
  const int64_t x_row = a.x_row, dy_row = a.dy_row, dx_row = a.dx_row, dtotal_row = a.dtotal_row;
  const T *const x = static_cast<const T*>(a.x) + row * x_row, *const dy = static_cast<const T*>(a.dy) + row * dy_row;
  const T* const dtotal = a.dtotal == nullptr ? nullptr : static_cast<const T*>(a.dtotal) + row * dtotal_row;
  T* const dx = static_cast<T*>(a.dx) + row * dx_row;
  const int64_t next = a.x_ahead != 0 ? a.x_ahead : rows * x_row, next_dy = a.dy_ahead != 0 ? a.dy_ahead : rows * dy_row;
  const Line<T> weight(a.weight, row);
  const V one = splat<V>(a.one);
  S *const dw = static_cast<S*>(dweight), *const db = static_cast<S*>(dbias);
  const int64_t own = row * a.shape.kept;
  each_block<W, kBlock>(a.shape.kept, [&](auto extent, auto vectors, int64_t at, int64_t count) LEANNORM_BODY {
    using E = decltype(extent);
    constexpr int N = decltype(vectors)::value;
    V w[N], sum_dw[N], sum_db[N];
#pragma GCC unroll 4
    for (int c = 0; c < N; ++c) {
      w[c] = weight.template factor<E>(one, at + c * W, count), sum_dw[c] = sum_db[c] = V{};
      if constexpr (kAdds) sum_dw[c] = load<E>(dw + at + c * W, count);
      if constexpr (kShares == Shares::both) sum_db[c] = load<E>(db + at + c * W, count);
    }
    const T *from = x + at, *dfrom = dy + at;
    T* to = dx + at;
    for (int k = 0; k < rows; ++k, from += x_row, dfrom += dy_row, to += dx_row) {
      const V m = all<V>(grads[k].mean), r = all<V>(grads[k].rstd), first = all<V>(grads[k].first), second = all<V>(grads[k].second);
      V v[N];
#pragma GCC unroll 4
      for (int c = 0; c < N; ++c) {
        if (begins_line<T>(c * W)) {
          fetch_near(from + c * W + next);
          fetch_near(dfrom + c * W + next_dy);
        }
        const V d = held(load<E>(dfrom + c * W, count)), xhat = (load<E>(from + c * W, count) - m) * r;
        v[c] = r * fma(xhat, second, fma(d, w[c], first));
        if constexpr (kShares != Shares::none) sum_dw[c] = fma(d, xhat, sum_dw[c]);
        if constexpr (kShares == Shares::both) sum_db[c] = sum_db[c] + d;
      }
      if (dtotal != nullptr) {
#pragma GCC unroll 4
        for (int c = 0; c < N; ++c) v[c] = v[c] + load<E>(dtotal + k * dtotal_row + at + c * W, count);
      }
#pragma GCC unroll 4
      for (int c = 0; c < N; ++c) put<E, kStream>(to + c * W, v[c], count);
    }
#pragma GCC unroll 4
    for (int c = 0; c < N; ++c) {
      const int64_t i = at + c * W;
      if constexpr (kAdds) store<E>(dw + i, sum_dw[c], count);
      if constexpr (kShares == Shares::both) store<E>(db + i, sum_db[c], count);
      if constexpr (kShares == Shares::own) {
        if (sizeof(T) < sizeof(S) && a.weight.narrow) put<E, kStream>(static_cast<T*>(dweight) + own + i, sum_dw[c], count);
        else put<E, kStream>(dw + own + i, sum_dw[c], count);
      }
    }
  });
}

template <class T, Shares kShares, bool kStream>
inline void line_backward_as(const RowBackward& a, int64_t begin, int64_t end, void* dweight, void* dbias) {
  LineGrad<ScalarOf<T>> grads[kTogether];
  // A load waits for an earlier store whose address has the same last twelve bits: few rows that are 4096 bytes apart
  // are taken together, so that few reads of a column come after its writes.
  const bool alike = a.x_row * sizeof(T) % 4096 == 0 || a.dx_row * sizeof(T) % 4096 == 0;
  const int64_t most = a.weight.row != 0 ? 1 : alike ? 2 : lines_together<T>(a.shape.kept, 4);
  for (int64_t row = begin; row < end; row += most) {
    const int rows = smaller(most, end - row);
    line_grads<T>(a, row, rows, grads);
    line_backward_rows<T, kShares, kStream>(a, row, rows, grads, dweight, dbias);
  }
}

template <class T>
void line_backward(const RowBackward& a, int64_t begin, int64_t end, void* dweight, void* dbias) {
  const auto as = [&](auto stream) {
    constexpr bool kStream = decltype(stream)::value;
    if (dweight == nullptr) line_backward_as<T, Shares::none, kStream>(a, begin, end, dweight, dbias);
    else if (a.own) line_backward_as<T, Shares::own, kStream>(a, begin, end, dweight, dbias);
    else if (dbias == nullptr) line_backward_as<T, Shares::weight, kStream>(a, begin, end, dweight, dbias);
    else line_backward_as<T, Shares::both, kStream>(a, begin, end, dweight, dbias);
  };
  if (a.stream) as(std::true_type{});
  else as(std::false_type{});
}

}  // namespace leannorm::LEANNORM_ISA::rows
