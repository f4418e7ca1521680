// Planes: runs of elements that share one statistic, its coefficients in every lane.
#pragma once

#include <type_traits>

#include "channel_waiting.h"

namespace leannorm::LEANNORM_ISA {

template <class V> LEANNORM_INLINE V all_lanes(const void* p, int64_t i) {
  return static_cast<const typename Scalar<V>::type*>(p)[i] - V{};  // V{} + would make -0 a 0
}
template <class V> LEANNORM_INLINE Affine<V> plane_affine(const Coefficients& c, int64_t i) {
  return {all_lanes<V>(c.mean, i), all_lanes<V>(c.mean_rest, i), all_lanes<V>(c.scale, i), all_lanes<V>(c.bias, i)};
}
template <class V> LEANNORM_INLINE Backward<V> plane_backward(const Coefficients& c, int64_t i) {
  const Affine<V> affine = plane_affine<V>(c, i);
  return {affine, all_lanes<V>(c.rstd, i), all_lanes<V>(c.slope, i), all_lanes<V>(c.shift, i), c.constant};
}

template <class E> using Runs = Several<Run<typename E::V>, E::Batch::size>;
template <class V, int N> LEANNORM_INLINE void take(Sums<V>& sum, Several<Run<V>, N>& runs) {
#pragma GCC unroll 2
  for (Run<V>& run : runs.of) sum.take(run);
}

// take(i, n, whole) for every batch of a plane of `length` elements from element i on, n of its elements; done()
// after at most every kRun of them, which are unrolled unless any activation is computed in each. `pending` batches
// are taken and not done yet.
template <int W, Form form, class Take, class Done>
LEANNORM_INLINE void each_run(int64_t i, int64_t length, int64_t& pending, Take take, Done done) {
  const int64_t whole_runs = length / (kRun * W), rest = (length + W - 1) / W - whole_runs * kRun, end = i + length;
  if (pending + rest > kRun || (pending != 0 && whole_runs != 0)) {
    done();
    pending = 0;
  }
  for (int64_t run = 0; run < whole_runs; ++run, i += kRun * W) {
    const auto take_one = [&](int j) LEANNORM_BODY { take(i + j * W, W, std::true_type()); };
    if constexpr (form == kAny) each_of(kRun, take_one);
    else each_of(Constant<kRun>(), take_one);
    done();
  }
  pending += rest;
  for (; i + W <= end; i += W) take(i, W, std::true_type());
  if (i < end) take(i, end - i, std::false_type());
}
// The same for consecutive planes.
template <int W, Form form, class Take, class Done>
LEANNORM_INLINE void each_run(int64_t start, int64_t planes, Block block, Take take, Done done) {
  int64_t pending = 0;
  for (int64_t p = 0; p < planes; ++p) each_run<W, form>(start + p * block.stride, block.length, pending, take, done);
  if (pending != 0) done();
}

// visit(first element, planes, statistic) for the planes of every statistic.
template <class Visit> LEANNORM_INLINE void each_statistic(Block block, Visit visit) {
  for (int64_t s = 0; s < block.statistics; ++s) visit(s * block.length, block.count, s);
}

template <class T>
void plane_moments(const void* base, Block block, const double* shift, double* sums, double* squares) {
  using E = AnyOrder<T>;
  using V = typename E::V;
  const T* x = static_cast<const T*>(base);
  Runs<E> runs;
  Sums<V> sum;
  each_statistic(block, [&](int64_t start, int64_t planes, int64_t s) LEANNORM_BODY {
    const V k = splat<V>(shift[s]);
    each_run<E::W, kPlain>(
        start, planes, block,
        [&](int64_t i, int64_t n, auto whole) LEANNORM_BODY {
          // Lanes past the end have the shift, which adds nothing.
          typename E::Batch b;
          if (block.next != 0) __builtin_prefetch(x + i + block.next, 0, 2);
          if constexpr (whole) b = E::load(x + i);
          else b = E::load(x + i, n, k);
#pragma GCC unroll 2
          for (int j = 0; j < b.size; ++j) runs.of[j].add_moments(b.of[j], k);
        },
        [&]() LEANNORM_BODY { take(sum, runs); });
    sum.put(sums + s, squares + s);
  });
}

// The same in float64 throughout, for values whose squares float32 cannot represent, or a shift far from the mean.
template <class T>
void plane_wide_moments(const void* base, Block block, const double* shift, double* sums, double* squares) {
  using E = Element<T>;
  using V = typename E::V;
  const T* x = static_cast<const T*>(base);
  Sums<V> sum;
  each_statistic(block, [&](int64_t start, int64_t planes, int64_t s) LEANNORM_BODY {
    const V k = splat<V>(shift[s]);  // per element, so exact
    const Wide<V> wide_k = splat_wide<V>(shift[s]);
    each_run<E::W, kPlain>(
        start, planes, block,
        [&](int64_t i, int64_t n, auto whole) LEANNORM_BODY {
          if constexpr (whole) sum.add_moments(E::load(x + i), wide_k);
          else sum.add_moments(E::load(x + i, n, k), wide_k);
        },
        []() LEANNORM_BODY {});
    sum.put(sums + s, squares + s);
  });
}

// begin(statistic) before its planes and take(i, n, whole, past) for every batch of them, n of its elements. If
// results are written past the caches, this starts at the first cache line, and the elements before it are written
// normally.
template <class E, class Begin, class Take>
LEANNORM_INLINE void each_written(const Operands& o, Block block, Begin begin, Take take) {
  using T = typename E::Scalar;
  constexpr int W = E::W;
  each_statistic(block, [&](int64_t start, int64_t planes, int64_t s) LEANNORM_BODY {
    begin(s);
    for (int64_t p = 0; p < planes; ++p) {
      int64_t i = start + p * block.stride;
      const int64_t end = i + block.length;
      for (int64_t stop = first_line<T>(o, i, end);; stop = end) {  // up to the first line, and from there on
        const bool past = writes_past<T>(o, i);
        for (; i + W <= stop; i += W) take(i, W, std::true_type(), past);
        if (i < stop) take(i, stop - i, std::false_type(), false);
        if (stop == end) break;
        i = stop;
      }
    }
  });
  if (o.past) settle();
}

template <class T, Form form>
void plane_normalize(Operands o, Block block, Coefficients c, int act) {
  using E = AnyOrder<T>;
  using V = typename E::V;
  Affine<V> affine;
  std::conditional_t<kWaits<T, form>, Waiting<E>, None> waiting;
  int count = 0;  // of those that wait
  each_written<E>(
      o, block, [&](int64_t s) LEANNORM_BODY { affine = plane_affine<V>(c, s); },
      [&](int64_t i, int64_t n, auto whole, bool past) LEANNORM_BODY {
        const Place<E> place{o, i};
        if constexpr (kWaits<T, form>) {
          waiting.put(count++, normalized<E, kPlain, whole>(place, n, block.ahead, affine, act), i, n, past);
          if (count == waiting.kMost) {
            put_activated(waiting, count, o, act);
            count = 0;
          }
        } else {
          place.template store<whole>(o.result, normalized<E, form, whole>(place, n, block.ahead, affine, act), n, past);
        }
      });
  if constexpr (kWaits<T, form>) {
    put_activated(waiting, count, o, act);
    if (o.past) settle();
  }
}

// dz of a chunk, one vector per batch: the sums leave it for the input's gradient.
template <class V> struct Kept {
  V* at;

  template <int N> LEANNORM_INLINE void put(const Several<Gradient<V>, N>& g) {
    if (at == nullptr) return;
#pragma GCC unroll 2
    for (int j = 0; j < N; ++j) *at++ = g.of[j].dz;
  }
  template <class E, bool Whole>
  LEANNORM_INLINE void input_grads(Place<E> place, int64_t n, const Backward<V>& c, bool past) {
    const auto x = place.template load<Whole>(place.o.x, n, c.mean);
    Gradients<typename E::Batch> result;
#pragma GCC unroll 2
    for (int j = 0; j < x.size; ++j) {
      result.dz.of[j] = *at++;
      result.dx.of[j] = c.input_grad(result.dz.of[j], c.centre(x.of[j]));
    }
    result.template store<Whole>(place, n, past);
  }
};

template <class T, Form form>
void plane_grad_sums(Operands o, Block block, Coefficients c, int act, double* sum_dz,
                     double* sum_dz_centred) {
  using E = AnyOrder<T>;
  using V = typename E::V;
  Runs<E> runs;
  Sums<V> sum;
  Kept<V> kept{static_cast<V*>(o.kept)};
  each_statistic(block, [&](int64_t start, int64_t planes, int64_t s) LEANNORM_BODY {
    const Affine<V> affine = plane_affine<V>(c, s);
    each_run<E::W, form>(
        start, planes, block,
        [&](int64_t i, int64_t n, auto whole) LEANNORM_BODY {
          const Place<E> place{o, i};
          fetch_for_sums<form>(place, block);
          const auto g = gradient<E, form, whole>(place, n, affine, act);
#pragma GCC unroll 2
          for (int j = 0; j < g.size; ++j) runs.of[j].add(g.of[j]);
          if constexpr (form == kAny) kept.put(g);
        },
        [&]() LEANNORM_BODY { take(sum, runs); });
    sum.put(sum_dz + s, sum_dz_centred + s);
  });
}

template <class T, Form form>
void plane_input_grad(Operands o, Block block, Coefficients c, int act) {
  using E = AnyOrder<T>;
  using V = typename E::V;
  Backward<V> backward;
  Kept<V> kept{static_cast<V*>(o.kept)};
  each_written<E>(
      o, block, [&](int64_t s) LEANNORM_BODY { backward = plane_backward<V>(c, s); },
      [&](int64_t i, int64_t n, auto whole, bool past) LEANNORM_BODY {
        const Place<E> place{o, i};
        if constexpr (form == kAny) {
          if (kept.at != nullptr) return kept.template input_grads<E, whole>(place, n, backward, past);
        }
        fetch_for_input<form>(place, block.ahead, block.shared);
        input_grads<E, form, whole>(place, n, backward, act).template store<whole>(place, n, past);
      });
}

}  // namespace leannorm::LEANNORM_ISA
