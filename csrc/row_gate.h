// The gradients of a gated residual.
#pragma once

#include "row_lines.h"

namespace leannorm::LEANNORM_ISA::rows {

template <class T> void gate_backward(const GateBackward& a, int64_t begin, int64_t end, void* dgate) {
  using V = VectorOf<T>;
  using S = ScalarOf<T>;
  const int64_t n = a.kept;
  for (int64_t row = begin; row < end; ++row) {
    const T* const dtotal = static_cast<const T*>(a.dtotal) + row * n;
    const T* const residual = a.residual == nullptr ? nullptr : static_cast<const T*>(a.residual) + row * n;
    T* const dresidual = static_cast<T*>(a.dresidual) + row * n;
    const Line<T> gate(a.gate, row);
    each_vector<lanes<V>>(n, [&](auto extent, int64_t i, int64_t count) {
      using E = decltype(extent);
      const V d = load<E>(dtotal + i, count);
      store<E>(dresidual + i, d * gate.template at<E>(i, count), count);
      if (residual == nullptr) return;
      const V term = d * load<E>(residual + i, count);
      S* const sum = static_cast<S*>(dgate) + i;
      if (!a.own) store<E>(sum, load<E>(sum, count) + term, count);
      else if (sizeof(T) < sizeof(S) && a.gate.narrow) store<E>(static_cast<T*>(dgate) + row * n + i, term, count);
      else store<E>(sum + row * n, term, count);
    });
  }
}

}  // namespace leannorm::LEANNORM_ISA::rows
