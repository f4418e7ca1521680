// Planes: runs of elements that share one statistic, its coefficients in every lane.
#pragma once

#include "channel_elements.h"

namespace leannorm::LEANNORM_ISA {

template <class V> inline Affine<V> plane_affine(const Coefficients& c, int64_t i) {
  const V mean = splat<V>(c.mean[i]);
  return {mean, splat<V>(c.mean[i] - mean[0]), splat<V>(c.scale[i]), splat<V>(c.bias[i])};
}
template <class V> inline Backward<V> plane_backward(const Coefficients& c, int64_t i) {
  const Affine<V> affine = plane_affine<V>(c, i);
  if (c.slope == nullptr) return {affine, V{}, V{}, V{}, true};
  return {affine, splat<V>(c.rstd[i]), splat<V>(c.slope[i]), splat<V>(c.shift[i]), false};
}

template <class T>
void plane_moments(const void* base, Block block, const double* shift, double* sums, double* squares) {
  using E = Element<T>;
  using V = typename E::V;
  constexpr int W = E::W;
  const Wide<V> k = splat_wide<V>(*shift);
  Sums<V> even, odd;  // two chains of additions, so that none waits for the other
  for (int64_t p = 0; p < block.count; ++p) {
    const T* x = static_cast<const T*>(base) + p * block.stride;
    int64_t i = 0;
    for (; i + 2 * W <= block.length; i += 2 * W) {
      even.add_moments(E::load(x + i), k);
      odd.add_moments(E::load(x + i + W), k);
    }
    if (i + W <= block.length) {
      even.add_moments(E::load(x + i), k);
      i += W;
    }
    if (i == block.length) continue;
    // Lanes past the end hold the shift itself, an element of x, and add nothing.
    odd.add_moments(E::load(x + i, block.length - i, splat<V>(*shift)), k);
  }
  *sums += total(even.first + odd.first);
  *squares += total(even.second + odd.second);
}

template <class T, Form form>
void plane_normalize(const Operands& o, Block block, const Coefficients& c, int act) {
  using V = typename Element<T>::V;
  constexpr int W = Element<T>::W;
  Affine<V> affine = plane_affine<V>(c, 0);
  for (int64_t p = 0; p < block.count; ++p) {
    if (c.step != 0) affine = plane_affine<V>(c, p);
    const int64_t start = p * block.stride, end = start + block.length;
    int64_t i = start;
    for (; i + W <= end; i += W) normalize_vector<T, form, true>({o, i}, W, affine, act);
    if (i < end) normalize_vector<T, form, false>({o, i}, end - i, affine, act);
  }
}

template <class T, Form form>
void plane_grad_sums(const Operands& o, Block block, const Coefficients& c, int act, double* sum_dz,
                     double* sum_dz_centred) {
  using V = typename Element<T>::V;
  constexpr int W = Element<T>::W;
  Affine<V> affine = plane_affine<V>(c, 0);
  Sums<V> even, odd;
  for (int64_t p = 0; p < block.count; ++p) {
    if (c.step != 0) affine = plane_affine<V>(c, p);
    const int64_t start = p * block.stride, end = start + block.length;
    int64_t i = start;
    for (; i + 2 * W <= end; i += 2 * W) {
      even.add(gradient<T, form, true>({o, i}, W, affine, act));
      odd.add(gradient<T, form, true>({o, i + W}, W, affine, act));
    }
    if (i + W <= end) {
      even.add(gradient<T, form, true>({o, i}, W, affine, act));
      i += W;
    }
    if (i < end) odd.add(gradient<T, form, false>({o, i}, end - i, affine, act));
    if (c.step == 0 && p + 1 < block.count) continue;
    sum_dz[p * c.step] += total(even.first + odd.first);
    sum_dz_centred[p * c.step] += total(even.second + odd.second);
    even = odd = {};
  }
}

template <class T, Form form>
void plane_input_grad(const Operands& o, Block block, const Coefficients& c, int act) {
  using V = typename Element<T>::V;
  constexpr int W = Element<T>::W;
  Backward<V> backward = plane_backward<V>(c, 0);
  for (int64_t p = 0; p < block.count; ++p) {
    if (c.step != 0) backward = plane_backward<V>(c, p);
    const int64_t start = p * block.stride, end = start + block.length;
    int64_t i = start;
    for (; i + W <= end; i += W) input_grad_vector<T, form, true>({o, i}, W, backward, act);
    if (i < end) input_grad_vector<T, form, false>({o, i}, end - i, backward, act);
  }
}

}  // namespace leannorm::LEANNORM_ISA
