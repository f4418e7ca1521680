// Stores that bypass the caches.
#pragma once

#include "simd.h"

namespace leannorm::LEANNORM_ISA {

// Past the caches, if the whole output would not stay in them anyway: a line that is overwritten as a whole need not
// be read first. The address must be a multiple of the vector's size, and `settle` must come before anybody else
// reads.
#if defined(__AVX512F__)
inline void write_past(float* p, F v) { _mm512_stream_ps(p, (__m512)v); }
inline void write_past(double* p, D v) { _mm512_stream_pd(p, (__m512d)v); }
inline void write_past(uint16_t* p, HalfU16 v) { _mm256_stream_si256((__m256i*)p, (__m256i)v); }
#elif defined(__AVX2__)
inline void write_past(float* p, F v) { _mm256_stream_ps(p, (__m256)v); }
inline void write_past(double* p, D v) { _mm256_stream_pd(p, (__m256d)v); }
inline void write_past(uint16_t* p, HalfU16 v) { _mm_stream_si128((__m128i*)p, (__m128i)v); }
#else
template <class T, class V> inline void write_past(T* p, V v) { std::memcpy(p, &v, sizeof v); }
#endif
inline void settle() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}
inline void stream(float* p, F v) { write_past(p, v); }
inline void stream(double* p, D v) { write_past(p, v); }
inline void stream(bfloat16* p, F v) { write_past(&p->bits, to_bfloat16(v)); }
inline void stream(float16* p, F v) { write_past(&p->bits, to_float16(v)); }

}  // namespace leannorm::LEANNORM_ISA
