// Mean and rstd of a contiguous row.
#pragma once

#include "row_sums.h"

namespace leannorm::LEANNORM_ISA::rows {

// In float64, for squares that leave float32's range: mean and rstd.
template <class T> inline Pair<double> wide_line_moments(const T* x, int64_t n, double eps, bool rms) {
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
  const V rest = splat<V>(mean);  // lanes past the end: nearly nothing, which is subtracted below
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

struct alignas(64) LineMoments { double mean[kTogether], rstd[kTogether]; };

// Sums of the deviations of a line from `centre` and of their squares.
template <class T> LEANNORM_ONCE Pair<double> line_deviations(const T* line, int64_t n, ScalarOf<T> centre) {
  using V = VectorOf<T>;
  const V from = all<V>(centre);
  return line_sum<V>(n, [&](auto extent, int64_t i, int64_t count) LEANNORM_BODY {
    const V d = load<decltype(extent)>(line + i, count, from) - from;
    return Pair<V>{d, d};
  });
}

// For `rows` lines, `step` elements apart. The first elements of a line give a centre near its mean; the sum of the
// deviations from it corrects both. If it was not near, the deviations are taken once more, from the corrected mean.
template <class T>
inline void line_moments(const T* x, int64_t step, int rows, int64_t n, double eps, bool rms, LineMoments& to) {
  using V = VectorOf<T>;
  using S = ScalarOf<T>;
  const int64_t few = smaller(n, 4 * lanes<V>);
  const double share = 1.0 / n, share_of_few = 1.0 / few;
  alignas(64) double first[kTogether], second[kTogether], centre[kTogether];
  for (int k = 0; k < kTogether; ++k) first[k] = second[k] = centre[k] = 0;
  for (int k = 0; k < rows && !rms; ++k) {
    const T* const line = x + k * step;
    const Pair<double> sums = line_sum<V>(few, [&](auto extent, int64_t i, int64_t count) LEANNORM_BODY {
      return Pair<V>{load<decltype(extent)>(line + i, count), V{}};
    });
    centre[k] = static_cast<S>(sums.first * share_of_few);
  }
  for (int k = 0; k < rows; ++k) {
    const Pair<double> sums = line_deviations(x + k * step, n, static_cast<S>(centre[k]));
    first[k] = sums.first, second[k] = sums.second;
  }
  for (int k = 0; k < rows && !rms; ++k) {
    if (4 * first[k] * first[k] <= second[k] * n) continue;  // at most a quarter of the squares comes from it
    centre[k] = static_cast<S>(centre[k] + first[k] * share);
    const Pair<double> sums = line_deviations(x + k * step, n, static_cast<S>(centre[k]));
    first[k] = sums.first, second[k] = sums.second;
  }
  for (int k = 0; k < kTogether; k += lanes<D>) {
    // The sum of the deviations, which would be 0 in exact arithmetic, corrects the mean's rounding.
    const D rest = rms ? D{} : read<D>(first + k) * share, variance = read<D>(second + k) * share - rest * rest;
    const D mean = read<D>(centre + k) + rest, rstd = 1 / root((variance < D{} ? D{} : variance) + eps);  // NaN stays
    std::memcpy(to.mean + k, &mean, sizeof mean);
    std::memcpy(to.rstd + k, &rstd, sizeof rstd);
  }
  for (int k = 0; k < rows; ++k) {
    const bool constant = second[k] == 0 && first[k] == 0 && first_of(x + k * step) == centre[k];
    if (sizeof(S) == 8 || constant || in_range(second[k])) continue;
    const Pair<double> wide = wide_line_moments(x + k * step, n, eps, rms);
    to.mean[k] = wide.first, to.rstd[k] = wide.second;
  }
}

}  // namespace leannorm::LEANNORM_ISA::rows
