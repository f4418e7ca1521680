// Columns: rows of channels side by side, each lane with its own statistic. Columns are taken in strips
// that fit the registers, rows in groups that fit the nearest cache.
#pragma once

#include "channel_elements.h"

namespace leannorm::LEANNORM_ISA {

// run(first row, rows, first column, columns, strip) for every strip of every group of rows, where strip
// is the number of vectors as a compile-time constant. A group is a whole number of
// runs; while one is worked on the next is fetched, since the strips hide from the processor that all of it
// lies in one piece.
template <int N> struct Vectors { static constexpr int count = N; };
constexpr int kStrip = kBytes == 64 ? 4 : 2;

LEANNORM_INLINE int64_t row_group(int64_t columns) { return columns >= 64 ? kRun : kRun * (128 / (columns + 1)); }
template <int W, class Run> LEANNORM_INLINE void each_strip(Block block, Run run) {
  const int64_t group = row_group(block.length);
  for (int64_t r = 0; r < block.count; r += group) {
    const int64_t rows = block.count - r < group ? block.count - r : group;
    int64_t c = 0;
    for (; c + kStrip * W <= block.length; c += kStrip * W) run(r, rows, c, kStrip * W, Vectors<kStrip>());
    for (; c < block.length; c += W) run(r, rows, c, block.length - c < W ? block.length - c : W, Vectors<1>());
  }
}

template <class V> LEANNORM_INLINE V some_lanes(const void* p, int64_t at, int64_t n) {
  using S = typename Scalar<V>::type;
  const S* from = static_cast<const S*>(p) + at;
  return n < lanes<V> ? Element<S>::load(from, n, V{}) : Element<S>::load(from);
}
template <class V> LEANNORM_INLINE Affine<V> column_affine(const Coefficients& c, int64_t at, int64_t n) {
  return {some_lanes<V>(c.mean, at, n), some_lanes<V>(c.mean_rest, at, n), some_lanes<V>(c.scale, at, n),
          some_lanes<V>(c.bias, at, n)};
}
template <class V> LEANNORM_INLINE Backward<V> column_backward(const Coefficients& c, int64_t at, int64_t n) {
  const Affine<V> affine = column_affine<V>(c, at, n);
  if (c.slope == nullptr) return {affine, V{}, V{}, V{}, true};
  return {affine, some_lanes<V>(c.rstd, at, n), some_lanes<V>(c.slope, at, n), some_lanes<V>(c.shift, at, n), false};
}

template <class V> LEANNORM_INLINE void add_columns(double* first, double* second, int64_t columns, Sums<V> sum) {
  store_wide(first, load_wide<V>(first, columns) + sum.first, columns);
  store_wide(second, load_wide<V>(second, columns) + sum.second, columns);
}

template <class V, int N> LEANNORM_INLINE void take_runs(Run<V> (&run)[N], Sums<V> (&sum)[N]) {
  for (int j = 0; j < N; ++j) {
    sum[j].add(run[j]);
    run[j] = {};
  }
}

// take(row) for every row of a run, done() after each run of kRun rows at most.
template <class Take, class Done> LEANNORM_INLINE void each_row_run(int64_t rows, Take take, Done done) {
  for (int64_t i = 0; i < rows; i += kRun) {
    const int64_t end = i + kRun < rows ? i + kRun : rows;
    for (int64_t row = i; row < end; ++row) take(row);
    done();
  }
}

template <class T>
void column_moments(const void* base, Block block, const double* shift, double* sums, double* squares) {
  using E = Element<T>;
  using V = typename E::V;
  constexpr int W = E::W;
  const int64_t fetch = row_group(block.length) * block.stride;
  each_strip<W>(block, [&](int64_t r, int64_t rows, int64_t c, int64_t columns, auto strip) LEANNORM_BODY {
    constexpr int N = strip.count;
    const T* x = static_cast<const T*>(base) + r * block.stride + c;
    V k[N];
    Run<V> run[N];
    Sums<V> sum[N];
    for (int j = 0; j < N; ++j) k[j] = narrow(load_wide<V>(shift + c + j * W, columns - j * W));
    each_row_run(
        rows,
        [&](int64_t i) LEANNORM_BODY {
          const T* row = x + i * block.stride;
          for (int j = 0; j < N; ++j) __builtin_prefetch(row + fetch + j * W, 0, 2);
          if (columns < W) run[0].add_moments(E::load(row, columns, V{}), k[0]);
          else for (int j = 0; j < N; ++j) run[j].add_moments(E::load(row + j * W), k[j]);
        },
        [&]() LEANNORM_BODY { take_runs(run, sum); });
    for (int j = 0; j < N; ++j) add_columns(sums + c + j * W, squares + c + j * W, columns - j * W, sum[j]);
  });
}

// The same in float64 throughout: see plane_wide_moments.
template <class T>
void column_wide_moments(const void* base, Block block, const double* shift, double* sums, double* squares) {
  using E = Element<T>;
  using V = typename E::V;
  constexpr int W = E::W;
  each_strip<W>(block, [&](int64_t r, int64_t rows, int64_t c, int64_t columns, auto strip) LEANNORM_BODY {
    for (int j = 0; j < strip.count; ++j) {
      const T* x = static_cast<const T*>(base) + r * block.stride + c + j * W;
      const int64_t n = columns - j * W < W ? columns - j * W : W;
      const Wide<V> k = load_wide<V>(shift + c + j * W, n);
      Sums<V> sum;
      for (int64_t i = 0; i < rows; ++i, x += block.stride)
        sum.add_moments(n < W ? E::load(x, n, V{}) : E::load(x), k);
      add_columns(sums + c + j * W, squares + c + j * W, n, sum);
    }
  });
}

template <class T, Form form>
void column_normalize(const Operands& o, Block block, const Coefficients& c, int act) {
  using V = typename Element<T>::V;
  constexpr int W = Element<T>::W;
  const int64_t ahead = block.ahead != 0 ? block.ahead : row_group(block.length) * block.stride;
  each_strip<W>(block, [&](int64_t r, int64_t rows, int64_t at, int64_t columns, auto strip) LEANNORM_BODY {
    constexpr int N = strip.count;
    Affine<V> affine[N];
    for (int j = 0; j < N; ++j) affine[j] = column_affine<V>(c, at + j * W, columns - j * W);
    for (int64_t i = 0, x = r * block.stride + at; i < rows; ++i, x += block.stride) {
      if (columns < W) normalize_vector<T, form, false>({o, x}, columns, ahead, affine[0], act);
      else for (int j = 0; j < N; ++j) normalize_vector<T, form, true>({o, x + j * W}, W, ahead, affine[j], act);
    }
  });
}

template <class T, Form form>
void column_grad_sums(const Operands& o, Block block, const Coefficients& c, int act, double* sum_dz,
                      double* sum_dz_centred) {
  using V = typename Element<T>::V;
  constexpr int W = Element<T>::W;
  const int64_t fetch = row_group(block.length) * block.stride;
  each_strip<W>(block, [&](int64_t r, int64_t rows, int64_t at, int64_t columns, auto strip) LEANNORM_BODY {
    constexpr int N = strip.count;
    Affine<V> affine[N];
    Run<V> run[N];
    Sums<V> sum[N];
    for (int j = 0; j < N; ++j) affine[j] = column_affine<V>(c, at + j * W, columns - j * W);
    const int64_t x = r * block.stride + at;
    each_row_run(
        rows,
        [&](int64_t i) LEANNORM_BODY {
          const int64_t row = x + i * block.stride;
          for (int j = 0; j < N; ++j) {
            Place<T>{o, row + j * W}.fetch(o.x, fetch);
            Place<T>{o, row + j * W}.fetch(o.dy, fetch);
          }
          if (columns < W) run[0].add(gradient<T, form, false>({o, row}, columns, affine[0], act));
          else for (int j = 0; j < N; ++j) run[j].add(gradient<T, form, true>({o, row + j * W}, W, affine[j], act));
        },
        [&]() LEANNORM_BODY { take_runs(run, sum); });
    for (int j = 0; j < N; ++j)
      add_columns(sum_dz + at + j * W, sum_dz_centred + at + j * W, columns - j * W, sum[j]);
  });
}

template <class T, Form form>
void column_input_grad(const Operands& o, Block block, const Coefficients& c, int act) {
  using V = typename Element<T>::V;
  constexpr int W = Element<T>::W;
  const int64_t ahead = block.ahead != 0 ? block.ahead : row_group(block.length) * block.stride;
  each_strip<W>(block, [&](int64_t r, int64_t rows, int64_t at, int64_t columns, auto strip) LEANNORM_BODY {
    constexpr int N = strip.count;
    Backward<V> backward[N];
    for (int j = 0; j < N; ++j) backward[j] = column_backward<V>(c, at + j * W, columns - j * W);
    for (int64_t i = 0, x = r * block.stride + at; i < rows; ++i, x += block.stride) {
      if (columns < W) input_grad_vector<T, form, false>({o, x}, columns, ahead, backward[0], act);
      else for (int j = 0; j < N; ++j) input_grad_vector<T, form, true>({o, x + j * W}, W, ahead, backward[j], act);
    }
  });
}

}  // namespace leannorm::LEANNORM_ISA
