// Vectors that wait for their activation together: it is selected once for all of them, and its loop is compiled once
// for all kernels.
#pragma once

#include "channel_elements.h"

namespace leannorm::LEANNORM_ISA {

// Whether kernels let vectors wait; otherwise rare activations are calls.
template <class T, Form form> constexpr bool kWaits = form == kAny && kManyForms<T>;

struct None {};

template <class V> LEANNORM_ONCE void activate_all(V* v, int n, int act) {
  with_known(act, [&](auto known) LEANNORM_BODY {
    for (int i = 0; i < n; ++i) v[i] = activate(v[i], known);
  });
}

// Batches that wait, and where each belongs: its element and its number of lanes. The number of waiting batches is
// not in here, so that it stays in a register; the last vectors of planes are marked by their lanes, of which there
// are fewer.
template <class E> struct Waiting {
  using V = typename E::V;
  using Batch = typename E::Batch;
  static constexpr int kMost = 8;

  Batch of[kMost];
  int64_t element[kMost];
  int lanes[kMost];  // below 0: a whole batch that is written past the caches

  LEANNORM_INLINE void put(int i, const Batch& b, int64_t at, int64_t n, bool past) {
    of[i] = b;
    element[i] = at;
    lanes[i] = past ? -1 : int(n);
  }
  V* vectors() { return of[0].of; }
};

// Activated and written.
template <class E> LEANNORM_ONCE void put_activated(Waiting<E>& waiting, int count, const Operands& operands, int act) {
  activate_all(waiting.vectors(), count * Waiting<E>::Batch::size, act);
  const Operands o = operands;  // a local copy, which is not read again after every store
  for (int k = 0; k < count; ++k) {
    const int n = waiting.lanes[k];
    const Place<E> place{o, waiting.element[k]};
    if (n == E::W) place.template store<true>(o.result, waiting.of[k], n, false);
    else if (n < 0) place.template store<true>(o.result, waiting.of[k], n, true);
    else place.template store<false>(o.result, waiting.of[k], n, false);
  }
}

}  // namespace leannorm::LEANNORM_ISA
