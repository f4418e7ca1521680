// row_forward and row_backward: memory layouts, the division of the work, the results.
#include "rows.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "caches.h"
#include "row_groups.h"
#include "row_runs.h"
#include "row_valid.h"
#include "tensors.h"

namespace leannorm {
namespace {

// Bytes of one tensor in a panel: the second cache holds those of two tensors, and of the next two. Wide panels are used
// only if kWholeBytes are enough for all interleaved rows; otherwise narrow ones are read at the same speed.
constexpr int64_t kWholeBytes = 320 << 10, kPanelBytes = 96 << 10;

int64_t product(torch::headeronly::IntHeaderOnlyArrayRef sizes, int64_t begin, int64_t end) {
  int64_t p = 1;
  for (int64_t d = begin; d < end; ++d) p *= sizes[d];
  return p;
}

// Whether x is dense, with the axes start..stop-1 next to each other and in order, and the others in order too. Then
// it is (outer, kept, inner) in memory, and so are its statistics.
std::optional<RowShape> dense_shape(const Tensor& x, int64_t start, int64_t stop) {
  if (stop == x.dim() && x.is_contiguous()) {
    const int64_t kept = product(x.sizes(), start, stop);
    return RowShape{x.numel() / kept, kept, 1, 1, 1};
  }
  const auto size = x.sizes(), stride = x.strides();
  std::vector<int64_t> axes;
  for (int64_t d = 0; d < x.dim(); ++d)
    if (size[d] != 1) axes.push_back(d);
  std::stable_sort(axes.begin(), axes.end(), [&](int64_t a, int64_t b) { return stride[a] > stride[b]; });
  const auto kept = [&](int64_t d) { return start <= d && d < stop; };
  RowShape shape{1, 1, 1, 1, 1};
  int64_t expected = x.numel(), last_kept = -1, last_other = -1;
  bool past = false;  // after the normalized axes
  for (const int64_t d : axes) {
    expected /= size[d];
    int64_t& last = kept(d) ? last_kept : last_other;
    if (stride[d] != expected || d < last || (kept(d) && past)) return std::nullopt;
    last = d;
    past = past || (!kept(d) && last_kept >= 0);
    (kept(d) ? shape.kept : past ? shape.inner : shape.outer) *= size[d];
  }
  return shape;
}

int64_t units_of(const RowShape& s) { return s.outer * s.panels; }

// x as it is if its layout is `dense_shape`'s or its rows are contiguous, otherwise a contiguous copy.
struct Rows {
  Tensor x;
  RowShape shape;
  int64_t start, stop;
  bool copied, apart;  // apart: lines that do not follow each other

  Rows(const Tensor& given, int64_t start, int64_t stop, bool may_be_apart)
      : x(given), start(start), stop(stop), copied(false), apart(false) {
    auto found = dense_shape(given, start, stop);
    if (!found) {
      const auto size = given.sizes();
      const int64_t outer = product(size, 0, start), kept = product(size, start, stop);
      const int64_t inner = product(size, stop, given.dim());
      apart = may_be_apart && is_line(given, start, stop) && is_line(result_ = new_like(given), start, stop);
      copied = !apart;
      found = apart ? RowShape{outer * inner, kept, 1, 1, 1} : RowShape{outer, kept, inner, 1, 1};
      if (copied) x = torch::stable::contiguous(given);
    }
    shape = *found;
    if (shape.inner == 1) return;
    const int64_t vector = 16, column = shape.kept * static_cast<int64_t>(x.element_size());
    const int64_t bytes = shape.inner * column <= kWholeBytes ? kWholeBytes : kPanelBytes;
    const int64_t most = std::clamp<int64_t>(bytes / std::max<int64_t>(column, 1), vector, 1024) / vector * vector;
    const int64_t panels = (shape.inner + most - 1) / most;
    shape.panel = ((shape.inner + panels - 1) / panels + vector - 1) / vector * vector;
    shape.panels = (shape.inner + shape.panel - 1) / shape.panel;
  }

  // Whether this many tensors of this size are more than the caches keep, and every line of the output is aligned.
  // Panels gain from it at a smaller size: they write in pieces.
  bool stream(const Tensor& out, int64_t tensors) const {
    const int64_t size = static_cast<int64_t>(x.element_size()), line = shape.inner == 1 ? shape.kept : shape.inner;
    const int64_t limit = shape.inner == 1 ? streamed_traffic() : streamed_traffic() * 2 / 3;
    return tensors * x.numel() * size >= limit && line * size % 64 == 0 &&
           reinterpret_cast<uintptr_t>(out.const_data_ptr()) % 64 == 0;
  }

  // A result in x's layout. The first exists already if it was needed to know its layout.
  Tensor like() {
    if (!apart) return new_like(x);
    const Tensor made = result_;
    result_ = new_like(x);
    return made;
  }

  // `other`, of x's shape, in x's dtype and layout; if rows are apart its own must be contiguous.
  Tensor match(const Tensor& other) const {
    if (apart && other.scalar_type() == x.scalar_type() && is_line(other, start, stop)) return other;
    const auto a = x.strides(), b = other.strides();
    const auto size = x.sizes();
    bool same = other.scalar_type() == x.scalar_type();
    for (size_t d = 0; d < size.size(); ++d) same = same && (a[d] == b[d] || size[d] == 1);
    if (same) return other;
    Tensor matched = new_like(x);
    torch::stable::copy_(matched, other);
    return matched;
  }

  Optional match(const Optional& other) const {
    if (!other) return std::nullopt;
    return match(*other);
  }

  // A result with the layout of `x`, in the layout of a tensor like `given`.
  Tensor unmatch(Tensor result, const Tensor& given) const {
    if (!copied) return result;
    Tensor out = new_like(given);
    torch::stable::copy_(out, result);
    return out;
  }

 private:
  Tensor result_;
};

// Checks a number of values: a parameter has one for each of a row's, a tensor for each of x's, statistics for each row.
void check(const Optional& v, int64_t size, const char* what) {
  STD_TORCH_CHECK(!v || v->numel() == size, "leannorm: ", what, " must have ", size, " values, got ", v->numel());
}
void check_axes(const Tensor& x, int64_t start, int64_t stop) {
  STD_TORCH_CHECK(0 <= start && start < stop && stop <= x.dim(), "leannorm: a row's axes must be axes of the input, got ", start, " to ", stop);
}

// A byte for every row, in the order of the statistics; null if all rows are valid.
const char* valid_rows(const Optional& valid, int64_t rows) {
  if (!valid) return nullptr;
  const bool fits = valid->scalar_type() == ScalarType::Bool && valid->is_contiguous() && valid->numel() == rows;
  STD_TORCH_CHECK(fits, "leannorm: valid must be bool and contiguous, with one entry for each row");
  return data(*valid);
}

std::vector<int64_t> statistics_size(const Tensor& x, int64_t start, int64_t stop) {
  const auto size = x.sizes();
  std::vector<int64_t> kept(size.begin(), size.end());
  std::fill(kept.begin() + start, kept.begin() + stop, 1);
  return kept;
}

// The same call on the rows of one run.
RowForward moved(RowForward args, const Runs<2>::Offsets& at, const Runs<2>& runs, const Tensor& x) {
  const auto& step = runs.step();
  const int64_t size = x.element_size(), wide = std::max<int64_t>(size, 4);
  args.x = static_cast<const char*>(args.x) + at[0] * size;
  args.y = static_cast<char*>(args.y) + at[1] * size;
  args.mean = static_cast<char*>(args.mean) + at[2] * wide;
  args.rstd = static_cast<char*>(args.rstd) + at[2] * wide;
  args.x_row = step[0], args.y_row = step[1], args.statistics_row = step[2];
  args.x_ahead = runs.ahead(0);
  return args;
}
RowBackward moved(RowBackward args, const Runs<4>::Offsets& at, const Runs<4>& runs, const Tensor& x) {
  const auto& step = runs.step();
  const int64_t size = x.element_size(), wide = std::max<int64_t>(size, 4);
  args.x = static_cast<const char*>(args.x) + at[0] * size;
  args.dx = static_cast<char*>(args.dx) + at[1] * size;
  args.dy = static_cast<const char*>(args.dy) + at[2] * size;
  if (args.dtotal != nullptr) args.dtotal = static_cast<const char*>(args.dtotal) + at[3] * size;
  args.mean = static_cast<const char*>(args.mean) + at[4] * wide;
  args.rstd = static_cast<const char*>(args.rstd) + at[4] * wide;
  args.x_row = step[0], args.dx_row = step[1], args.dy_row = step[2], args.dtotal_row = step[3];
  args.statistics_row = step[4];
  args.x_ahead = runs.ahead(0), args.dy_ahead = runs.ahead(2);
  return args;
}

// Checks that rows follow each other, which a gate and parameters with lines need.
void check_lines(bool lines, const Tensor& x, int64_t stop, const Optional& valid) {
  STD_TORCH_CHECK(!lines || (x.is_contiguous() && stop == x.dim() && !valid),
                  "leannorm: a gate, and parameters that have lines, need contiguous rows and no mask");
}

std::tuple<Tensor, Tensor, Tensor, Tensor> row_forward(const Tensor& given, const Optional& residual,
                                                       const Optional& weight, const Optional& bias,
                                                       int64_t start, int64_t stop, double eps, bool rms,
                                                       double weight_offset, bool cast_before,
                                                       const Optional& valid, const Optional& gate) {
  const ScalarType type = compute_type(given);
  check_axes(given, start, stop);
  const int64_t in_a_row = product(given.sizes(), start, stop), count = given.numel() / std::max<int64_t>(in_a_row, 1);
  const Parameter w(weight, given, count, in_a_row, "weight"), b(bias, given, count, in_a_row, "bias"),
      g(gate, given, count, in_a_row, "gate");
  check(residual, given.numel(), "residual");
  check_lines(gate || w.has_lines() || b.has_lines(), given, stop, valid);
  Tensor mean = new_tensor(given, statistics_size(given, start, stop), type);
  Tensor rstd = new_like(mean);
  if (given.numel() == 0) {
    torch::stable::fill_(mean, 0);
    torch::stable::fill_(rstd, 1 / std::sqrt(eps));
    Tensor total = residual ? new_like(given) : no_tensor(given);
    return {new_like(given), total, mean, rstd};
  }
  Rows rows(given, start, stop, !residual);
  const Tensor y = rows.like(), total = residual ? rows.like() : no_tensor(given);
  const Optional added = rows.match(residual);
  const int64_t kept = rows.shape.kept, tensors = (residual ? 4 : 2) + 2 * w.own();
  const RowForward args{rows.shape, data(rows.x), data(added), {}, w.of(0), b.of(0),
                        mutable_data(y), mutable_data(total), mutable_data(mean), mutable_data(rstd), weight_offset, eps,
                        rms, cast_before, rows.stream(y, tensors), kept, kept, 1, 0};
  const RowKernels& kernels = LEANNORM_PICK(row_kernels);
  const auto forward = kernels.forward[rows.shape.inner > 1][element_type(given)];
  const int64_t units = units_of(rows.shape), size = given.element_size();
  const char* const there = valid_rows(valid, rows.shape.outer * rows.shape.inner);
  const auto each = [&](auto body) {
    torch::stable::parallel_for(0, units, grain(given.numel() / units), [&](int64_t begin, int64_t end) {
      body(begin, end);
      if (args.stream) kernels.settle();
    });
  };
  if (rows.apart) {
    const Runs<2> runs({&rows.x, &y}, start, stop);
    each([&](int64_t begin, int64_t end) {
      runs.each(begin, end, [&](const auto& at, int64_t n) {
        const char* const of_run = there == nullptr ? nullptr : there + at[2];
        on_valid(moved(args, at, runs, given), of_run, size, 0, n, forward);
      });
    });
  } else {
    each([&](int64_t begin, int64_t end) {
      for (int64_t last; begin < end; begin = last) {
        RowForward some = args;
        some.gate = g.of(begin), some.weight = w.of(begin), some.bias = b.of(begin);
        last = g.stop(begin, w.stop(begin, b.stop(begin, end)));
        on_valid(some, there, size, begin, last, forward);
      }
    });
  }
  return {rows.unmatch(y, given), residual ? rows.unmatch(total, given) : total, mean, rstd};
}

// Units are summed in chunks, whose number depends on the shape only, so that the sums do not depend on the number of
// threads: no more than 256 rows per chunk, at least 16 if rows are short, and of short ones as many as the kernel
// takes together.
int64_t chunk_length(const RowShape& s) {
  const int64_t units = units_of(s), length = (units + 63) / 64;
  if (s.inner > 1) return length;
  if (s.kept < 16384) return std::clamp<int64_t>((length + 7) / 8 * 8, 16, 256);
  return std::clamp<int64_t>(length, std::min<int64_t>(16, (units + 3) / 4), 256);
}

// The gradients of a residual that was added times a gate, and of the gate if the residual is given.
std::tuple<Tensor, Tensor> gate_backward(const Tensor& dtotal, const Optional& gate, const Optional& residual, int64_t kept) {
  if (!gate) return {Tensor(), Tensor()};
  const int64_t rows = dtotal.numel() / kept;
  const Parameter g(gate, dtotal, rows, kept, "gate");
  const ScalarType type = g.own() ? gate->scalar_type() : compute_type(dtotal);
  const Tensor dresidual = new_like(dtotal);
  const auto size = gate->sizes();
  const Tensor dgate = residual ? new_tensor(dtotal, {size.begin(), size.end()}, type) : Tensor();
  const GateBackward args{kept, data(dtotal), data(residual), {}, mutable_data(dresidual), g.own()};
  const auto backward = LEANNORM_PICK(row_kernels).gate_backward[element_type(dtotal)];
  const GroupSums sums{rows, kept, g.groups(), std::clamp<int64_t>((rows + 63) / 64, 16, 256), residual ? 1 : 0,
                       {residual ? mutable_data(dgate) : nullptr}, type, g.own()};
  sums.add_up(dtotal, dtotal.numel(), [&](int64_t begin, int64_t end, const GroupSums::Pointers& to) {
    for (int64_t stop; begin < end; begin = stop) {
      GateBackward some = args;
      some.gate = g.of(begin);
      backward(some, begin, stop = g.stop(begin, end), to[0]);
    }
  });
  return {dresidual, dgate};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> row_backward(
    const Tensor& given_dy, const Optional& given_dtotal, const Tensor& given, const Tensor& given_mean,
    const Tensor& given_rstd, const Optional& weight, int64_t start, int64_t stop, bool rms, bool want_affine,
    bool want_bias, double weight_offset, const Optional& valid, const Optional& gate, const Optional& residual) {
  const ScalarType type = compute_type(given);
  const auto size = given.sizes();
  check_axes(given, start, stop);
  const int64_t in_a_row = product(size, start, stop), rows_of_it = product(size, 0, start) * product(size, stop, given.dim());
  const Parameter w(weight, given, rows_of_it, in_a_row, "weight");
  check(given_dy, given.numel(), "dy"), check(given_dtotal, given.numel(), "dtotal"), check(residual, given.numel(), "residual");
  check(given_mean, rows_of_it, "mean"), check(given_rstd, rows_of_it, "rstd");
  check_lines(gate || w.has_lines(), given, stop, valid);
  want_bias = want_bias && want_affine && !w.own();  // the sum of dy over one row is dy
  const auto sizes = w.has_lines() ? weight->sizes() : size.slice(start, stop - start);
  const std::vector<int64_t> of_parameter(sizes.begin(), sizes.end()), none{0};
  const auto parameter = [&](bool wanted) {
    return new_tensor(given, wanted ? of_parameter : none, w.own() ? weight->scalar_type() : type);
  };
  Tensor dweight = parameter(want_affine), dbias = parameter(want_bias);
  if (given.numel() == 0) {
    torch::stable::zero_(dweight);
    torch::stable::zero_(dbias);
    return {new_like(given), dweight, dbias, Tensor(), Tensor()};
  }
  Rows rows(given, start, stop, true);
  const RowShape& shape = rows.shape;
  const Tensor dx = rows.like(), dy = rows.match(given_dy);
  const Optional dtotal = rows.match(given_dtotal);
  const Tensor mean = plain(given_mean, type), rstd = plain(given_rstd, type);
  const int64_t tensors = (given_dtotal ? 4 : 3) + 2 * w.own();
  const bool stream = rows.stream(dx, tensors) && (!w.own() || rows.stream(dweight, tensors));
  const RowBackward args{shape, data(dy), data(dtotal), data(rows.x), data(mean), data(rstd), w.of(0),
                         mutable_data(dx), weight_offset, rms, w.own(), stream, shape.kept, shape.kept, shape.kept,
                         shape.kept, 1, 0, 0};
  const RowKernels& kernels = LEANNORM_PICK(row_kernels);
  const auto backward = kernels.backward[shape.inner > 1][element_type(given)];
  const char* const there = valid_rows(valid, shape.outer * shape.inner);
  std::optional<Runs<4>> runs;
  if (rows.apart) runs.emplace(std::array<const Tensor*, 4>{&rows.x, &dx, &dy, dtotal ? &*dtotal : nullptr}, start, stop);
  const GroupSums sums{units_of(shape), shape.kept, w.groups(), chunk_length(shape), want_affine + want_bias,
                       {want_affine ? mutable_data(dweight) : nullptr, want_bias ? mutable_data(dbias) : nullptr},
                       type, w.own()};
  sums.add_up(given, given.numel(), [&](int64_t begin, int64_t end, const GroupSums::Pointers& to) {
    const auto some = [&](const RowBackward& a, int64_t from, int64_t last) { backward(a, from, last, to[0], to[1]); };
    if (runs) {
      runs->each(begin, end, [&](const auto& offsets, int64_t n) {
        const char* const of_run = there == nullptr ? nullptr : there + offsets[4];
        on_valid(moved(args, offsets, *runs, given), of_run, given.element_size(), 0, n, some);
      });
    } else {
      for (int64_t last; begin < end; begin = last) {
        RowBackward of_group = args;
        of_group.weight = w.of(begin);
        on_valid(of_group, there, given.element_size(), begin, last = w.stop(begin, end), some);
      }
    }
    if (args.stream) kernels.settle();
  });
  auto [dresidual, dgate] = gate_backward(dx, gate, rows.match(residual), shape.kept);
  return {rows.unmatch(dx, given), dweight, dbias, dresidual, dgate};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(leannorm, CPU, library) {
  library.impl("row_forward", TORCH_BOX(&row_forward));
  library.impl("row_backward", TORCH_BOX(&row_backward));
}

}  // namespace leannorm
