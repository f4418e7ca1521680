// Mean and rstd of a line of memory.
#pragma once

#include "row_sums.h"

namespace leannorm::LEANNORM_ISA::rows {

struct LineMoments { double mean, rstd; };

template <class T> inline LineMoments wide_line_moments(const T* x, int64_t n, double eps, bool rms) {
  using V = VectorOf<T>;
  constexpr int W = lanes<V>;
  double mean = 0;
  if (!rms) {
    Wide<V> sum{};
    each_vector<W>(n, [&](auto extent, int64_t i, int64_t count) {
      sum = sum + widen(load<decltype(extent)>(x + i, count));
    });
    mean = total(sum) / n;
  }
  const Wide<V> centre = splat_wide<V>(mean);
  const V rest = splat<V>(mean);  // lanes past the end: all but nothing, taken away below
  Wide<V> square{};
  int64_t past = 0;
  each_vector<W>(n, [&](auto extent, int64_t i, int64_t count) {
    const Wide<V> d = widen(load<decltype(extent)>(x + i, count, rest)) - centre;
    square = square + d * d;
    past += W - count;
  });
  const double off = static_cast<double>(static_cast<ScalarOf<T>>(mean)) - mean;
  return {mean, rstd_of(total(square) - past * off * off, 0, n, eps)};
}

constexpr int64_t kLongLine = 2048;

// The mean of a row, or nearly: what the deviations from it add up to mends it. The sum of a short row need not
// be good, it must be there soon.
template <class T> inline ScalarOf<T> line_centre(const T* x, int64_t n) {
  using V = VectorOf<T>;
  constexpr int W = lanes<V>;
  if (n >= kLongLine) {
    const auto value = [&](auto extent, int64_t i, int64_t count) {
      return Pair<V>{load<decltype(extent)>(x + i, count), V{}};
    };
    return static_cast<ScalarOf<T>>(line_sums<V>(n, value).first / n);
  }
  V a{}, b{}, c{}, d{};
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W) {
    a = a + load<Whole>(x + i, W);
    b = b + load<Whole>(x + i + W, W);
    c = c + load<Whole>(x + i + 2 * W, W);
    d = d + load<Whole>(x + i + 3 * W, W);
  }
  each_vector<W>(n - i, [&](auto extent, int64_t j, int64_t count) {
    a = a + load<decltype(extent)>(x + i + j, count);
  });
  return lane_sum((a + b) + (c + d)) / n;
}

// The sum of squares of a row, as `line_sums` adds: RMS norm needs no other, and its rows are often short.
template <class T> inline double line_square(const T* x, int64_t n) {
  using V = VectorOf<T>;
  constexpr int W = lanes<V>, kStep = 4 * W;
  const auto square = [](V v) { return v * v; };
  Wide<V> sum{};
  int64_t i = 0;
  while (i + kStep <= n) {
    V a{}, b{}, c{}, d{};
    const int64_t end = smaller(n - kStep, i + (kShort - 1) * kStep);
    for (; i <= end; i += kStep) {
      a = a + square(load<Whole>(x + i, W));
      b = b + square(load<Whole>(x + i + W, W));
      c = c + square(load<Whole>(x + i + 2 * W, W));
      d = d + square(load<Whole>(x + i + 3 * W, W));
    }
    sum = sum + widen((a + b) + (c + d));
  }
  V rest{};
  for (; i + W <= n; i += W) rest = rest + square(load<Whole>(x + i, W));
  if (i < n) rest = rest + square(load<Part>(x + i, n - i));
  return total(sum + widen(rest));
}

template <class T>
inline LineMoments line_moments(const T* x, int64_t n, ScalarOf<T> mean, double eps, bool rms) {
  using V = VectorOf<T>;
  if (rms) {
    const double square = line_square(x, n);
    if (sizeof(ScalarOf<T>) == 4 && !in_range(square)) return wide_line_moments(x, n, eps, true);
    return {0, rstd_of(square, 0, n, eps)};
  }
  const V centre = splat<V>(mean);
  const auto sums = line_sums<V>(n, [&](auto extent, int64_t i, int64_t count) {
    const V d = load<decltype(extent)>(x + i, count, centre) - centre;
    return Pair<V>{d, d * d};
  });
  if (sizeof(ScalarOf<T>) == 4 && !in_range(sums.second)) return wide_line_moments(x, n, eps, false);
  // What the deviations add up to, which would be 0 in exact arithmetic, mends the mean's rounding.
  const double rest = sums.first / n;
  return {mean + rest, rstd_of(sums.second, rest, n, eps)};
}

}  // namespace leannorm::LEANNORM_ISA::rows
