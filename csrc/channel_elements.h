// The computation on one vector of elements, for planes and columns alike.
#pragma once

#include <type_traits>

#include "activations.h"
#include "batches.h"
#include "channel.h"
#include "wide.h"

namespace leannorm::LEANNORM_ISA {

// The coefficients of a vector: the same for all lanes (a plane) or one per lane (columns).
template <class V> struct Affine {
  V mean, mean_rest, scale, bias;  // the mean in two parts, so that a large one loses no digits

  LEANNORM_INLINE V centre(V x) const { return (x - mean) - mean_rest; }
  LEANNORM_INLINE V apply(V centred) const { return fma(centred, scale, bias); }
};
template <class V> struct Backward : Affine<V> {
  V rstd, slope, shift;
  bool constant;  // the statistics do not depend on x

  LEANNORM_INLINE V input_grad(V dz, V centred) const {
    return constant ? dz * this->scale : fma(dz, this->scale, fma(centred * rstd, slope, shift));
  }
};

// Splits the work at compile time by what is common, at run time by what is rare; kCommon is identity and relu,
// kQuick the activations of few steps (forward only), each selected at run time. float64 has one form for all, and so
// has every type on processors from before 2013: kAny, in which the other activations are calls, so that they are
// compiled once.
enum Form { kPlain, kReluFromInput, kReluFromOutput, kCommon, kQuick, kAny };
#if defined(__x86_64__) && !defined(__AVX2__)
template <class T> constexpr bool kManyForms = false;
#else
template <class T> constexpr bool kManyForms = !std::is_same_v<T, double>;
#endif
constexpr bool is_quick(int act) {
  return act == kLeakyRelu || act == kHardswish || act == kHardtanh || act == kRelu6;
}
LEANNORM_INLINE Form forward_form(int act) {
  if (act == kIdentity || act == kRelu) return kCommon;
  return is_quick(act) ? kQuick : kAny;
}
LEANNORM_INLINE Form backward_form(const Operands& o, int act) {
  if (act == kIdentity) return kPlain;
  return act != kRelu ? kAny : o.out != nullptr ? kReluFromOutput : kReluFromInput;
}

// body(0) to body(n - 1); unrolled if n is a Constant.
template <int N> using Constant = std::integral_constant<int, N>;
template <class Number, class Body> LEANNORM_INLINE void each_of(Number n, Body body) {
  if constexpr (std::is_same_v<Number, int>) {
#pragma GCC unroll 1
    for (int i = 0; i < n; ++i) body(i);
  } else {
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i) body(i);
  }
}

// Operands at one place, and a batch of elements there (`InOrder` or `AnyOrder`): `n` of them if that is less than a
// whole batch.
template <class E> struct Place {
  using T = typename E::Scalar;
  using V = typename E::V;
  using Batch = typename E::Batch;
  const Operands& o;
  int64_t at;

  LEANNORM_INLINE void fetch(const void* p, int64_t ahead) const {
    __builtin_prefetch(static_cast<const T*>(p) + at + ahead, 0, 2);
  }
  LEANNORM_INLINE void fetch_to_write(void* p) const { __builtin_prefetch(static_cast<T*>(p) + at, 1, 3); }
  template <bool Whole> LEANNORM_INLINE Batch load(const void* p, int64_t n, V rest) const {
    const T* q = static_cast<const T*>(p) + at;
    if constexpr (Whole) return E::load(q);
    else return E::load(q, n, rest);
  }
  template <bool Whole> LEANNORM_INLINE void store(void* p, const Batch& v, int64_t n, bool past) const {
    T* q = static_cast<T*>(p) + at;
    if constexpr (!Whole) E::store(q, v, n);
    else if (past) E::stream(q, v);
    else E::store(q, v);
  }
};

// Only the quick ones: the others are not compiled here.
template <int kFirst = 0, class V> LEANNORM_INLINE V activate_quickly(V z, int act) {
  if constexpr (kFirst == kActivations) return z;
  else {
    if constexpr (is_quick(kFirst))
      if (act == kFirst) return activate(z, kFirst);
    return activate_quickly<kFirst + 1>(z, act);
  }
}
template <Form form, class V> LEANNORM_INLINE V activated(V z, int act) {
  if constexpr (form == kPlain) return z;
  else if constexpr (form == kQuick) return activate_quickly(z, act);
  else if constexpr (form == kCommon) {
    const V least = splat<V>(act == kRelu ? 0 : -__builtin_inf());
    return z < least ? least : z;
  } else if constexpr (kManyForms<typename Scalar<V>::type>) return activate(z, act);
  else return act == kIdentity ? z : act == kRelu ? activate(z, kRelu) : activate_by_call(z, act);
}
// dz, from the activation's input or output; not for identity.
template <Form form, bool FromOutput, class V> LEANNORM_INLINE V through_activation(V dy, V v, int act) {
  constexpr bool by_call = !kManyForms<typename Scalar<V>::type>;
  if (form != kAny || (by_call && act == kRelu)) return v <= V{} ? V{} : dy;  // as torch at NaN
  if constexpr (FromOutput) return dy * (by_call ? slope_from_output_by_call(v, act) : slope_from_output(v, act));
  else return dy * (by_call ? slope_from_input_by_call(v, act) : slope_from_input(v, act));
}

template <class E, Form form, bool Whole>
LEANNORM_INLINE auto normalized(Place<E> place, int64_t n, int64_t ahead, const Affine<typename E::V>& affine, int act) {
  using V = typename E::V;
  const Operands& o = place.o;
  place.fetch(o.x, ahead);
  if (o.residual != nullptr) place.fetch(o.residual, ahead);
  auto z = place.template load<Whole>(o.x, n, V{});
#pragma GCC unroll 2
  for (V& each : z.of) each = affine.apply(affine.centre(each));
  if (o.residual != nullptr) {
    const auto r = place.template load<Whole>(o.residual, n, V{});
#pragma GCC unroll 2
    for (int j = 0; j < z.size; ++j) z.of[j] = z.of[j] + r.of[j];
  }
#pragma GCC unroll 2
  for (V& each : z.of) each = activated<form>(each, act);
  return z;
}

// Where the next cache line of the result begins, if results are written past the caches, but at most the end.
// Vectors whose dz is kept are not divided again: there the line of the first one counts.
template <class T> LEANNORM_INLINE int64_t first_line(const Operands& o, int64_t at, int64_t end) {
  const int64_t before = -(reinterpret_cast<uintptr_t>(o.result) / sizeof(T) + at) % (64 / sizeof(T));
  return !o.past || o.kept != nullptr ? at : at + before < end ? at + before : end;
}
// Whether results may be written past the caches, from this element on.
template <class T> LEANNORM_INLINE bool writes_past(const Operands& o, int64_t at) {
  const auto address = [at](void* p) { return reinterpret_cast<uintptr_t>(p) + at * sizeof(T); };
  return o.past && address(o.result) % 64 == 0 && (o.dz == nullptr || address(o.dz) % 64 == 0);
}

// dz, and with it x - mean. Lanes past the end have dz = 0.
template <class V> struct Gradient { V dz, centred; };

template <class E, Form form, bool Whole>
LEANNORM_INLINE auto gradient(Place<E> place, int64_t n, const Affine<typename E::V>& affine, int act) {
  using V = typename E::V;
  const Operands& o = place.o;
  const auto dy = place.template load<Whole>(o.dy, n, V{}), x = place.template load<Whole>(o.x, n, affine.mean);
  constexpr int kVectors = decltype(dy)::size;
  Several<Gradient<V>, kVectors> result;
#pragma GCC unroll 2
  for (int j = 0; j < kVectors; ++j) result.of[j] = {dy.of[j], affine.centre(x.of[j])};
  if constexpr (form == kPlain) return result;
  constexpr bool any = form == kAny || form == kCommon;
  if (any && act == kIdentity) return result;
  if (form == kReluFromOutput || (any && o.out != nullptr)) {
    const auto y = place.template load<Whole>(o.out, n, V{});
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) {
      V& dz = result.of[j].dz;
      dz = through_activation<form, true>(dz, y.of[j], act);
    }
    return result;
  }
  typename E::Batch r{};
  if (o.residual != nullptr) r = place.template load<Whole>(o.residual, n, V{});
#pragma GCC unroll 2
  for (int j = 0; j < kVectors; ++j) {
    auto& [dz, centred] = result.of[j];
    V z = affine.apply(centred);
    if (o.residual != nullptr) z = z + r.of[j];
    dz = through_activation<form, false>(dz, z, act);
  }
  return result;
}

// What the gradient's two passes prefetch. If they share it and the first computes for long, it prefetches
// everything, even the lines that the second is going to write; otherwise the first prefetches only x, because the
// second has to write.
template <Form form, class E> LEANNORM_INLINE void fetch_for_sums(Place<E> place, const Block& block) {
  const Operands& o = place.o;
  const int64_t next = block.shared ? block.ahead : block.next;
  if (next == 0) return;
  place.fetch(o.x, next);
  if (block.shared && form != kAny) return;
  place.fetch(o.dy, next);
  if (o.out != nullptr) place.fetch(o.out, next);
  if (block.shared && !o.past) place.fetch_to_write(o.result);
}
template <Form form, class E> LEANNORM_INLINE void fetch_for_input(Place<E> place, int64_t ahead, bool shared) {
  const Operands& o = place.o;
  if (shared && form == kAny) return;
  if (!shared) place.fetch(o.x, ahead);
  place.fetch(o.dy, ahead);
  if (o.out != nullptr) place.fetch(o.out, ahead);
}

// dx and dz of a batch.
template <class Batch> struct Gradients {
  Batch dx, dz;

  template <bool Whole, class E> LEANNORM_INLINE void store(Place<E> place, int64_t n, bool past) const {
    if (place.o.dz != nullptr) place.template store<Whole>(place.o.dz, dz, n, past);
    place.template store<Whole>(place.o.result, dx, n, past);
  }
};

template <class E, Form form, bool Whole>
LEANNORM_INLINE auto input_grads(Place<E> place, int64_t n, const Backward<typename E::V>& c, int act) {
  const auto g = gradient<E, form, Whole>(place, n, c, act);
  Gradients<typename E::Batch> result;
#pragma GCC unroll 2
  for (int j = 0; j < g.size; ++j) {
    result.dz.of[j] = g.of[j].dz;
    result.dx.of[j] = c.input_grad(g.of[j].dz, g.of[j].centred);
  }
  return result;
}

// Two sums of one run of at most kRun vectors, in the compute type: few enough terms that float32's rounding stays
// below the rounding of the result.
constexpr int kRun = 8;
template <class V> struct Run {
  V first{}, second{};

  LEANNORM_INLINE void add_moments(V x, V shift) {
    const V d = x - shift;
    first = first + d;
    second = fma(d, d, second);
  }
  LEANNORM_INLINE void add(Gradient<V> g) {
    first = first + g.dz;
    second = fma(g.dz, g.centred, second);
  }
};

// Sums of runs, in float64.
template <class V> struct Sums {
  Wide<V> first{}, second{};

  LEANNORM_INLINE void add(Run<V> run) {
    first = first + widen(run.first);
    second = second + widen(run.second);
  }
  // Adds a run and empties it; adds the sums to two numbers and empties them.
  LEANNORM_INLINE void take(Run<V>& run) {
    add(run);
    run = {};
  }
  LEANNORM_INLINE void put(double* a, double* b) {
    *a += total(first);
    *b += total(second);
    *this = {};
  }
  LEANNORM_INLINE void add_moments(V x, Wide<V> shift) {
    const Wide<V> d = widen(x) - shift;
    first = first + d;
    second = second + d * d;
  }
};

}  // namespace leannorm::LEANNORM_ISA
