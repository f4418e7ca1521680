// Columns: rows of channels next to each other, each lane with its own statistic. Rows are read in the order of
// memory.
#pragma once

#include <type_traits>

#include "channel_waiting.h"

namespace leannorm::LEANNORM_ISA {

constexpr int64_t kPage = 4096, kBehind = 8192;  // bytes

// visit(rows, element, column, lanes, whole) for every vector of every row, where `rows` rows are read at once. The
// machine prefetches within a page: many rows as long as that are read abreast, and their coefficients are loaded
// once for all; shorter rows are best read few at a time. The compiler knows their number, except at the end of a
// row, in a single last row and in the form for any activation, where one body is enough.
template <class T, Form form, int Many, class Visit>
LEANNORM_INLINE void each_column_vector(Block block, Visit visit) {
  constexpr int W = Element<T>::W, kFew = 2;
  const int64_t whole = block.length / W * W;
  const bool long_rows = block.stride * int64_t(sizeof(T)) >= kPage;
  const auto visit_whole = [&](auto rows, int64_t at) LEANNORM_BODY {
    for (int64_t c = 0; c < whole; c += W) visit(rows, at + c, c, W, std::true_type());
  };
  for (int64_t i = 0, taken; i < block.count; i += taken) {
    const int64_t left = block.count - i, at = i * block.stride;
    taken = long_rows && left >= Many ? Many : left >= kFew ? kFew : 1;
    int64_t c = whole;
    if constexpr (form == kAny) visit_whole(int(taken), at);
    else if (taken == Many) visit_whole(Constant<Many>(), at);
    else if (taken == kFew) visit_whole(Constant<kFew>(), at);
    else c = 0;
    for (; c < block.length; c += W) {
      const int64_t n = block.length - c < W ? block.length - c : W;
      visit(int(taken), at + c, c, n, std::false_type());
    }
  }
}

// How far ahead to prefetch. Reads of coefficients in between keep the machine from recognizing rows as one piece of
// memory, except for the shortest ones.
template <class T> LEANNORM_INLINE int64_t fetch_ahead(Block block) {
  const int64_t bytes = block.stride * int64_t(sizeof(T));
  return bytes > 256 && bytes < kPage ? kBehind / int64_t(sizeof(T)) : 0;
}

// This many columns at a time, whose sums and coefficients stay in the nearest cache: whole short planes, which begin
// at a cache line if the first does.
constexpr int64_t kTile = 1024;
inline int64_t tile_of(Block block) {
  if (block.each == 1) return kTile;
  const int64_t planes = kTile / block.each, step = planes >= 16 ? 16 : planes >= 4 ? 4 : 1;
  return planes / step * step * block.each;
}

// Gives every column its statistic's value, from `rows` rows of such values. A vector's number of neighbouring planes
// covers as many vectors as a plane has elements, and a lane of one of them belongs to the same of these planes in
// every row: which one is looked up in `planes`, if the machine can pick lanes by a vector.
template <class V> struct Spread {
  using S = typename Scalar<V>::type;
  static constexpr int W = lanes<V>;
  static constexpr bool kPicks = picks_lanes<V>;
  const int64_t each;
  alignas(kBytes) int32_t planes[kPicks ? kTile + W : 1];

  explicit LEANNORM_ONCE Spread(int64_t each) : each(each) {
    if constexpr (kPicks) {
      const int64_t size = each * W < kTile ? each * W : kTile;
      int32_t plane = 0;
      for (int64_t at = 0; at < size; at += each, ++plane)
        for (int64_t j = at; j < at + each && j < size; j += W) {
          const I same = I{} + plane;  // the next plane starts in the rest
          std::memcpy(planes + j, &same, sizeof same);
        }
    }
  }
  LEANNORM_ONCE void operator()(S* to, const S* from, int64_t columns) const {
    if constexpr (kPicks) {
      for (; columns > 0; from += W, to += each * W, columns -= each * W) {
        const int64_t n = (columns + each - 1) / each, end = columns < each * W ? columns : each * W;
        const V values = n >= W ? read<V>(from) : Element<S>::load(from, n, V{});
#pragma GCC unroll 4
        for (int64_t j = 0; j < end; j += W) Element<S>::store(to + j, picked(values, read<I>(planes + j)));
      }
    } else {
      for (S* const end = to + columns; to < end; to += each, ++from)
        for (int64_t j = 0; j < each; j += W) Element<S>::store(to + j, *from - V{});  // V{} + would make -0 a 0
    }
  }
};

// visit(block, element, coefficients) for all columns, or for those of each tile of short planes. Of the seven
// coefficients those with a bit in `used` are spread.
constexpr unsigned kCentre = 0b11, kApply = 0b1111, kInput = 0b1110111;
LEANNORM_INLINE constexpr unsigned used_by(Form form) { return form == kPlain || form == kReluFromOutput ? kCentre : kApply; }
template <class V, class Visit>
LEANNORM_INLINE void each_tile(Block block, Coefficients c, unsigned used, Visit visit) {
  using S = typename Scalar<V>::type;
  constexpr int64_t kRow = kTile + lanes<V>;
  alignas(kBytes) S room[7 * kRow];
  const bool shared = block.each != 1;
  const Spread<V> spread(shared ? block.each : kTile);
  const int64_t tile = shared ? tile_of(block) : block.length;
  for (int64_t at = 0, statistic = 0; at < block.length; at += tile, statistic += tile / block.each) {
    Block part = block;
    part.length = block.length - at < tile ? block.length - at : tile;
    Coefficients of = c;
    if (shared) {
      const void** const rows[] = {&of.mean, &of.mean_rest, &of.scale, &of.bias, &of.rstd, &of.slope, &of.shift};
      for (int k = 0; k < 7; ++k) {
        if ((used >> k & 1) == 0) continue;
        spread(room + k * kRow, static_cast<const S*>(*rows[k]) + statistic, part.length);
        *rows[k] = room + k * kRow;
      }
    }
    visit(part, at, of);
  }
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

// Adds a tile's sums to those of its statistics.
template <class V>
LEANNORM_ONCE void add_tile(const typename Scalar<V>::type* part_first, const typename Scalar<V>::type* part_second,
                              Block tile, double* first, double* second) {
  using E = Element<typename Scalar<V>::type>;
  constexpr int W = lanes<V>;
  if (tile.each == 1) {
    for (int64_t j = 0; j < tile.length; j += W) {
      Sums<V> sum;
      sum.add({read<V>(part_first + j), read<V>(part_second + j)});
      add_columns(first + j, second + j, tile.length - j, sum);
    }
    return;
  }
  for (int64_t at = 0; at < tile.length; at += tile.each) {
    Sums<V> sum;
    int64_t j = at;
    const int64_t end = at + tile.each;
    for (; j + W <= end; j += W) sum.add({read<V>(part_first + j), read<V>(part_second + j)});
    if (j < end) sum.add({E::load(part_first + j, end - j, V{}), E::load(part_second + j, end - j, V{})});
    sum.put(first++, second++);
  }
}

// Adds two sums of every column, in the compute type for kTileRows rows and in float64 from there on; begin(column,
// tile) precedes the columns of a tile, add(run, rows, element, column, column of the tile, lanes, whole) adds a
// vector of `rows` rows.
constexpr int64_t kTileRows = 32;
template <class T, Form form, class Begin, class Add>
LEANNORM_INLINE void column_sums(Block block, double* first, double* second, Begin begin, Add add) {
  using V = typename Element<T>::V;
  using S = typename Scalar<V>::type;
  constexpr int W = Element<T>::W;
  alignas(kBytes) S part_first[kTile], part_second[kTile];
  const int64_t columns = tile_of(block);
  for (int64_t r = 0; r < block.count; r += kTileRows) {
    for (int64_t c = 0, s = 0; c < block.length; c += columns, s += columns / block.each) {
      Block tile = block;
      tile.count = block.count - r < kTileRows ? block.count - r : kTileRows;
      tile.length = block.length - c < columns ? block.length - c : columns;
      begin(c, s, tile);
      for (int64_t j = 0; j < tile.length; j += W) {
        Element<S>::store(part_first + j, V{});
        Element<S>::store(part_second + j, V{});
      }
      each_column_vector<T, form, kRun>(tile, [&](auto rows, int64_t at, int64_t j, int64_t n, auto whole) LEANNORM_BODY {
        Run<V> run{read<V>(part_first + j), read<V>(part_second + j)};
        add(run, rows, r * block.stride + c + at, c, j, n, whole);
        Element<S>::store(part_first + j, run.first);
        Element<S>::store(part_second + j, run.second);
      });
      add_tile<V>(part_first, part_second, tile, first + s, second + s);
    }
  }
}

template <class T>
void column_moments(const void* base, Block block, const double* shift, double* sums, double* squares) {
  using E = Element<T>;
  using V = typename E::V;
  using S = typename Scalar<V>::type;
  constexpr int W = E::W;
  alignas(kBytes) S centre[kTile + W], values[kTile + W];
  const Spread<V> spread(block.each != 1 ? block.each : kTile);
  const int64_t ahead = block.next != 0 ? block.next : fetch_ahead<T>(block);
  const T* x = static_cast<const T*>(base);
  column_sums<T, kPlain>(
      block, sums, squares,
      [&](int64_t, int64_t s, Block tile) LEANNORM_BODY {
        if (tile.each != 1) {
          for (int64_t j = 0; j * tile.each < tile.length; ++j) values[j] = static_cast<S>(shift[s + j]);
          return spread(centre, values, tile.length);
        }
        for (int64_t j = 0; j < tile.length; j += W)
          Element<S>::store(centre + j, narrow(load_wide<V>(shift + s + j, tile.length - j)));
      },
      [&](Run<V>& run, auto rows, int64_t at, int64_t, int64_t j, int64_t n, auto whole) LEANNORM_BODY {
        const V k = read<V>(centre + j);
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
  const bool shared = block.each != 1;
  const int64_t columns = shared ? tile_of(block) : block.length;
  double room[3][kTile + lanes<D>];
  for (int64_t at = 0; at < block.length; at += columns) {
    Block tile = block;
    tile.length = block.length - at < columns ? block.length - at : columns;
    const T* x = static_cast<const T*>(base) + at;
    const double* k = shift;
    double *first = sums, *second = squares;
    if (shared) {
      for (int64_t j = 0; j < tile.length; ++j) room[0][j] = shift[j / tile.each], room[1][j] = room[2][j] = 0;
      k = room[0], first = room[1], second = room[2];
    }
    each_column_vector<T, kPlain, kRun>(tile, [&](auto rows, int64_t i, int64_t c, int64_t n, auto whole) LEANNORM_BODY {
      const Wide<V> wide_k = load_wide<V>(k + c, n);
      Sums<V> sum;
      for (int row = 0; row < rows; ++row, i += block.stride) {
        if constexpr (whole) sum.add_moments(E::load(x + i), wide_k);
        else sum.add_moments(E::load(x + i, n, V{}), wide_k);
      }
      add_columns(first + c, second + c, n, sum);
    });
    for (int64_t j = 0; shared && j < tile.length; j += tile.each) {
      D a{}, b{};
      for (int64_t i = 0; i < tile.each; i += lanes<D>) {
        a = a + load_doubles(room[1] + j + i, tile.each - i);
        b = b + load_doubles(room[2] + j + i, tile.each - i);
      }
      *sums++ += total(a);
      *squares++ += total(b);
      ++shift;
    }
  }
}

// This many rows are computed before the first of them is written: rows are some pages apart, and a machine that
// compares only the lower bits of addresses takes the next row for what it has just written.
constexpr int kAbreast = 4;

// Whether the results of a block may be written past the caches.
template <class T> LEANNORM_INLINE bool writes_past(const Operands& o, int64_t at, Block block) {
  return writes_past<T>(o, at) && block.stride * sizeof(T) % 64 == 0;
}

template <class T, Form form>
void column_normalize(Operands o, Block block, Coefficients coefficients, int act) {
  using V = typename Element<T>::V;
  using E = InOrder<T>;
  const int64_t ahead = block.ahead != 0 ? block.ahead : fetch_ahead<T>(block);
  std::conditional_t<kWaits<T, form>, Waiting<E>, None> waiting;
  int count = 0;  // of those that wait
  each_tile<V>(block, coefficients, kApply, [&](Block tile, int64_t first, Coefficients c) LEANNORM_BODY {
    const auto normalize = [&](auto past) LEANNORM_BODY {
      each_column_vector<T, form, kAbreast>(tile, [&](auto rows, int64_t x, int64_t at, int64_t n, auto whole) LEANNORM_BODY {
        const Affine<V> affine = column_affine<V, whole>(c, at, n);
        const auto place = [&](int i) LEANNORM_BODY { return Place<E>{o, first + x + i * block.stride}; };
        if constexpr (kWaits<T, form>) {
          if (count + rows > waiting.kMost) {
            put_activated(waiting, count, o, act);
            count = 0;
          }
          each_of(rows, [&](int i) LEANNORM_BODY {
            const auto z = normalized<E, kPlain, whole>(place(i), n, ahead, affine, act);
            waiting.put(count++, z, place(i).at, n, past && n == E::W);
          });
        } else {
          typename E::Batch of[kAbreast];
          each_of(rows, [&](int i) LEANNORM_BODY {
            of[i] = normalized<E, form, whole>(place(i), n, ahead, affine, act);
          });
          each_of(rows, [&](int i) LEANNORM_BODY { place(i).template store<whole>(o.result, of[i], n, past); });
        }
      });
    };
    // There is so little work per vector that even a test of how it is written would show.
    const bool past = writes_past<T>(o, first, block);
    if constexpr (form == kAny) normalize(past);
    else if (past) normalize(std::true_type());
    else normalize(std::false_type());
  });
  if constexpr (kWaits<T, form>) put_activated(waiting, count, o, act);
  if (o.past) settle();
}

template <class T, Form form> constexpr bool kKeeps = form == kAny && std::is_same_v<T, float>;

template <class T, Form form>
void column_grad_sums(Operands o, Block block, Coefficients coefficients, int act, double* sum_dz,
                      double* sum_dz_centred) {
  using V = typename Element<T>::V;
  const int64_t ahead = block.next != 0 ? block.next : fetch_ahead<T>(block);
  each_tile<V>(block, coefficients, used_by(form), [&](Block tile, int64_t first, Coefficients c) LEANNORM_BODY {
    column_sums<T, form>(
        tile, sum_dz + first / block.each, sum_dz_centred + first / block.each, [](int64_t, int64_t, Block) LEANNORM_BODY {},
        [&](Run<V>& run, auto rows, int64_t x, int64_t column, int64_t j, int64_t n, auto whole) LEANNORM_BODY {
          const Affine<V> affine = column_affine<V, whole>(c, column + j, n);
          x += first;
          each_of(rows, [&](int) LEANNORM_BODY {
            const Place<InOrder<T>> place{o, x};
            place.fetch(o.x, ahead);
            place.fetch(o.dy, ahead);
            if (o.out != nullptr) place.fetch(o.out, ahead);
            const Gradient<V> g = gradient<InOrder<T>, form, whole>(place, n, affine, act).of[0];
            if constexpr (kKeeps<T, form>) {
              if (o.kept != nullptr) place.template store<whole>(o.kept, {g.dz}, n, false);
            }
            run.add(g);
            x += block.stride;
          });
        });
  });
}

template <class T, Form form>
void column_input_grad(Operands o, Block block, Coefficients coefficients, int act) {
  using V = typename Element<T>::V;
  const int64_t ahead = block.ahead != 0 ? block.ahead : fetch_ahead<T>(block);
  each_tile<V>(block, coefficients, kInput | used_by(form), [&](Block tile, int64_t first, Coefficients c) LEANNORM_BODY {
    const bool past = writes_past<T>(o, first, block);
    each_column_vector<T, form, kAbreast>(tile, [&](auto rows, int64_t x, int64_t at, int64_t n, auto whole) LEANNORM_BODY {
      const Backward<V> backward = column_backward<V, whole>(c, at, n);
      const auto place = [&](int i) LEANNORM_BODY { return Place<InOrder<T>>{o, first + x + i * block.stride}; };
      Gradients<typename InOrder<T>::Batch> of[kAbreast];
      each_of(rows, [&](int i) LEANNORM_BODY {
        if constexpr (kKeeps<T, form>) {
          if (o.kept != nullptr) {
            place(i).fetch(o.x, ahead);
            place(i).fetch(o.kept, ahead);
            const V dz = place(i).template load<whole>(o.kept, n, V{}).of[0];
            const V x = place(i).template load<whole>(o.x, n, backward.mean).of[0];
            of[i] = {{backward.input_grad(dz, backward.centre(x))}, {dz}};
            return;
          }
        }
        fetch_for_input<form>(place(i), ahead, false);
        of[i] = input_grads<InOrder<T>, form, whole>(place(i), n, backward, act);
      });
      each_of(rows, [&](int i) LEANNORM_BODY { of[i].template store<whole>(place(i), n, past); });
    });
  });
  if (o.past) settle();
}

}  // namespace leannorm::LEANNORM_ISA
