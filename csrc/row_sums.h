// Sums along a row: in the compute type for a short while, in float64 from there on.
#pragma once

#include <type_traits>

#include "past.h"
#include "rows.h"
#include "wide.h"

namespace leannorm::LEANNORM_ISA::rows {

using LEANNORM_ISA::widen;

template <class T> using VectorOf = typename Element<T>::V;
template <class T> using ScalarOf = typename Scalar<VectorOf<T>>::type;

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a < b ? b : a; }

struct Whole { static constexpr bool whole = true; };
struct Part { static constexpr bool whole = false; };

// One vector at p, `n` lanes of it (the others `rest`) where Extent is a Part.
template <class Extent, class T> inline VectorOf<T> load(const T* p, int64_t n, VectorOf<T> rest = VectorOf<T>{}) {
  if constexpr (Extent::whole) return Element<T>::load(p);
  else return Element<T>::load(p, n, rest);
}
template <class Extent, class T> inline void store(T* p, VectorOf<T> v, int64_t n) {
  if constexpr (Extent::whole) Element<T>::store(p, v);
  else Element<T>::store(p, v, n);
}

template <class T> inline ScalarOf<T> first_of(const T* p) { return Element<T>::load(p, 1, VectorOf<T>{})[0]; }

// v rounded to a T.
template <class T> LEANNORM_INLINE VectorOf<T> rounded(VectorOf<T> v) {
  if constexpr (sizeof(T) >= 4) return v;
  else if constexpr (std::is_same_v<T, bfloat16>) return bits<F>(rounded_to_upper_half(v) & 0xffff0000u);
  else return from_float16(to_float16(v));
}

template <class Extent, bool kStream, class T> inline void put(T* p, VectorOf<T> v, int64_t n) {
  if constexpr (Extent::whole && kStream) stream(p, v);
  else store<Extent>(p, v, n);
}

// Prefetches what comes next while a row that is already there is worked on: the machine's own prefetching pauses
// between two rows, and does not look ahead of what is written. Into the second cache, or into the nearest if what
// comes next is small.
template <class T> constexpr int64_t kLookAhead = 4096 / sizeof(T);
inline void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }
inline void fetch_near(const void* p) { __builtin_prefetch(p, 0, 3); }
inline void fetch_to_write(const void* p) { __builtin_prefetch(p, 1, 3); }

// Whether the element `i` elements after the first of a cache line is also the first of one.
template <class T> constexpr bool begins_line(int64_t i) { return i * sizeof(T) % 64 == 0; }

// body(extent, i, lanes) for every vector of 0..n-1.
template <int W, class Body> LEANNORM_INLINE void each_vector(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + W <= n; i += W) body(Whole{}, i, int64_t(W));
  if (i < n) body(Part{}, i, n - i);
}

template <class V> struct Pair { V first{}, second{}; };
template <class V> inline Pair<V> operator+(Pair<V> a, Pair<V> b) { return {a.first + b.first, a.second + b.second}; }
template <class V> inline Pair<Wide<V>> widen(Pair<V> p) { return {widen(p.first), widen(p.second)}; }
template <class V> inline Pair<Wide<V>> widen(Pair<Wide<V>> p) { return p; }

// Lanes that are added in the compute type before float64 takes over: the rounding of a few additions.
constexpr int kShort = 16;

// body(extent, vectors, i, lanes) for blocks of `kMost` whole vectors of 0..n-1, then for every vector that is left.
template <int W, int kMost, class Body> LEANNORM_INLINE void each_block(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + kMost * W <= n; i += kMost * W) body(Whole{}, std::integral_constant<int, kMost>{}, i, int64_t(W));
  for (; i + W <= n; i += W) body(Whole{}, std::integral_constant<int, 1>{}, i, int64_t(W));
  if (i < n) body(Part{}, std::integral_constant<int, 1>{}, i, n - i);
}

constexpr int kTogether = kLinesTogether;

// The sums of a and of a * b over a line of n elements, in float64 from some hundreds on; value(extent, i, lanes)
// gives a and b of one vector. Four sums of vectors at a time, since an addition waits for the one before it.
template <class V, class Value> LEANNORM_INLINE Pair<double> line_sum(int64_t n, const Value& value) {
  constexpr int W = lanes<V>, kSums = 4;
  constexpr int64_t kPart = 64 * W;  // 16 additions in a lane
  Pair<double> sum;
  for (int64_t i = 0; i == 0 || i < n;) {
    Pair<V> of[kSums]{};
    const auto add = [&](auto extent, Pair<V>& to, int64_t at, int64_t count) LEANNORM_BODY {
      const Pair<V> v = value(extent, at, count);
      to = {to.first + v.first, fma(v.first, v.second, to.second)};
    };
    const int64_t end = smaller(n, i + kPart);
    for (; i + kSums * W <= end; i += kSums * W)
#pragma GCC unroll 4
      for (int s = 0; s < kSums; ++s) add(Whole{}, of[s], i + s * W, W);
    if (i + 2 * W <= end) {
      add(Whole{}, of[0], i, W);
      add(Whole{}, of[1], i + W, W);
      i += 2 * W;
    }
    if (i + W <= end) {
      add(Whole{}, of[2], i, W);
      i += W;
    }
    if (i < end) {
      add(Part{}, of[3], i, end - i);
      i = end;
    }
    const Pair<V> four = (of[0] + of[1]) + (of[2] + of[3]);
    const Pair<double> part{lane_sum(four.first), lane_sum(four.second)};
    sum = end <= kPart ? part : sum + part;
  }
  return sum;
}

// Float32 squares leave their range long before the values do; such a row is summed again in float64.
inline bool in_range(double square_sum) { return square_sum < 0x1p100 && square_sum > 0x1p-80; }

// 1 / sqrt(variance + eps) of `count` values; an empty row has variance 0.
inline double rstd_of(double square_sum, double rest, int64_t count, double eps) {
  const double n = count > 0 ? count : 1, variance = square_sum / n - rest * rest;
  return 1 / __builtin_sqrt((variance < 0 ? 0 : variance) + eps);  // NaN stays
}

}  // namespace leannorm::LEANNORM_ISA::rows
