// Planes of which some elements are not data. Their values are replaced before they are used.
#pragma once

#include "channel_planes.h"

namespace leannorm::LEANNORM_ISA {

// Which lanes of a V are data, from as many bytes of 1 or 0; from twice as many, those of the even elements and those
// of the odd ones.
#if defined(__AVX512F__)
template <class V> using Lanes = std::conditional_t<lanes<V> == 16, __mmask16, __mmask8>;
LEANNORM_INLINE F chosen(__mmask16 data, F yes, F no) { return (F)_mm512_mask_blend_ps(data, (__m512)no, (__m512)yes); }
LEANNORM_INLINE D chosen(__mmask8 data, D yes, D no) { return (D)_mm512_mask_blend_pd(data, (__m512d)no, (__m512d)yes); }
template <class V> LEANNORM_INLINE Several<Lanes<V>, 1> lanes_of(const uint8_t (&bytes)[lanes<V>]) {
  __m128i b{};
  std::memcpy(&b, bytes, sizeof bytes);
  return {static_cast<Lanes<V>>(_mm_test_epi8_mask(b, b))};
}
LEANNORM_INLINE Several<__mmask16, 2> lanes_of(const uint8_t (&bytes)[2 * lanes<F>]) {
  const __m256i b = read<__m256i>(bytes);
  return {_mm256_test_epi16_mask(b, _mm256_set1_epi16(0x00ff)), _mm256_test_epi16_mask(b, _mm256_set1_epi16((short)0xff00))};
}
#else
template <class V> using Lanes = decltype(V{} != V{});
template <class V> LEANNORM_INLINE V chosen(Lanes<V> data, V yes, V no) { return data ? yes : no; }
template <class V> LEANNORM_INLINE Several<Lanes<V>, 1> lanes_of(const uint8_t (&bytes)[lanes<V>]) {
  Lanes<V> data;
#if defined(__AVX2__)
  int64_t b = 0;
  std::memcpy(&b, bytes, sizeof bytes);
  const __m128i packed = _mm_cvtsi64_si128(b);
  if constexpr (lanes<V> == 8) data = (Lanes<V>)_mm256_cvtepi8_epi32(packed);
  else data = (Lanes<V>)_mm256_cvtepi8_epi64(packed);
#else
  for (int i = 0; i < lanes<V>; ++i) data[i] = bytes[i];
#endif
  return {data != 0};
}
LEANNORM_INLINE Several<Lanes<F>, 2> lanes_of(const uint8_t (&bytes)[2 * lanes<F>]) {
  const U pairs = widen_bits(read<HalfU16>(bytes));
  return {(pairs & 0xff) != 0, (pairs & 0xff00) != 0};
}
#endif

// The mask of one plane, 1 or 0 for each element, from element `start` of the tensor on.
template <class E> struct Mask {
  using V = typename E::V;
  const uint8_t* of = nullptr;  // null: all is data
  int64_t start = 0;

  template <bool Whole> LEANNORM_INLINE auto at(int64_t i, int64_t n) const {
    uint8_t bytes[E::W] = {};
    if constexpr (Whole) std::memcpy(bytes, of + (i - start), E::W);
    else std::memcpy(bytes, of + (i - start), n);
    if constexpr (E::Batch::size == 2) return lanes_of(bytes);
    else return lanes_of<V>(bytes);
  }
};
// For a plane that is all data up to its end.
struct NoMask { static constexpr const void* of = nullptr; };
// body(mask), with what the compiler knows about it; one body if any activation is computed.
template <Form form, class E, class Body> LEANNORM_INLINE void with_mask(const Mask<E>& mask, Body body) {
  if constexpr (form == kAny) body(mask);
  else if (mask.of == nullptr) body(NoMask());
  else body(mask);
}
// b, but `no` at positions that are not data.
template <bool Whole, class M, class Batch, class V>
LEANNORM_INLINE void choose(const M& mask, Batch& b, int64_t i, int64_t n, V no) {
  if constexpr (!std::is_same_v<M, NoMask>) {
    if (mask.of == nullptr) return;
    const auto m = mask.template at<Whole>(i, n);
#pragma GCC unroll 2
    for (int j = 0; j < b.size; ++j) b.of[j] = chosen(m.of[j], b.of[j], no);
  }
}

template <class E> LEANNORM_INLINE Mask<E> mask_of(const Valid& valid, int64_t plane, int64_t start) {
  if (valid.mask == nullptr) return {};
  return {valid.mask + valid.first(plane), start};
}

// visit(start, end, plane, mask) for the valid end of every plane.
template <class E, class Visit> LEANNORM_INLINE void each_valid(Block block, const Valid& valid, Visit visit) {
  for (int64_t p = 0; p < block.count; ++p) {
    const int64_t start = p * block.stride, length = valid.end(p, block.length);
    if (length > 0) visit(start, length, p, mask_of<E>(valid, p, start));
  }
}

template <class E, class Add, class Done>
LEANNORM_INLINE void masked_sums(const void* base, Block block, const Valid& valid, typename E::V k, Add add, Done done) {
  using T = typename E::Scalar;
  const T* x = static_cast<const T*>(base);
  int64_t pending = 0;
  each_valid<E>(block, valid, [&](int64_t start, int64_t length, int64_t, const Mask<E>& of_plane) LEANNORM_BODY {
    with_mask<kCommon>(of_plane, [&](auto mask) LEANNORM_BODY {
      each_run<E::W, kCommon>(
          start, length, pending,
          [&](int64_t i, int64_t n, auto whole) LEANNORM_BODY {
            if (block.next != 0) __builtin_prefetch(x + i + block.next, 0, 2);
            typename E::Batch b;
            if constexpr (whole) b = E::load(x + i);
            else b = E::load(x + i, n, k);
            choose<whole>(mask, b, i, n, k);
            add(b);
          },
          done);
    });
  });
  if (pending != 0) done();
}

// Lanes without data have the shift, which adds nothing.
template <class T>
void masked_moments(const void* x, Block block, Valid valid, double shift, double* sums, double* squares) {
  using E = AnyOrder<T>;
  using V = typename E::V;
  const V k = splat<V>(shift);
  Runs<E> runs;
  Sums<V> sum;
  masked_sums<E>(
      x, block, valid, k,
      [&](const typename E::Batch& b) LEANNORM_BODY {
#pragma GCC unroll 2
        for (int j = 0; j < b.size; ++j) runs.of[j].add_moments(b.of[j], k);
      },
      [&]() LEANNORM_BODY { take(sum, runs); });
  sum.put(sums, squares);
}

template <class T>
void masked_wide_moments(const void* x, Block block, Valid valid, double shift, double* sums, double* squares) {
  using E = InOrder<T>;
  using V = typename E::V;
  const Wide<V> wide_k = splat_wide<V>(shift);
  Sums<V> sum;
  masked_sums<E>(
      x, block, valid, splat<V>(shift),
      [&](const typename E::Batch& b) LEANNORM_BODY { sum.add_moments(b.of[0], wide_k); }, []() LEANNORM_BODY {});
  sum.put(sums, squares);
}

// The batch of zeros at the positions after the data.
template <class E> LEANNORM_INLINE void put_zeros(Place<E> place, void* p, int64_t n, bool whole, bool past) {
  if (p == nullptr) return;
  if (whole) place.template store<true>(p, typename E::Batch{}, n, past);
  else place.template store<false>(p, typename E::Batch{}, n, past);
}

// As `each_written`; take(i, n, whole, past, mask) for batches with data, and zeros for those after it. A batch that
// has both gets a mask of its own.
template <class E, Form form, class Begin, class Take>
LEANNORM_INLINE void each_masked(const Operands& o, Block block, const Valid& valid, Begin begin, Take take) {
  using T = typename E::Scalar;
  constexpr int W = E::W;
  const auto zeros = [&](int64_t i, int64_t n, bool whole, bool past) LEANNORM_BODY {
    put_zeros<E>({o, i}, o.result, n, whole, past);
    put_zeros<E>({o, i}, o.dz, n, whole, past);
  };
  for (int64_t p = 0; p < block.count; ++p) {
    int64_t i = p * block.stride;
    const int64_t data = i + valid.end(p, block.length), end = i + block.length;
    const Mask<E> of_plane = mask_of<E>(valid, p, i);
    begin(valid.statistic(p));
    for (int64_t stop = first_line<T>(o, i, end);; stop = end) {  // up to the first line, and from there on
      const bool past = writes_past<T>(o, i);
      const int64_t valid_stop = data < stop ? data : stop;
      with_mask<form>(of_plane, [&](auto mask) LEANNORM_BODY {
        for (; i + W <= valid_stop; i += W) take(i, W, std::true_type(), past, mask);
      });
      if (i < valid_stop) {
        const int64_t n = stop - i < W ? stop - i : W;
        uint8_t some[W] = {};
        Mask<E> mask = of_plane;
        if (mask.of == nullptr && data < i + n) {
          for (int64_t j = i; j < data; ++j) some[j - i] = 1;
          mask = {some, i};
        }
        if (n == W) take(i, n, std::true_type(), past, mask);
        else take(i, n, std::false_type(), false, mask);
        i += n;
      }
      for (; i + W <= stop; i += W) zeros(i, W, true, past);
      if (i < stop) zeros(i, stop - i, false, false);
      if (stop == end) break;
      i = stop;
    }
  }
  if (o.past) settle();
}

template <class T, Form form> void masked_normalize(Operands o, Block block, Valid valid, Coefficients c, int act) {
  using E = AnyOrder<T>;
  using V = typename E::V;
  Affine<V> affine;
  each_masked<E, form>(
      o, block, valid, [&](int64_t s) LEANNORM_BODY { affine = plane_affine<V>(c, s); },
      [&](int64_t i, int64_t n, auto whole, bool past, auto mask) LEANNORM_BODY {
        const Place<E> place{o, i};
        auto z = normalized<E, form, whole>(place, n, block.ahead, affine, act);
        choose<whole>(mask, z, i, n, V{});
        place.template store<whole>(o.result, z, n, past);
      });
}

// dz and x - mean, 0 at positions that are not data.
template <class E, Form form, bool Whole, class M>
LEANNORM_INLINE auto masked_gradient(Place<E> place, int64_t n, const Affine<typename E::V>& affine, int act,
                                     const M& mask) {
  using V = typename E::V;
  auto g = gradient<E, form, Whole>(place, n, affine, act);
  if constexpr (!std::is_same_v<M, NoMask>) if (mask.of != nullptr) {
    const auto m = mask.template at<Whole>(place.at, n);
#pragma GCC unroll 2
    for (int j = 0; j < g.size; ++j) {
      g.of[j].dz = chosen(m.of[j], g.of[j].dz, V{});
      g.of[j].centred = chosen(m.of[j], g.of[j].centred, V{});
    }
  }
  return g;
}

template <class T, Form form>
void masked_grad_sums(Operands o, Block block, Valid valid, Coefficients c, int act, double* sum_dz,
                      double* sum_dz_centred) {
  using E = AnyOrder<T>;
  using V = typename E::V;
  Runs<E> runs;
  Sums<V> sum;
  int64_t pending = 0;
  const auto done = [&]() LEANNORM_BODY { take(sum, runs); };
  each_valid<E>(block, valid, [&](int64_t start, int64_t length, int64_t plane, const Mask<E>& of_plane) LEANNORM_BODY {
    const int64_t s = valid.statistic(plane);
    const Affine<V> affine = plane_affine<V>(c, s);
    with_mask<form>(of_plane, [&](auto mask) LEANNORM_BODY {
      each_run<E::W, form>(
          start, length, pending,
          [&](int64_t i, int64_t n, auto whole) LEANNORM_BODY {
            const Place<E> place{o, i};
            if (block.next != 0) {
              place.fetch(o.x, block.next);
              place.fetch(o.dy, block.next);
              if (o.out != nullptr) place.fetch(o.out, block.next);
            }
            const auto g = masked_gradient<E, form, whole>(place, n, affine, act, mask);
#pragma GCC unroll 2
            for (int j = 0; j < g.size; ++j) runs.of[j].add(g.of[j]);
          },
          done);
    });
    if (!valid.of_one_sample) return;
    done();
    pending = 0;
    sum.put(sum_dz + s, sum_dz_centred + s);
  });
  done();
  sum.put(sum_dz, sum_dz_centred);
}

template <class T, Form form> void masked_input_grad(Operands o, Block block, Valid valid, Coefficients c, int act) {
  using E = AnyOrder<T>;
  using V = typename E::V;
  Backward<V> backward;
  each_masked<E, form>(
      o, block, valid, [&](int64_t s) LEANNORM_BODY { backward = plane_backward<V>(c, s); },
      [&](int64_t i, int64_t n, auto whole, bool past, auto mask) LEANNORM_BODY {
        const Place<E> place{o, i};
        place.fetch(o.x, block.ahead);
        place.fetch(o.dy, block.ahead);
        if (o.out != nullptr) place.fetch(o.out, block.ahead);
        const auto g = masked_gradient<E, form, whole>(place, n, backward, act, mask);
        typename E::Batch dx, dz;
#pragma GCC unroll 2
        for (int j = 0; j < dx.size; ++j) {
          dz.of[j] = g.of[j].dz;
          dx.of[j] = backward.input_grad(g.of[j].dz, g.of[j].centred);
        }
        choose<whole>(mask, dx, i, n, V{});
        if (o.dz != nullptr) place.template store<whole>(o.dz, dz, n, past);
        place.template store<whole>(o.result, dx, n, past);
      });
}

}  // namespace leannorm::LEANNORM_ISA
