// Rows with a factor and an addend of a sample or a token, and with a gated residual.
#pragma once

#include "modulated.h"
#include "row_moments.h"

namespace leannorm::LEANNORM_ISA::modulated {

using namespace rows;

// The line that a row meets.
template <class S> inline const S* line_of(const Lines& lines, int64_t row) {
  return static_cast<const S*>(lines.p) + row / lines.each * lines.step;
}

template <class E, class T> inline void put_as(bool past, T* p, VectorOf<T> v, int64_t n) {
  if (past) put<E, true>(p, v, n);
  else put<E, false>(p, v, n);
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
      const S* const gate = a.gate.p == nullptr ? nullptr : line_of<S>(a.gate, row);
      T* const sum = static_cast<T*>(a.total) + row * n;
      each_vector<W>(n, [&](auto extent, int64_t i, int64_t count) {
        using E = decltype(extent);
        const V added = load<E>(branch + i, count);
        const V with = gate == nullptr ? added : added * load<E>(gate + i, count);
        store<E>(sum + i, load<E>(source + i, count) + with, count);
      });
      x = sum;
    }
    const LineMoments moments = line_moments(x, n, a.rms ? S(0) : line_centre(x, n), a.eps, a.rms);
    const S mean = moments.mean, rstd = moments.rstd;
    static_cast<S*>(a.mean)[row] = mean;
    static_cast<S*>(a.rstd)[row] = rstd;
    const V m = splat<V>(mean), r = splat<V>(rstd);
    const S *const factor = line_of<S>(a.factor, row), *const addend = line_of<S>(a.addend, row);
    each_vector<W>(n, [&](auto extent, int64_t i, int64_t count) {
      using E = decltype(extent);
      fetch_near(source + i + next);
      const V xhat = (load<E>(x + i, count) - m) * r;
      put_as<E>(a.stream, y + i, xhat * (one + load<E>(factor + i, count)) + load<E>(addend + i, count), count);
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
  S *const xhats = static_cast<S*>(with_xhat), *const plains = static_cast<S*>(plain);
  for (int64_t row = begin; row < end; ++row) {
    const T *const x = static_cast<const T*>(a.x) + row * n, *const dy = static_cast<const T*>(a.dy) + row * n;
    const T* const dtotal = a.dtotal == nullptr ? nullptr : static_cast<const T*>(a.dtotal) + row * n;
    T* const dx = static_cast<T*>(a.dx) + row * n;
    const S* const factor = line_of<S>(a.factor, row);
    const V m = splat<V>(static_cast<const S*>(a.mean)[row]), r = splat<V>(static_cast<const S*>(a.rstd)[row]);
    const auto sums = line_sums<V>(n, [&](auto extent, int64_t i, int64_t count) {
      using E = decltype(extent);
      const V h = load<E>(dy + i, count) * (one + load<E>(factor + i, count));
      return Pair<V>{h, h * ((load<E>(x + i, count, m) - m) * r)};
    });
    const V first = splat<V>(a.rms ? 0 : sums.first / n), second = splat<V>(sums.second / n);
    each_vector<W>(n, [&](auto extent, int64_t i, int64_t count) {
      using E = decltype(extent);
      fetch_near(x + i + next);
      fetch_near(dy + i + next);
      const V d = load<E>(dy + i, count), xhat = (load<E>(x + i, count) - m) * r;
      V v = r * (d * (one + load<E>(factor + i, count)) - first - xhat * second);
      if (dtotal != nullptr) v = v + load<E>(dtotal + i, count);
      put_as<E>(a.stream, dx + i, v, count);
      if (xhats == nullptr) return;
      store<E>(xhats + i, load<E>(xhats + i, count) + d * xhat, count);
      store<E>(plains + i, load<E>(plains + i, count) + d, count);
    });
  }
  if (a.stream) settle();
}

template <class T> void gate_backward(const GateBackward& a, int64_t begin, int64_t end, void* dgate) {
  using V = VectorOf<T>;
  using S = ScalarOf<T>;
  const int64_t n = a.kept;
  S* const sum = static_cast<S*>(dgate);
  for (int64_t row = begin; row < end; ++row) {
    const T* const dtotal = static_cast<const T*>(a.dtotal) + row * n;
    const T* const branch = a.branch == nullptr ? nullptr : static_cast<const T*>(a.branch) + row * n;
    T* const dbranch = static_cast<T*>(a.dbranch) + row * n;
    const S* const gate = line_of<S>(a.gate, row);
    each_vector<lanes<V>>(n, [&](auto extent, int64_t i, int64_t count) {
      using E = decltype(extent);
      const V d = load<E>(dtotal + i, count);
      store<E>(dbranch + i, d * load<E>(gate + i, count), count);
      if (branch != nullptr) store<E>(sum + i, load<E>(sum + i, count) + d * load<E>(branch + i, count), count);
    });
  }
}

}  // namespace leannorm::LEANNORM_ISA::modulated
