// Sums of vectors, lane by lane in float64, or of all lanes.
#pragma once

#include "simd.h"

namespace leannorm::LEANNORM_ISA {

// Wide<V>: the lanes of a V as float64.
template <class V> struct Wide;
template <> struct Wide<D> { D a; };
template <> struct Wide<F> { D a, b; };

LEANNORM_INLINE Wide<D> widen(D v) { return {v}; }
LEANNORM_INLINE Wide<F> widen(F v) {
#if defined(__AVX512F__)
  return {(D)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v)),
          (D)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)v, 1))};
#elif defined(__AVX2__)
  return {(D)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v)),
          (D)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, 1))};
#else
  HalfF half[2];
  std::memcpy(half, &v, sizeof v);
  return {__builtin_convertvector(half[0], D), __builtin_convertvector(half[1], D)};
#endif
}

LEANNORM_INLINE D narrow(Wide<D> v) { return v.a; }
LEANNORM_INLINE F narrow(Wide<F> v) {
#if defined(__AVX512F__)
  const __m512 low = _mm512_castps256_ps512(_mm512_cvtpd_ps((__m512d)v.a));
  return (F)_mm512_insertf32x8(low, _mm512_cvtpd_ps((__m512d)v.b), 1);
#elif defined(__AVX2__)
  return (F)_mm256_set_m128(_mm256_cvtpd_ps((__m256d)v.b), _mm256_cvtpd_ps((__m256d)v.a));
#else
  const HalfF half[2] = {__builtin_convertvector(v.a, HalfF), __builtin_convertvector(v.b, HalfF)};
  F joined;
  std::memcpy(&joined, half, sizeof joined);
  return joined;
#endif
}

LEANNORM_INLINE Wide<D> operator+(Wide<D> x, Wide<D> y) { return {x.a + y.a}; }
LEANNORM_INLINE Wide<D> operator-(Wide<D> x, Wide<D> y) { return {x.a - y.a}; }
LEANNORM_INLINE Wide<D> operator*(Wide<D> x, Wide<D> y) { return {x.a * y.a}; }
LEANNORM_INLINE Wide<F> operator+(Wide<F> x, Wide<F> y) { return {x.a + y.a, x.b + y.b}; }
LEANNORM_INLINE Wide<F> operator-(Wide<F> x, Wide<F> y) { return {x.a - y.a, x.b - y.b}; }
LEANNORM_INLINE Wide<F> operator*(Wide<F> x, Wide<F> y) { return {x.a * y.a, x.b * y.b}; }

template <class V> LEANNORM_INLINE Wide<V> splat_wide(double value) {
  if constexpr (sizeof(Wide<V>) == sizeof(D)) return {splat<D>(value)};
  else return {splat<D>(value), splat<D>(value)};
}

// The sum of all lanes, in the compute type.
template <int kLanes, class S> LEANNORM_INLINE S halves_sum(const S* lane) {
  if constexpr (kLanes == 1) {
    return *lane;
  } else {
    typedef S Half __attribute__((vector_size(kLanes / 2 * sizeof(S))));
    const Half sum = read<Half>(lane) + read<Half>(lane + kLanes / 2);
    S both[kLanes / 2];
    std::memcpy(both, &sum, sizeof sum);
    return halves_sum<kLanes / 2>(both);
  }
}
template <class V> LEANNORM_INLINE typename Scalar<V>::type lane_sum(V v) {
  typename Scalar<V>::type lane[lanes<V>];
  std::memcpy(lane, &v, sizeof v);
  return halves_sum<lanes<V>>(lane);
}
#if defined(__AVX2__)  // the same sums, in registers
LEANNORM_INLINE double halves_sum(__m256d v) {
  const __m128d sum = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
  return _mm_cvtsd_f64(_mm_add_sd(sum, _mm_unpackhi_pd(sum, sum)));
}
LEANNORM_INLINE float halves_sum(__m256 v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
#if defined(__AVX512F__)
template <> LEANNORM_INLINE double lane_sum(D v) {
  return halves_sum(_mm256_add_pd(_mm512_castpd512_pd256((__m512d)v), _mm512_extractf64x4_pd((__m512d)v, 1)));
}
template <> LEANNORM_INLINE float lane_sum(F v) {
  return halves_sum(_mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1)));
}
#else
template <> LEANNORM_INLINE double lane_sum(D v) { return halves_sum((__m256d)v); }
template <> LEANNORM_INLINE float lane_sum(F v) { return halves_sum((__m256)v); }
#endif
#endif
LEANNORM_INLINE double total(D v) { return lane_sum(v); }
LEANNORM_INLINE double total(Wide<D> v) { return total(v.a); }
LEANNORM_INLINE double total(Wide<F> v) { return total(v.a + v.b); }

// float64 values, one for each of the first n lanes of a V.
LEANNORM_INLINE D load_doubles(const double* p, int64_t n) {
  return n >= lanes<D> ? read<D>(p) : n > 0 ? Element<double>::load(p, n, D{}) : D{};
}
LEANNORM_INLINE void store_doubles(double* p, D v, int64_t n) {
  if (n >= lanes<D>) Element<double>::store(p, v);
  else if (n > 0) Element<double>::store(p, v, n);
}
template <class V> LEANNORM_INLINE Wide<V> load_wide(const double* p, int64_t n) {
  if constexpr (sizeof(Wide<V>) == sizeof(D)) return {load_doubles(p, n)};
  else return {load_doubles(p, n), load_doubles(p + lanes<D>, n - lanes<D>)};
}
LEANNORM_INLINE void store_wide(double* p, Wide<D> v, int64_t n) { store_doubles(p, v.a, n); }
LEANNORM_INLINE void store_wide(double* p, Wide<F> v, int64_t n) {
  store_doubles(p, v.a, n);
  store_doubles(p + lanes<D>, v.b, n - lanes<D>);
}

}  // namespace leannorm::LEANNORM_ISA
