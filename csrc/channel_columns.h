// Columns: rows of channels side by side, each lane with its own statistic. Columns are taken in strips
// that fit the registers, rows in groups that fit the nearest cache.
#pragma once

#include "channel_elements.h"

namespace leannorm::LEANNORM_ISA {

// run(first row, rows, first column, columns, strip) for every strip of every group of rows, where strip
// is the number of vectors as a compile-time constant.
template <int N> struct Vectors { static constexpr int count = N; };
constexpr int kStrip = kBytes == 64 ? 4 : 2;

template <int W, class Run> inline void each_strip(Block block, Run run) {
  const int64_t group = block.length >= 1024 ? 8 : 8192 / (block.length + 1);
  for (int64_t r = 0; r < block.count; r += group) {
    const int64_t rows = block.count - r < group ? block.count - r : group;
    int64_t c = 0;
    for (; c + kStrip * W <= block.length; c += kStrip * W) run(r, rows, c, kStrip * W, Vectors<kStrip>());
    for (; c < block.length; c += W) run(r, rows, c, block.length - c < W ? block.length - c : W, Vectors<1>());
  }
}

// Narrows up to a vector of float64 values.
template <class V> inline V load_values(const double* p, int64_t n) { return narrow(load_wide<V>(p, n)); }

template <class V> inline Affine<V> column_affine(const Coefficients& c, int64_t at, int64_t n) {
  const Wide<V> mean = load_wide<V>(c.mean + at, n);
  const V high = narrow(mean);
  return {high, narrow(mean - widen(high)), load_values<V>(c.scale + at, n), load_values<V>(c.bias + at, n)};
}
template <class V> inline Backward<V> column_backward(const Coefficients& c, int64_t at, int64_t n) {
  const Affine<V> affine = column_affine<V>(c, at, n);
  if (c.slope == nullptr) return {affine, V{}, V{}, V{}, true};
  return {affine, load_values<V>(c.rstd + at, n), load_values<V>(c.slope + at, n),
          load_values<V>(c.shift + at, n), false};
}

template <class V, int N> struct ColumnSums {
  Sums<V> lane[N];
  double *first, *second;
  int64_t columns;

  ColumnSums(double* first, double* second, int64_t columns) : first(first), second(second), columns(columns) {
    for (int j = 0; j < N; ++j) {
      const int64_t at = j * lanes<V>;
      lane[j] = {load_wide<V>(first + at, columns - at), load_wide<V>(second + at, columns - at)};
    }
  }
  void store() const {
    for (int j = 0; j < N; ++j) {
      const int64_t at = j * lanes<V>;
      store_wide(first + at, lane[j].first, columns - at);
      store_wide(second + at, lane[j].second, columns - at);
    }
  }
};

template <class T>
void column_moments(const void* base, Block block, const double* shift, double* sums, double* squares) {
  using E = Element<T>;
  using V = typename E::V;
  constexpr int W = E::W;
  each_strip<W>(block, [&](int64_t r, int64_t rows, int64_t c, int64_t columns, auto strip) {
    constexpr int N = strip.count;
    const T* x = static_cast<const T*>(base) + r * block.stride + c;
    Wide<V> k[N];
    for (int j = 0; j < N; ++j) k[j] = load_wide<V>(shift + c + j * W, columns - j * W);
    ColumnSums<V, N> acc(sums + c, squares + c, columns);
    for (int64_t i = 0; i < rows; ++i, x += block.stride) {
      if (columns < W) acc.lane[0].add_moments(E::load(x, columns, V{}), k[0]);
      else for (int j = 0; j < N; ++j) acc.lane[j].add_moments(E::load(x + j * W), k[j]);
    }
    acc.store();
  });
}

template <class T, Form form>
void column_normalize(const Operands& o, Block block, const Coefficients& c, int act) {
  using V = typename Element<T>::V;
  constexpr int W = Element<T>::W;
  each_strip<W>(block, [&](int64_t r, int64_t rows, int64_t at, int64_t columns, auto strip) {
    constexpr int N = strip.count;
    Affine<V> affine[N];
    for (int j = 0; j < N; ++j) affine[j] = column_affine<V>(c, at + j * W, columns - j * W);
    for (int64_t i = 0, x = r * block.stride + at; i < rows; ++i, x += block.stride) {
      if (columns < W) normalize_vector<T, form, false>({o, x}, columns, affine[0], act);
      else for (int j = 0; j < N; ++j) normalize_vector<T, form, true>({o, x + j * W}, W, affine[j], act);
    }
  });
}

template <class T, Form form>
void column_grad_sums(const Operands& o, Block block, const Coefficients& c, int act, double* sum_dz,
                      double* sum_dz_centred) {
  using V = typename Element<T>::V;
  constexpr int W = Element<T>::W;
  each_strip<W>(block, [&](int64_t r, int64_t rows, int64_t at, int64_t columns, auto strip) {
    // The two sums fill twice the registers that the moments do.
    constexpr int N = strip.count;
    Affine<V> affine[N];
    for (int j = 0; j < N; ++j) affine[j] = column_affine<V>(c, at + j * W, columns - j * W);
    ColumnSums<V, N> acc(sum_dz + at, sum_dz_centred + at, columns);
    for (int64_t i = 0, x = r * block.stride + at; i < rows; ++i, x += block.stride) {
      if (columns < W) acc.lane[0].add(gradient<T, form, false>({o, x}, columns, affine[0], act));
      else for (int j = 0; j < N; ++j) acc.lane[j].add(gradient<T, form, true>({o, x + j * W}, W, affine[j], act));
    }
    acc.store();
  });
}

template <class T, Form form>
void column_input_grad(const Operands& o, Block block, const Coefficients& c, int act) {
  using V = typename Element<T>::V;
  constexpr int W = Element<T>::W;
  each_strip<W>(block, [&](int64_t r, int64_t rows, int64_t at, int64_t columns, auto strip) {
    constexpr int N = strip.count;
    Backward<V> backward[N];
    for (int j = 0; j < N; ++j) backward[j] = column_backward<V>(c, at + j * W, columns - j * W);
    for (int64_t i = 0, x = r * block.stride + at; i < rows; ++i, x += block.stride) {
      if (columns < W) input_grad_vector<T, form, false>({o, x}, columns, backward[0], act);
      else for (int j = 0; j < N; ++j) input_grad_vector<T, form, true>({o, x + j * W}, W, backward[j], act);
    }
  });
}

}  // namespace leannorm::LEANNORM_ISA
