// Vectors of the current instruction set, through the compiler's vector extension: loads, stores and
// conversions of every element type. Included by `*_kernels.cpp` only.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Vectors wider than a register must not be passed to a call.
#define LEANNORM_INLINE inline __attribute__((always_inline))
#define LEANNORM_BODY __attribute__((always_inline))  // of a lambda
#define LEANNORM_ONCE __attribute__((noinline))  // compiled once for many kernels

namespace leannorm {

struct bfloat16 { uint16_t bits; };
struct float16 { uint16_t bits; };

namespace LEANNORM_ISA {

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX2__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif

typedef float F __attribute__((vector_size(kBytes)));
typedef int32_t I __attribute__((vector_size(kBytes)));
typedef uint32_t U __attribute__((vector_size(kBytes)));
typedef double D __attribute__((vector_size(kBytes)));
typedef float HalfF __attribute__((vector_size(kBytes / 2)));
typedef uint16_t HalfU16 __attribute__((vector_size(kBytes / 2)));

template <class V> struct Scalar;
template <> struct Scalar<F> { using type = float; };
template <> struct Scalar<D> { using type = double; };
template <class V> constexpr int lanes = kBytes / sizeof(typename Scalar<V>::type);

template <class V> LEANNORM_INLINE V splat(double value) {
  return V{} + static_cast<typename Scalar<V>::type>(value);
}

// `value` in every lane, from memory if it is there.
template <class V> LEANNORM_INLINE V all(typename Scalar<V>::type value) {
  V v;
  for (int i = 0; i < lanes<V>; ++i) v[i] = value;
  return v;
}

// v, in a register: what is used several times is loaded less often.
template <class V> LEANNORM_INLINE V held(V v) {
#if defined(__x86_64__)
  __asm__("" : "+v"(v));
#endif
  return v;
}

// a * b + c rounded once. Left to itself the compiler fuses the same formula in one place and not in another, and
// rebuilt values would differ in the last bit.
LEANNORM_INLINE F fma(F a, F b, F c) {
#if defined(__AVX512F__)
  return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  for (int i = 0; i < lanes<F>; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}
LEANNORM_INLINE D fma(D a, D b, D c) {
#if defined(__AVX512F__)
  return (D)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__FMA__)
  return (D)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif defined(__aarch64__)
  for (int i = 0; i < lanes<D>; ++i) c[i] = __builtin_fma(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}

template <class V, class T> LEANNORM_INLINE V read(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

LEANNORM_INLINE D root(D v) {
#if defined(__AVX512F__)
  return (D)_mm512_sqrt_pd((__m512d)v);
#elif defined(__AVX2__)
  return (D)_mm256_sqrt_pd((__m256d)v);
#else
  for (int i = 0; i < lanes<D>; ++i) v[i] = __builtin_sqrt(v[i]);
  return v;
#endif
}

template <class To, class From> LEANNORM_INLINE To bits(From v) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &v, sizeof to);
  return to;
}

// ------------------------------------------------------------------ 16-bit floats

// The compiler's own __builtin_convertvector splits these into pieces of 128 bits.
LEANNORM_INLINE U widen_bits(HalfU16 h) {
#if defined(__AVX512F__)
  return (U)_mm512_cvtepu16_epi32((__m256i)h);
#elif defined(__AVX2__)
  return (U)_mm256_cvtepu16_epi32((__m128i)h);
#else
  return __builtin_convertvector(h, U);
#endif
}
LEANNORM_INLINE HalfU16 narrow_bits(U u) {
#if defined(__AVX512F__)
  return (HalfU16)_mm512_cvtepi32_epi16((__m512i)u);
#elif defined(__AVX2__)
  const __m256i packed = _mm256_packus_epi32((__m256i)u, (__m256i)u);
  return (HalfU16)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0b1000));
#else
  return __builtin_convertvector(u, HalfU16);
#endif
}

LEANNORM_INLINE F from_bfloat16(HalfU16 h) { return bits<F>(widen_bits(h) << 16); }

// A bfloat16, in the upper half of each lane.
LEANNORM_INLINE U rounded_to_upper_half(F v) {
  const U u = bits<U>(v), rounded = u + 0x7fff + ((u >> 16) & 1);
  return v == v ? rounded : U{} + 0x7fc00000u;
}
LEANNORM_INLINE HalfU16 to_bfloat16(F v) { return narrow_bits(rounded_to_upper_half(v) >> 16); }

LEANNORM_INLINE F from_float16(HalfU16 h) {
#if defined(__AVX512F__)
  return (F)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__)
  return (F)_mm256_cvtph_ps((__m128i)h);
#else
  const U u = widen_bits(h), sign = (u & 0x8000u) << 16, magnitude = u & 0x7fffu;
  // An exponent that is 112 too small, corrected by a multiplication, which also normalizes subnormal numbers.
  const F scaled = bits<F>(magnitude << 13) * 0x1p112f;
  const U finite = bits<U>(scaled), special = (magnitude << 13) | 0x7f800000u;
  return bits<F>(sign | (magnitude >= 0x7c00u ? special : finite));
#endif
}

LEANNORM_INLINE HalfU16 to_float16(F v) {
#if defined(__AVX512F__)
  return (HalfU16)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
  return (HalfU16)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const U u = bits<U>(v), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
  const U normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1)) >> 13;
  // Below 2^-14 the addition of 0.5 leaves the rounded subnormal number in the low bits.
  const U subnormal = bits<U>(bits<F>(magnitude) + 0.5f) - 0x3f000000u;
  const U infinite = U{} + 0x7c00u, nan = U{} + 0x7e00u;
  U h = magnitude < 0x38800000u ? subnormal : normal;
  h = magnitude >= 0x477ff000u ? infinite : h;
  h = magnitude > 0x7f800000u ? nan : h;
  return narrow_bits(sign | h);
#endif
}

// ------------------------------------------------------------------ elements in memory

// Element<T>: how a T in memory becomes lanes of V, the vector it is computed in. The `n` forms touch
// the first n elements only; a partial load leaves `rest` in the other lanes.
template <class T> struct Element;

template <class V_, class T> struct Dense {
  using V = V_;
  static constexpr int W = lanes<V>;
  LEANNORM_INLINE static V load(const T* p) { return read<V>(p); }
  LEANNORM_INLINE static void store(T* p, V v) { std::memcpy(p, &v, sizeof v); }
  LEANNORM_INLINE static V load(const T* p, int64_t n, V rest) {
    if (n < 0 || n > W) __builtin_unreachable();
    T lane[W];
    std::memcpy(lane, &rest, sizeof lane);
    std::memcpy(lane, p, n * sizeof(T));
    return read<V>(lane);
  }
  LEANNORM_INLINE static void store(T* p, V v, int64_t n) {
    if (n < 0 || n > W) __builtin_unreachable();
    std::memcpy(p, &v, n * sizeof(T));
  }
};

#if defined(__AVX512F__)
template <> struct Element<float> : Dense<F, float> {
  using Dense::load;
  using Dense::store;
  LEANNORM_INLINE static F load(const float* p, int64_t n, F rest) {
    return (F)_mm512_mask_loadu_ps((__m512)rest, (__mmask16)((1u << n) - 1), p);
  }
  LEANNORM_INLINE static void store(float* p, F v, int64_t n) {
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v);
  }
};
template <> struct Element<double> : Dense<D, double> {
  using Dense::load;
  using Dense::store;
  LEANNORM_INLINE static D load(const double* p, int64_t n, D rest) {
    return (D)_mm512_mask_loadu_pd((__m512d)rest, (__mmask8)((1u << n) - 1), p);
  }
  LEANNORM_INLINE static void store(double* p, D v, int64_t n) {
    _mm512_mask_storeu_pd(p, (__mmask8)((1u << n) - 1), (__m512d)v);
  }
};
LEANNORM_INLINE HalfU16 read_some(const uint16_t* p, int64_t n) {
  return (HalfU16)_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p);
}
LEANNORM_INLINE void write_some(uint16_t* p, HalfU16 h, int64_t n) {
  _mm256_mask_storeu_epi16(p, (__mmask16)((1u << n) - 1), (__m256i)h);
}
LEANNORM_INLINE U read_pairs(const uint16_t* p, int64_t n) {
  return (U)_mm512_maskz_loadu_epi16((__mmask32)((1u << n) - 1), p);
}
LEANNORM_INLINE void write_pairs(uint16_t* p, U u, int64_t n) {
  _mm512_mask_storeu_epi16(p, (__mmask32)((1u << n) - 1), (__m512i)u);
}
#else
#if defined(__AVX2__)
LEANNORM_INLINE __m256i first(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
template <> struct Element<float> : Dense<F, float> {
  using Dense::load;
  using Dense::store;
  LEANNORM_INLINE static F load(const float* p, int64_t n, F rest) {
    const __m256i mask = first(n);
    return (F)_mm256_blendv_ps((__m256)rest, _mm256_maskload_ps(p, mask), _mm256_castsi256_ps(mask));
  }
  LEANNORM_INLINE static void store(float* p, F v, int64_t n) { _mm256_maskstore_ps(p, first(n), (__m256)v); }
};
#else
template <> struct Element<float> : Dense<F, float> {};
#endif
template <> struct Element<double> : Dense<D, double> {};
LEANNORM_INLINE HalfU16 read_some(const uint16_t* p, int64_t n) {
  uint16_t lane[lanes<F>] = {};
  std::memcpy(lane, p, n * sizeof *p);
  return read<HalfU16>(lane);
}
LEANNORM_INLINE void write_some(uint16_t* p, HalfU16 h, int64_t n) { std::memcpy(p, &h, n * sizeof *p); }
LEANNORM_INLINE U read_pairs(const uint16_t* p, int64_t n) {
  uint16_t lane[2 * lanes<F>] = {};
  std::memcpy(lane, p, n * sizeof *p);
  return read<U>(lane);
}
LEANNORM_INLINE void write_pairs(uint16_t* p, U u, int64_t n) { std::memcpy(p, &u, n * sizeof *p); }
#endif

LEANNORM_INLINE F blend(F v, int64_t n, F rest) {
  I lane;
  for (int i = 0; i < lanes<F>; ++i) lane[i] = i;
  return lane < static_cast<int32_t>(n) ? v : rest;
}

template <> struct Element<bfloat16> {
  using V = F;
  static constexpr int W = lanes<F>;
  LEANNORM_INLINE static F load(const bfloat16* p) { return from_bfloat16(read<HalfU16>(p)); }
  LEANNORM_INLINE static F load(const bfloat16* p, int64_t n, F rest) {
    return blend(from_bfloat16(read_some(&p->bits, n)), n, rest);
  }
  LEANNORM_INLINE static void store(bfloat16* p, F v) {
    const HalfU16 h = to_bfloat16(v);
    std::memcpy(p, &h, sizeof h);
  }
  LEANNORM_INLINE static void store(bfloat16* p, F v, int64_t n) { write_some(&p->bits, to_bfloat16(v), n); }
};

template <> struct Element<float16> {
  using V = F;
  static constexpr int W = lanes<F>;
  LEANNORM_INLINE static F load(const float16* p) { return from_float16(read<HalfU16>(p)); }
  LEANNORM_INLINE static F load(const float16* p, int64_t n, F rest) {
    return blend(from_float16(read_some(&p->bits, n)), n, rest);
  }
  LEANNORM_INLINE static void store(float16* p, F v) {
    const HalfU16 h = to_float16(v);
    std::memcpy(p, &h, sizeof h);
  }
  LEANNORM_INLINE static void store(float16* p, F v, int64_t n) { write_some(&p->bits, to_float16(v), n); }
};

// Lane i of the result is lane index[i] of `values`, if the machine has an instruction for it.
template <class V> constexpr bool picks_lanes = false;
#if defined(__AVX512F__)
template <> inline constexpr bool picks_lanes<F> = true;
LEANNORM_INLINE F picked(F values, I index) { return (F)_mm512_permutexvar_ps((__m512i)index, (__m512)values); }
#elif defined(__AVX2__)
template <> inline constexpr bool picks_lanes<F> = true;
LEANNORM_INLINE F picked(F values, I index) { return (F)_mm256_permutevar8x32_ps((__m256)values, (__m256i)index); }
#endif

}  // namespace LEANNORM_ISA
}  // namespace leannorm
