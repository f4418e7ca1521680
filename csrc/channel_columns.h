// Columns: rows of channels side by side, each lane with its own statistic. Rows are read in the order in
// which they lie in memory.
#pragma once

#include <type_traits>

#include "channel_elements.h"

namespace leannorm::LEANNORM_ISA {

constexpr int64_t kPage = 4096, kBehind = 8192;  // bytes

// visit(rows, element, column, lanes, whole) for every vector of every row, where `rows` rows are taken at
// once. The machine fetches ahead within a page: of rows as long as that many are read abreast, and their
// coefficients are loaded once for all; shorter rows are best read few at a time. Their number is known to the
// compiler, but at the end of a row and where any activation is computed: there one body is enough.
template <class T, Form form, int Many, class Visit>
LEANNORM_INLINE void each_column_vector(Block block, Visit visit) {
  constexpr int W = Element<T>::W, kFew = 2;
  const int64_t whole = block.length / W * W, rest = block.length - whole;
  const bool long_rows = block.stride * int64_t(sizeof(T)) >= kPage;
  const auto visit_whole = [&](auto rows, int64_t at) LEANNORM_BODY {
    for (int64_t c = 0; c < whole; c += W) visit(rows, at + c, c, W, std::true_type());
  };
  for (int64_t i = 0, taken; i < block.count; i += taken) {
    const int64_t left = block.count - i, at = i * block.stride;
    taken = long_rows && left >= Many ? Many : left >= kFew ? kFew : 1;
    if constexpr (form == kAny) visit_whole(int(taken), at);
    else if (taken == Many) visit_whole(Constant<Many>(), at);
    else if (taken == kFew) visit_whole(Constant<kFew>(), at);
    else visit_whole(Constant<1>(), at);
    if (rest != 0) visit(int(taken), at + whole, whole, rest, std::false_type());
  }
}

// How far ahead to fetch what is read besides coefficients, which keep the machine from seeing that it lies in
// one piece; the shortest rows it sees through.
template <class T> LEANNORM_INLINE int64_t fetch_ahead(Block block) {
  const int64_t bytes = block.stride * int64_t(sizeof(T));
  return bytes > 256 && bytes < kPage ? kBehind / int64_t(sizeof(T)) : 0;
}

template <class V, bool Whole> LEANNORM_INLINE V some_lanes(const void* p, int64_t at, int64_t n) {
  using S = typename Scalar<V>::type;
  const S* from = static_cast<const S*>(p) + at;
  if constexpr (Whole) return Element<S>::load(from);
  else return Element<S>::load(from, n, V{});
}
template <class V, bool Whole> LEANNORM_INLINE Affine<V> column_affine(const Coefficients& c, int64_t at, int64_t n) {
  return {some_lanes<V, Whole>(c.mean, at, n), some_lanes<V, Whole>(c.mean_rest, at, n),
          some_lanes<V, Whole>(c.scale, at, n), some_lanes<V, Whole>(c.bias, at, n)};
}
template <class V, bool Whole>
LEANNORM_INLINE Backward<V> column_backward(const Coefficients& c, int64_t at, int64_t n) {
  return {{some_lanes<V, Whole>(c.mean, at, n), some_lanes<V, Whole>(c.mean_rest, at, n),
           some_lanes<V, Whole>(c.scale, at, n), some_lanes<V, Whole>(c.bias, at, n)},
          some_lanes<V, Whole>(c.rstd, at, n), some_lanes<V, Whole>(c.slope, at, n),
          some_lanes<V, Whole>(c.shift, at, n), c.constant};
}

template <class V> LEANNORM_INLINE void add_columns(double* first, double* second, int64_t columns, Sums<V> sum) {
  store_wide(first, load_wide<V>(first, columns) + sum.first, columns);
  store_wide(second, load_wide<V>(second, columns) + sum.second, columns);
}

// Adds two sums of every column, in the compute type for kTileRows rows and in float64 from there on;
// begin(column, columns) comes before the columns of a tile, add(run, rows, element, column, lanes, whole) adds
// a vector of `rows` rows. A tile's sums and coefficients stay in the nearest cache.
constexpr int64_t kTile = 1024, kTileRows = 32;
template <class T, Form form, class Begin, class Add>
LEANNORM_INLINE void column_sums(Block block, double* first, double* second, Begin begin, Add add) {
  using V = typename Element<T>::V;
  using S = typename Scalar<V>::type;
  constexpr int W = Element<T>::W;
  alignas(kBytes) S part_first[kTile], part_second[kTile];
  for (int64_t r = 0; r < block.count; r += kTileRows) {
    for (int64_t c = 0; c < block.length; c += kTile) {
      const Block tile{block.count - r < kTileRows ? block.count - r : kTileRows, block.stride,
                       block.length - c < kTile ? block.length - c : kTile, 0};
      begin(c, tile.length);
      for (int64_t j = 0; j < tile.length; j += W) {
        Element<S>::store(part_first + j, V{});
        Element<S>::store(part_second + j, V{});
      }
      each_column_vector<T, form, kRun>(tile, [&](auto rows, int64_t at, int64_t j, int64_t n, auto whole) LEANNORM_BODY {
        Run<V> run{read<V>(part_first + j), read<V>(part_second + j)};
        add(run, rows, r * block.stride + c + at, c + j, n, whole);
        Element<S>::store(part_first + j, run.first);
        Element<S>::store(part_second + j, run.second);
      });
      for (int64_t j = 0; j < tile.length; j += W) {
        Sums<V> sum;
        sum.add({read<V>(part_first + j), read<V>(part_second + j)});
        add_columns(first + c + j, second + c + j, tile.length - j, sum);
      }
    }
  }
}

template <class T>
void column_moments(const void* base, Block block, const double* shift, double* sums, double* squares) {
  using E = Element<T>;
  using V = typename E::V;
  using S = typename Scalar<V>::type;
  constexpr int W = E::W;
  alignas(kBytes) S centre[kTile];
  const int64_t ahead = fetch_ahead<T>(block);
  const T* x = static_cast<const T*>(base);
  column_sums<T, kPlain>(
      block, sums, squares,
      [&](int64_t c, int64_t columns) LEANNORM_BODY {
        for (int64_t j = 0; j < columns; j += W)
          Element<S>::store(centre + j, narrow(load_wide<V>(shift + c + j, columns - j)));
      },
      [&](Run<V>& run, auto rows, int64_t at, int64_t c, int64_t n, auto whole) LEANNORM_BODY {
        const V k = read<V>(centre + c % kTile);
        each_of(rows, [&](int) LEANNORM_BODY {
          __builtin_prefetch(x + at + ahead, 0, 2);
          if constexpr (whole) run.add_moments(E::load(x + at), k);
          else run.add_moments(E::load(x + at, n, k), k);
          at += block.stride;
        });
      });
}

// The same in float64 throughout: see plane_wide_moments.
template <class T>
void column_wide_moments(const void* base, Block block, const double* shift, double* sums, double* squares) {
  using E = Element<T>;
  using V = typename E::V;
  const T* x = static_cast<const T*>(base);
  each_column_vector<T, kPlain, kRun>(block, [&](auto rows, int64_t at, int64_t c, int64_t n, auto whole) LEANNORM_BODY {
    const Wide<V> k = load_wide<V>(shift + c, n);
    Sums<V> sum;
    for (int i = 0; i < rows; ++i, at += block.stride) {
      if constexpr (whole) sum.add_moments(E::load(x + at), k);
      else sum.add_moments(E::load(x + at, n, V{}), k);
    }
    add_columns(sums + c, squares + c, n, sum);
  });
}

// May the results of a block be written past the caches?
template <class T> LEANNORM_INLINE bool writes_past(const Operands& o, Block block) {
  return writes_past<T>(o, 0) && block.stride * sizeof(T) % 64 == 0;
}

template <class T, Form form>
void column_normalize(Operands o, Block block, Coefficients c, int act) {
  using V = typename Element<T>::V;
  const int64_t ahead = block.ahead != 0 ? block.ahead : fetch_ahead<T>(block);
  const auto normalize = [&](auto past) LEANNORM_BODY {
    each_column_vector<T, form, 4>(block, [&](auto rows, int64_t x, int64_t at, int64_t n, auto whole) LEANNORM_BODY {
      const Affine<V> affine = column_affine<V, whole>(c, at, n);
      each_of(rows, [&](int) LEANNORM_BODY {
        normalize_batch<InOrder<T>, form, whole>({o, x}, n, ahead, affine, act, past);
        x += block.stride;
      });
    });
  };
  // There is so little to do for each vector that even to ask how it is written would be felt.
  const bool past = writes_past<T>(o, block);
  if constexpr (form == kAny) normalize(past);
  else if (past) normalize(std::true_type());
  else normalize(std::false_type());
  if (past) settle();
}

template <class T, Form form>
void column_grad_sums(Operands o, Block block, Coefficients c, int act, double* sum_dz,
                      double* sum_dz_centred) {
  using V = typename Element<T>::V;
  const int64_t ahead = fetch_ahead<T>(block);
  column_sums<T, form>(
      block, sum_dz, sum_dz_centred, [](int64_t, int64_t) LEANNORM_BODY {},
      [&](Run<V>& run, auto rows, int64_t x, int64_t at, int64_t n, auto whole) LEANNORM_BODY {
        const Affine<V> affine = column_affine<V, whole>(c, at, n);
        each_of(rows, [&](int) LEANNORM_BODY {
          const Place<InOrder<T>> place{o, x};
          place.fetch(o.x, ahead);
          place.fetch(o.dy, ahead);
          run.add(gradient<InOrder<T>, form, whole>(place, n, affine, act).of[0]);
          x += block.stride;
        });
      });
}

template <class T, Form form>
void column_input_grad(Operands o, Block block, Coefficients c, int act) {
  using V = typename Element<T>::V;
  const int64_t ahead = block.ahead != 0 ? block.ahead : fetch_ahead<T>(block);
  const bool past = writes_past<T>(o, block);
  each_column_vector<T, form, 4>(block, [&](auto rows, int64_t x, int64_t at, int64_t n, auto whole) LEANNORM_BODY {
    const Backward<V> backward = column_backward<V, whole>(c, at, n);
    each_of(rows, [&](int) LEANNORM_BODY {
      input_grad_batch<InOrder<T>, form, whole>({o, x}, n, ahead, backward, act, past);
      x += block.stride;
    });
  });
  if (past) settle();
}

}  // namespace leannorm::LEANNORM_ISA
