// exp, expm1 and erf on vectors: float32 within about one unit in the last place, float64 lane by lane.
#pragma once

#include "simd.h"

namespace leannorm::LEANNORM_ISA {

// (e^r - 1 - r) / r^2 near 0
LEANNORM_INLINE F exp_series(F r) {
  F q = fma(F{} + 1.9875691500e-4f, r, F{} + 1.3981999507e-3f);
  q = fma(q, r, F{} + 8.3334519073e-3f);
  q = fma(q, r, F{} + 4.1665795894e-2f);
  q = fma(q, r, F{} + 1.6666665459e-1f);
  return fma(q, r, F{} + 5.0000001201e-1f);
}
// e^x = 2^n * (1 + p), |p| small.
struct ReducedExp { F n, p; };
LEANNORM_INLINE ReducedExp reduce_exp(F x) {
  // Beyond these e^x is 0 or infinite; NaN stays.
#if defined(__AVX512F__)
  x = (F)_mm512_max_ps(_mm512_set1_ps(-128), _mm512_min_ps(_mm512_set1_ps(128), (__m512)x));
#else
  x = x > 128.0f ? F{} + 128.0f : x;
  x = x < -128.0f ? F{} - 128.0f : x;
#endif
  const F magic = F{} + 0x1.8p23f;  // adding it rounds to an integer
  const F n = (x * 1.44269504088896341f + magic) - magic;
  F r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  return {n, r + r * r * exp_series(r)};
}
// v * 2^n
LEANNORM_INLINE F scaled(F v, F n) {
#if defined(__AVX512F__)
  return (F)_mm512_scalef_ps((__m512)v, (__m512)n);
#else
  // In two factors, so that neither leaves the range of float32 before the product does.
  const I whole = __builtin_convertvector(n, I), half = whole >> 1;
  return v * bits<F>((whole - half + 127) << 23) * bits<F>((half + 127) << 23);
#endif
}
#if defined(__AVX512F__)
alignas(64) constexpr float kPowers[32] = {  // 2^(i/32)
    1.0f, 1.02189715f, 1.04427378f, 1.0671404f, 1.09050773f, 1.11438674f, 1.13878863f, 1.16372486f,
    1.18920712f, 1.21524736f, 1.24185781f, 1.26905096f, 1.29683955f, 1.32523664f, 1.35425555f, 1.38390988f,
    1.41421356f, 1.44518081f, 1.47682615f, 1.50916443f, 1.54221083f, 1.57598085f, 1.61049033f, 1.64575548f,
    1.68179283f, 1.7186193f, 1.75625216f, 1.79470908f, 1.83400809f, 1.87416763f, 1.91520656f, 1.95714412f,
};
// 2^n * 2^(i/32) * (1 + p): n + i/32 is x * log2(e), rounded, and what adding `magic` leaves in the low bits is i.
LEANNORM_INLINE F exp(F x) {
  x = (F)_mm512_max_ps(_mm512_set1_ps(-128), _mm512_min_ps(_mm512_set1_ps(128), (__m512)x));  // NaN stays
  const F magic = F{} + 0x1.8p18f, shifted = fma(x, F{} + 1.44269504088896341f, magic), n = shifted - magic;
  const F rest = fma(x, F{} + 1.925963033e-8f, fma(x, F{} + 1.44269504088896341f, -n));
  const F power = (F)_mm512_permutex2var_ps(_mm512_load_ps(kPowers), bits<__m512i>(shifted), _mm512_load_ps(kPowers + 16));
  F p = fma(rest, F{} + 0.0555054f, F{} + 0.24022651f);
  p = fma(rest, p, F{} + 0.69314718f) * rest;
  return scaled(fma(power, p, power), n);  // which rounds n down
}
#else
// 2^n * (1 + p), where adding `magic` leaves n + 127, the exponent of 2^n, in the low bits. Beyond the normal range
// of float32 the power is 0 or infinite.
LEANNORM_INLINE F exp(F x) {
#if defined(__AVX2__)
  x = (F)_mm256_max_ps(_mm256_set1_ps(-88.3f), _mm256_min_ps(_mm256_set1_ps(89.0f), (__m256)x));  // NaN stays
#else
  x = x > 89.0f ? F{} + 89.0f : x;
  x = x < -88.3f ? F{} - 88.3f : x;
#endif
  const F magic = F{} + (0x1.8p23f + 127), shifted = fma(x, F{} + 1.44269504088896341f, magic), n = shifted - magic;
  const F r = fma(n, F{} + 2.12194440e-4f, fma(n, F{} - 0.693359375f, x));
  return bits<F>(bits<U>(shifted) << 23) * (1 + fma(r * r, exp_series(r), r));
}
#endif
LEANNORM_INLINE F expm1(F x) {
  const ReducedExp e = reduce_exp(x);
  const F power = scaled(F{} + 1.0f, e.n);
  return (power - 1) + power * e.p;
}

// Minimax fits on both sides of 475/512.
LEANNORM_INLINE F erf(F x) {
  const F t = bits<F>(bits<U>(x) & 0x7fffffffu), s = x * x;
  F r = t * -1.72853470e-5f + 3.83197126e-4f;
  const F u = t * -3.88396438e-3f + 2.42546219e-2f;
  r = r * s + u;
  r = r * t - 1.06777877e-1f;
  r = r * t - 6.34846687e-1f;
  r = r * t - 1.28717512e-1f;
  r = r * t - t;
  const F tail = 1 - exp(r), signed_tail = x < F{} ? -tail : tail;
  F q = s * -5.96761703e-4f + 4.99119423e-3f;
  q = q * s - 2.67681349e-2f;
  q = q * s + 1.12819925e-1f;
  q = q * s - 3.76125336e-1f;
  q = q * s + 1.28379166e-1f;
  return t > 0.927734375f ? signed_tail : q * x + x;
}

// Always calls: one for each lane.
#define LEANNORM_CALL inline __attribute__((noinline))
template <class Function> LEANNORM_INLINE D lane_by_lane(D x, Function function) {
  for (int i = 0; i < lanes<D>; ++i) x[i] = function(x[i]);
  return x;
}
LEANNORM_CALL D exp(D x) { return lane_by_lane(x, [](double v) { return __builtin_exp(v); }); }
LEANNORM_CALL D expm1(D x) { return lane_by_lane(x, [](double v) { return __builtin_expm1(v); }); }
LEANNORM_CALL D erf(D x) { return lane_by_lane(x, [](double v) { return __builtin_erf(v); }); }

}  // namespace leannorm::LEANNORM_ISA
