// Rows with a factor and an addend of a sample or a token, and with a gated residual.
#pragma once

#include "modulated.h"
#include "row_moments.h"

namespace leannorm::LEANNORM_ISA::modulated {

using namespace rows;

// The line that a row meets.
template <class T> struct Line {
  using S = ScalarOf<T>;
  const char* p;
  bool narrow;

  Line(const Lines& lines, int64_t row) : p(static_cast<const char*>(lines.p)), narrow(lines.narrow) {
    p += row / lines.each * lines.step * static_cast<int64_t>(narrow ? sizeof(T) : sizeof(S));
  }
  template <class E> LEANNORM_INLINE VectorOf<T> at(int64_t i, int64_t n) const {
    if (sizeof(T) < sizeof(S) && narrow) return load<E>(reinterpret_cast<const T*>(p) + i, n);
    return load<E>(reinterpret_cast<const S*>(p) + i, n);
  }
};

template <class E, class T> inline void put_as(bool past, T* p, VectorOf<T> v, int64_t n) {
  if (past) put<E, true>(p, v, n);
  else put<E, false>(p, v, n);
}

// A row's term of the sum of its lines: added to it, or written where every row has a sum of its own.
template <class E, class T>
LEANNORM_INLINE void term(void* sum, const Lines& of, bool past, int64_t start, int64_t i, VectorOf<T> v, int64_t n) {
  using S = ScalarOf<T>;
  S* const p = static_cast<S*>(sum) + i;
  if (of.each > 1) return store<E>(p, load<E>(p, n) + v, n);
  if (sizeof(T) < sizeof(S) && of.narrow) put_as<E>(past, static_cast<T*>(sum) + start + i, v, n);
  else put_as<E>(past, p + start, v, n);
}

template <class T> void ada_forward(const AdaForward& a, int64_t begin, int64_t end) {
  using V = VectorOf<T>;
  using S = ScalarOf<T>;
  constexpr int W = lanes<V>;
  const int64_t n = a.kept, next = larger(n, kLookAhead<T>);
  const V one = splat<V>(a.one);
  for (int64_t row = begin; row < end; ++row) {
    const T* const source = static_cast<const T*>(a.x) + row * n;
    const T* x = source;
    T* const y = static_cast<T*>(a.y) + row * n;
    if (a.branch != nullptr) {
      const T* const branch = static_cast<const T*>(a.branch) + row * n;
      const Line<T> gate(a.gate, row);
      const bool gates = a.gate.p != nullptr;
      T* const sum = static_cast<T*>(a.total) + row * n;
      each_vector<W>(n, [&](auto extent, int64_t i, int64_t count) {
        using E = decltype(extent);
        const V added = load<E>(branch + i, count);
        const V with = gates ? added * gate.template at<E>(i, count) : added;
        store<E>(sum + i, load<E>(source + i, count) + with, count);
      });
      x = sum;
    }
    const LineMoments moments = line_moments(x, n, a.rms ? S(0) : line_centre(x, n), a.eps, a.rms);
    const S mean = moments.mean, rstd = moments.rstd;
    static_cast<S*>(a.mean)[row] = mean;
    static_cast<S*>(a.rstd)[row] = rstd;
    const V m = splat<V>(mean), r = splat<V>(rstd);
    const Line<T> factor(a.factor, row), addend(a.addend, row);
    each_vector<W>(n, [&](auto extent, int64_t i, int64_t count) {
      using E = decltype(extent);
      fetch_near(source + i + next);
      const V xhat = (load<E>(x + i, count) - m) * r;
      const V v = xhat * (one + factor.template at<E>(i, count)) + addend.template at<E>(i, count);
      put_as<E>(a.stream, y + i, v, count);
    });
  }
  if (a.stream) settle();
}

template <class T>
void ada_backward(const AdaBackward& a, int64_t begin, int64_t end, void* with_xhat, void* plain) {
  using V = VectorOf<T>;
  using S = ScalarOf<T>;
  constexpr int W = lanes<V>;
  const int64_t n = a.kept, next = larger(n, kLookAhead<T>);
  const V one = splat<V>(a.one);
  for (int64_t row = begin; row < end; ++row) {
    const T *const x = static_cast<const T*>(a.x) + row * n, *const dy = static_cast<const T*>(a.dy) + row * n;
    const T* const dtotal = a.dtotal == nullptr ? nullptr : static_cast<const T*>(a.dtotal) + row * n;
    T* const dx = static_cast<T*>(a.dx) + row * n;
    const Line<T> factor(a.factor, row);
    const V m = splat<V>(static_cast<const S*>(a.mean)[row]), r = splat<V>(static_cast<const S*>(a.rstd)[row]);
    const auto sums = line_sums<V>(n, [&](auto extent, int64_t i, int64_t count) {
      using E = decltype(extent);
      const V h = load<E>(dy + i, count) * (one + factor.template at<E>(i, count));
      return Pair<V>{h, h * ((load<E>(x + i, count, m) - m) * r)};
    });
    const V first = splat<V>(a.rms ? 0 : sums.first / n), second = splat<V>(sums.second / n);
    each_vector<W>(n, [&](auto extent, int64_t i, int64_t count) {
      using E = decltype(extent);
      fetch_near(x + i + next);
      fetch_near(dy + i + next);
      const V d = load<E>(dy + i, count), xhat = (load<E>(x + i, count) - m) * r;
      V v = r * (d * (one + factor.template at<E>(i, count)) - first - xhat * second);
      if (dtotal != nullptr) v = v + load<E>(dtotal + i, count);
      put_as<E>(a.stream, dx + i, v, count);
      if (with_xhat == nullptr) return;
      term<E, T>(with_xhat, a.factor, a.stream, row * n, i, d * xhat, count);
      if (plain != nullptr) term<E, T>(plain, a.factor, a.stream, row * n, i, d, count);
    });
  }
  if (a.stream) settle();
}

template <class T> void gate_backward(const GateBackward& a, int64_t begin, int64_t end, void* dgate) {
  using V = VectorOf<T>;
  const int64_t n = a.kept;
  for (int64_t row = begin; row < end; ++row) {
    const T* const dtotal = static_cast<const T*>(a.dtotal) + row * n;
    const T* const branch = a.branch == nullptr ? nullptr : static_cast<const T*>(a.branch) + row * n;
    T* const dbranch = static_cast<T*>(a.dbranch) + row * n;
    const Line<T> gate(a.gate, row);
    each_vector<lanes<V>>(n, [&](auto extent, int64_t i, int64_t count) {
      using E = decltype(extent);
      const V d = load<E>(dtotal + i, count);
      store<E>(dbranch + i, d * gate.template at<E>(i, count), count);
      if (branch != nullptr) term<E, T>(dgate, a.gate, false, row * n, i, d * load<E>(branch + i, count), count);
    });
  }
}

}  // namespace leannorm::LEANNORM_ISA::modulated
