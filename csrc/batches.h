// The elements that one load takes from memory, as one vector or as two.
#pragma once

#include "past.h"

namespace leannorm::LEANNORM_ISA {

template <class X, int N> struct Several {
  X of[N];
  static constexpr int size = N;
};

// Element i of a batch is its lane i. The `n` forms touch the first n elements only; a partial load leaves
// `rest` in the other lanes.
template <class T> struct InOrder {
  using Scalar = T;
  using E = Element<T>;
  using V = typename E::V;
  using Batch = Several<V, 1>;
  static constexpr int W = E::W;

  LEANNORM_INLINE static Batch load(const T* p) { return {E::load(p)}; }
  LEANNORM_INLINE static Batch load(const T* p, int64_t n, V rest) { return {E::load(p, n, rest)}; }
  LEANNORM_INLINE static void store(T* p, Batch b) { E::store(p, b.of[0]); }
  LEANNORM_INLINE static void store(T* p, Batch b, int64_t n) { E::store(p, b.of[0], n); }
  LEANNORM_INLINE static void stream(T* p, Batch b) { LEANNORM_ISA::stream(p, b.of[0]); }
};

// In the order that takes the least work. A 32-bit lane has two bfloat16, and each is a float32 except for the bits
// of the other: the even ones are one vector, the odd ones the next.
template <class T> struct AnyOrder : InOrder<T> {};
template <> struct AnyOrder<bfloat16> {
  using Scalar = bfloat16;
  using V = F;
  using Batch = Several<F, 2>;
  static constexpr int W = 2 * lanes<F>;

  LEANNORM_INLINE static Batch load(const bfloat16* p) { return apart(read<U>(p)); }
  LEANNORM_INLINE static Batch load(const bfloat16* p, int64_t n, F rest) {
    const Batch b = apart(read_pairs(&p->bits, n));
    return {blend(b.of[0], (n + 1) / 2, rest), blend(b.of[1], n / 2, rest)};
  }
  LEANNORM_INLINE static void store(bfloat16* p, Batch b) {
    const U u = together(b);
    std::memcpy(p, &u, sizeof u);
  }
  LEANNORM_INLINE static void store(bfloat16* p, Batch b, int64_t n) { write_pairs(&p->bits, together(b), n); }
  LEANNORM_INLINE static void stream(bfloat16* p, Batch b) {
    write_past(reinterpret_cast<float*>(p), bits<F>(together(b)));
  }

 private:
  static constexpr uint32_t kUpper = 0xffff0000u;
  LEANNORM_INLINE static Batch apart(U u) { return {bits<F>(u << 16), bits<F>(u & kUpper)}; }
  LEANNORM_INLINE static U together(Batch b) {
    return rounded_to_upper_half(b.of[0]) >> 16 | (rounded_to_upper_half(b.of[1]) & kUpper);
  }
};

}  // namespace leannorm::LEANNORM_ISA
