// RMS norm with a gate of the input's shape. The activated gate of a row is computed once, into scratch.
#pragma once

#include "activations.h"
#include "gated.h"
#include "row_moments.h"

namespace leannorm::LEANNORM_ISA::gated {

using namespace rows;

// Only for the compute types: there are many activations, and they compile slowly. `slope` is null if not requested;
// `coming` is read next.
template <class S>
LEANNORM_ONCE void activate_line(const S* gate, int64_t n, int act, S* opened, S* slope, const char* coming) {
  using V = VectorOf<S>;
  with_known(act, [&](auto known) LEANNORM_BODY {
    each_vector<lanes<V>>(n, [&](auto extent, int64_t i, int64_t count) LEANNORM_BODY {
      using E = decltype(extent);
      fetch_near(coming + i * sizeof(S));
      const V g = load<E>(gate + i, count);
      if (slope == nullptr) return store<E>(opened + i, activate(g, known), count);
      const WithSlope<V> both = activate_with_slope(g, known);
      store<E>(opened + i, both.value, count);
      store<E>(slope + i, both.slope, count);
    });
  });
}

// act(gate) and, if requested, its derivative, for one row.
template <class T>
inline void open(const T* gate, int64_t next, int64_t n, int act, ScalarOf<T>* opened, ScalarOf<T>* slope) {
  const char* const coming = reinterpret_cast<const char*>(gate + next);
  if constexpr (sizeof(T) == sizeof(ScalarOf<T>)) return activate_line(gate, n, act, opened, slope, coming);
  else {
    each_vector<lanes<VectorOf<T>>>(n, [&](auto extent, int64_t i, int64_t count) {
      store<decltype(extent)>(opened + i, load<decltype(extent)>(gate + i, count), count);
    });
    activate_line(opened, n, act, opened, slope, coming);
  }
}

template <class E, class T> LEANNORM_INLINE void put_as(bool past, T* p, VectorOf<T> v, int64_t n) {
  if (past) put<E, true>(p, v, n);
  else put<E, false>(p, v, n);
}

template <class T> void forward(const GatedForward& a, int64_t begin, int64_t end, void* scratch) {
  using V = VectorOf<T>;
  using S = ScalarOf<T>;
  constexpr int W = lanes<V>;
  const int64_t n = a.kept;
  const S* const weight = static_cast<const S*>(a.weight);
  S* const opened = static_cast<S*>(scratch);
  const bool rounds = sizeof(T) == 2 && a.cast, behind = a.behind;
  for (int64_t row = begin; row < end; ++row) {
    const T *const x = static_cast<const T*>(a.x) + row * a.x_row, *const gate = static_cast<const T*>(a.gate) + row * a.gate_row;
    T* const y = static_cast<T*>(a.y) + row * n;
    open(gate, a.gate_row, n, a.act, opened, static_cast<S*>(nullptr));
    LineMoments moments;
    if (behind) {
      each_vector<W>(n, [&](auto extent, int64_t i, int64_t count) {
        using E = decltype(extent);
        store<E>(opened + i, load<E>(x + i, count) * load<E>(opened + i, count), count);
      });
      line_moments(opened, 0, 1, n, a.eps, true, moments);
    } else {
      line_moments(x, 0, 1, n, a.eps, true, moments);
    }
    const S rstd = static_cast<S*>(a.rstd)[row] = moments.rstd[0];
    const V r = all<V>(rstd);
    each_vector<W>(n, [&](auto extent, int64_t i, int64_t count) LEANNORM_BODY {
      using E = decltype(extent);
      fetch_near(x + a.x_row + i);
      const V o = load<E>(opened + i, count);
      V v = (behind ? o : load<E>(x + i, count)) * r;
      if (rounds) v = rounded<T>(v);
      v = v * load<E>(weight + i, count);
      if (!behind) {
        if (rounds) v = rounded<T>(v);
        v = v * o;
      }
      put_as<E>(a.stream, y + i, v, count);
    });
  }
  if (a.stream) settle();
}

template <class T>
void backward(const GatedBackward& a, int64_t begin, int64_t end, void* dweight, void* scratch) {
  using V = VectorOf<T>;
  using S = ScalarOf<T>;
  const int64_t n = a.kept;
  const S* const weight = static_cast<const S*>(a.weight);
  S *const opened = static_cast<S*>(scratch), *const slope = opened + n, *const dw = static_cast<S*>(dweight);
  for (int64_t row = begin; row < end; ++row) {
    const T *const x = static_cast<const T*>(a.x) + row * a.x_row, *const dy = static_cast<const T*>(a.dy) + row * a.dy_row;
    const T* const gate = static_cast<const T*>(a.gate) + row * a.gate_row;
    T *const dx = static_cast<T*>(a.dx) + row * n, *const dgate = static_cast<T*>(a.dgate) + row * n;
    open(gate, a.gate_row, n, a.act, opened, slope);
    const V r = all<V>(static_cast<const S*>(a.rstd)[row]);
    const Pair<double> sums = line_sum<V>(n, [&](auto extent, int64_t i, int64_t count) LEANNORM_BODY {
      using E = decltype(extent);
      fetch_near(x + a.x_row + i);
      const V u = load<E>(x + i, count) * r, d = load<E>(dy + i, count) * load<E>(weight + i, count);
      return Pair<V>{d * load<E>(opened + i, count), u};
    });
    const V mean = splat<V>(-sums.second / n);
    each_vector<lanes<V>>(n, [&](auto extent, int64_t i, int64_t count) LEANNORM_BODY {
      using E = decltype(extent);
      fetch_near(dy + a.dy_row + i);
      const V value = held(load<E>(x + i, count)), d = held(load<E>(dy + i, count)), w = held(load<E>(weight + i, count));
      const V o = held(load<E>(opened + i, count)), s = load<E>(slope + i, count);
      const V u = a.behind ? value * r * o : value * r, g = a.behind ? d : d * o;
      const V e = r * fma(u, mean, g * w);
      put_as<E>(a.stream, dx + i, a.behind ? e * o : e, count);
      put_as<E>(a.stream, dgate + i, (a.behind ? e * value : d * u * w) * s, count);
      if (dw != nullptr) store<E>(dw + i, fma(g, u, load<E>(dw + i, count)), count);
    });
  }
  if (a.stream) settle();
}

}  // namespace leannorm::LEANNORM_ISA::gated
