// Norms with inputs besides the parameters: the division of the work, the results.
//
// The caller passes tensors as rows: (rows, kept), contiguous except for the gated norm's, and lines of the compute
// type, (groups, kept), each for rows / groups consecutive rows.
#include "modulated.h"

#include <algorithm>
#include <array>
#include <memory>
#include <tuple>

#include "activation_name.h"
#include "caches.h"
#include "rows.h"
#include "tensors.h"

namespace leannorm {
namespace {

constexpr int64_t kGrain = 32768;  // elements that are worth a thread
int64_t grain(int64_t each) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(each, 1)); }

// Lines of the compute type, or of every row and of x's type; each for the same number of consecutive rows.
struct Groups {
  Lines lines{};
  int64_t each = 1, bytes = 0;  // from a group's line to the next

  Groups(const Optional& v, const Tensor& x) {
    if (!v) return;
    const int64_t rows = x.sizes()[0], groups = v->sizes()[0], step = v->strides()[0];
    const bool narrow = v->scalar_type() != compute_type(x);
    STD_TORCH_CHECK(v->dim() == 2 && v->sizes()[1] == x.sizes()[1] && (v->sizes()[1] == 1 || v->strides()[1] == 1) && groups > 0 && rows % groups == 0,
                    "leannorm: lines must be (groups, kept), groups of equal size, each line contiguous");
    STD_TORCH_CHECK(!narrow || (v->scalar_type() == x.scalar_type() && groups == rows), "leannorm: lines of another type");
    each = rows / groups, bytes = step * v->element_size();
    lines = {data(*v), each > 1 ? 0 : step, narrow};
  }
  // The lines of the rows from `row` to `stop`.
  Lines of(int64_t row) const {
    if (each == 1) return lines;
    return {static_cast<const char*>(lines.p) + row / each * bytes, 0, lines.narrow};
  }
  int64_t stop(int64_t row, int64_t end) const { return each == 1 ? end : std::min(end, (row / each + 1) * each); }
};

// Whether this many tensors of this size are more than the caches keep, and every line of the outputs is aligned.
bool stream(const Tensor& x, int64_t tensors, std::initializer_list<const Tensor*> outputs) {
  const int64_t size = x.element_size(), kept = x.sizes()[1];
  bool aligned = kept * size % 64 == 0;
  for (const Tensor* out : outputs) aligned = aligned && reinterpret_cast<uintptr_t>(out->const_data_ptr()) % 64 == 0;
  return aligned && tensors * x.numel() * size >= streamed_traffic();
}

using Pointers = std::array<char*, 2>;

// Sums over the rows of each group, of `vectors` lines: pieces of a group, whose number depends on the shape only,
// are summed separately, then added in order. body(begin, end, lines) adds the rows' share to zeros; if every row has
// a line of its own (`alone`), so that its sum has one term, it writes those of all rows.
template <class Body>
void sum_groups(const Tensor& x, int64_t groups, int64_t vectors, const Pointers& to, ScalarType type, Body body,
                bool alone = false) {
  const int64_t rows = x.sizes()[0], kept = x.sizes()[1];
  if (alone && vectors > 0) {
    torch::stable::parallel_for(0, rows, grain(kept), [&](int64_t begin, int64_t end) { body(begin, end, to); });
    return;
  }
  if (vectors == 0) groups = 1;
  const int64_t each = rows / groups;
  const int64_t length = std::clamp<int64_t>((rows + 63) / 64, 16, 256), pieces = (each + length - 1) / length;
  const int64_t bytes = kept * (type == ScalarType::Double ? 8 : type == ScalarType::Float ? 4 : 2), shared = pieces > 1 ? groups * pieces : 0;
  const Tensor shares = new_tensor(x, {shared, vectors, kept}, type);
  char* const share = mutable_data(shares);
  torch::stable::parallel_for(0, groups * pieces, grain(std::min(each, length) * kept), [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      const int64_t group = at / pieces, first = group * each + at % pieces * length;
      Pointers line{};
      for (int64_t v = 0; v < vectors; ++v) {
        line[v] = shared > 0 ? share + (at * vectors + v) * bytes : to[v] + group * bytes;
        std::fill_n(line[v], bytes, 0);
      }
      body(first, std::min(first + length, (group + 1) * each), line);
    }
  });
  if (shared == 0 || vectors == 0) return;
  const auto sum = LEANNORM_PICK(row_kernels).sum[type == ScalarType::Double];
  torch::stable::parallel_for(0, groups * vectors, grain(pieces * kept), [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      const int64_t group = at / vectors, v = at % vectors;
      sum(share + (group * pieces * vectors + v) * bytes, pieces, vectors * kept, 0, kept, to[v] + group * bytes);
    }
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> row_ada_forward(const Tensor& x, const Optional& branch, const Optional& gate,
                                                           const Tensor& factor, const Tensor& addend, double one,
                                                           double eps, bool rms) {
  const int64_t rows = x.sizes()[0], kept = x.sizes()[1];
  const Tensor mean = new_tensor(x, {rows}, compute_type(x)), rstd = new_like(mean);
  const Tensor y = new_like(x), total = branch ? new_like(x) : no_tensor(x);
  const Groups gates(gate, x), factors(factor, x), addends(addend, x);
  const RowForward args{{rows, kept, 1, 1, 1}, data(x), data(branch), {}, {}, {},
                        mutable_data(y), mutable_data(total), mutable_data(mean), mutable_data(rstd), one, eps, rms, false,
                        stream(x, (branch ? 4 : 2) + 2 * (factor.sizes()[0] == rows), {&y}), kept, kept, 1, 0};
  const RowKernels& kernels = LEANNORM_PICK(row_kernels);
  const auto forward = kernels.forward[0][element_type(x)];
  torch::stable::parallel_for(0, rows, grain(kept), [&](int64_t begin, int64_t end) {
    for (int64_t stop; begin < end; begin = stop) {
      RowForward some = args;
      some.gate = gates.of(begin), some.weight = factors.of(begin), some.bias = addends.of(begin);
      stop = gates.stop(begin, factors.stop(begin, addends.stop(begin, end)));
      forward(some, begin, stop);
    }
    if (args.stream) kernels.settle();
  });
  return {y, total, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> row_ada_backward(const Tensor& dy, const Optional& dtotal, const Tensor& x,
                                                    const Tensor& mean, const Tensor& rstd, const Tensor& factor,
                                                    double one, bool rms, bool want_sums) {
  const int64_t kept = x.sizes()[1], groups = factor.sizes()[0];
  const ScalarType type = factor.scalar_type();
  const bool alone = groups == x.sizes()[0];  // then the sums of dy are dy
  const Tensor dx = new_like(x), with_xhat = new_tensor(x, {want_sums ? groups : 0, kept}, type);
  const Tensor plain = new_tensor(x, {want_sums && !alone ? groups : 0, kept}, type);
  const Groups factors(factor, x);
  const RowBackward args{{x.sizes()[0], kept, 1, 1, 1}, data(dy), data(dtotal), data(x), data(mean), data(rstd), {},
                         mutable_data(dx), one, rms, alone, stream(x, (dtotal ? 4 : 3) + 2 * alone, {&dx, &with_xhat}),
                         kept, kept, kept, kept, 1, 0, 0};
  const RowKernels& kernels = LEANNORM_PICK(row_kernels);
  const auto backward = kernels.backward[0][element_type(x)];
  char* const of_dy = alone ? nullptr : mutable_data(plain);
  sum_groups(x, groups, want_sums ? 2 : 0, {mutable_data(with_xhat), of_dy}, type,
             [&](int64_t begin, int64_t end, const Pointers& to) {
               for (int64_t stop; begin < end; begin = stop) {
                 RowBackward some = args;
                 some.weight = factors.of(begin);
                 backward(some, begin, stop = factors.stop(begin, end), to[0], to[1]);
               }
               if (args.stream) kernels.settle();
             }, alone);
  return {dx, with_xhat, plain};
}

std::tuple<Tensor, Tensor> row_gate_backward(const Tensor& dtotal, const Optional& branch, const Tensor& gate) {
  const int64_t kept = dtotal.sizes()[1], groups = gate.sizes()[0];
  const ScalarType type = gate.scalar_type();
  const Tensor dbranch = new_like(dtotal), dgate = new_tensor(dtotal, {branch ? groups : 0, kept}, type);
  const Groups gates(gate, dtotal);
  const bool alone = gates.each == 1;
  const GateBackward args{kept, data(dtotal), data(branch), {}, mutable_data(dbranch), alone};
  const auto backward = LEANNORM_PICK(modulated_kernels).gate_backward[element_type(dtotal)];
  sum_groups(dtotal, groups, branch ? 1 : 0, {mutable_data(dgate)}, type,
             [&](int64_t begin, int64_t end, const Pointers& to) {
               for (int64_t stop; begin < end; begin = stop) {
                 GateBackward some = args;
                 some.gate = gates.of(begin);
                 backward(some, begin, stop = gates.stop(begin, end), to[0]);
               }
             }, alone);
  return {dbranch, dgate};
}

// x as contiguous rows of the input's dtype. The step of a single row may be anything.
int64_t step(const Tensor& v) { return v.sizes()[0] > 1 ? v.strides()[0] : v.sizes()[1]; }

// Rows of one size, and a weight for each element of a row.
void check_gated(const Tensor& x, std::initializer_list<const Tensor*> others, const Tensor& weight) {
  bool fit = x.dim() == 2 && weight.numel() == x.sizes()[1];
  for (const Tensor* v : others) fit = fit && v->dim() == 2 && v->sizes()[0] == x.sizes()[0] && v->sizes()[1] == x.sizes()[1];
  STD_TORCH_CHECK(fit, "leannorm: gate and dy must be rows of x's size, and weight a row");
}

std::tuple<Tensor, Tensor> row_gated_forward(const Tensor& x, const Tensor& gate, const Tensor& weight, double eps,
                                             StringHandle act, bool norm_before_gate, bool cast_before) {
  check_gated(x, {&gate}, weight);
  const int64_t rows = x.sizes()[0], kept = x.sizes()[1];
  const ScalarType type = compute_type(x);
  const Tensor y = new_tensor(x, {rows, kept}, x.scalar_type()), rstd = new_tensor(x, {rows}, type);
  const GatedForward args{kept, step(x), step(gate), data(x), data(gate), data(weight), mutable_data(y), mutable_data(rstd),
                          eps, activation_index(act), !norm_before_gate, cast_before, stream(x, 3, {&y})};
  const auto forward = LEANNORM_PICK(modulated_kernels).gated_forward[element_type(x)];
  torch::stable::parallel_for(0, rows, grain(kept), [&](int64_t begin, int64_t end) {
    const std::unique_ptr<double[]> scratch(new double[2 * kept]);
    forward(args, begin, end, scratch.get());
  });
  return {y, rstd};
}

std::tuple<Tensor, Tensor, Tensor> row_gated_backward(const Tensor& dy, const Tensor& x, const Tensor& gate,
                                                      const Tensor& rstd, const Tensor& weight, StringHandle act,
                                                      bool norm_before_gate, bool want_affine) {
  check_gated(x, {&gate, &dy}, weight);
  const int64_t rows = x.sizes()[0], kept = x.sizes()[1];
  const ScalarType type = compute_type(x);
  const Tensor dx = new_tensor(x, {rows, kept}, x.scalar_type()), dgate = new_like(dx);
  const Tensor dweight = new_tensor(x, {want_affine ? 1 : 0, kept}, type);
  const GatedBackward args{kept, step(x), step(gate), step(dy), data(dy), data(x), data(gate), data(rstd), data(weight),
                           mutable_data(dx), mutable_data(dgate), activation_index(act), !norm_before_gate,
                           stream(x, 5, {&dx, &dgate})};
  const auto backward = LEANNORM_PICK(modulated_kernels).gated_backward[element_type(x)];
  sum_groups(x, 1, want_affine ? 1 : 0, {mutable_data(dweight)}, type,
             [&](int64_t begin, int64_t end, const Pointers& to) {
               const std::unique_ptr<double[]> scratch(new double[2 * kept]);
               backward(args, begin, end, to[0], scratch.get());
             });
  return {dx, dgate, dweight};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(leannorm, CPU, library) {
  library.impl("row_ada_forward", TORCH_BOX(&row_ada_forward));
  library.impl("row_ada_backward", TORCH_BOX(&row_ada_backward));
  library.impl("row_gate_backward", TORCH_BOX(&row_gate_backward));
  library.impl("row_gated_forward", TORCH_BOX(&row_gated_forward));
  library.impl("row_gated_backward", TORCH_BOX(&row_gated_backward));
}

}  // namespace leannorm
