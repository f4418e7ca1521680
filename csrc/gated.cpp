// RMS norm with a gate of the input's shape: the division of the work, the results. Tensors are (rows, kept), each row
// contiguous.
#include "gated.h"

#include <algorithm>
#include <memory>
#include <tuple>

#include "activation_name.h"
#include "caches.h"
#include "row_groups.h"
#include "tensors.h"

namespace leannorm {
namespace {

// Whether this many tensors of this size are more than the caches keep, and every line of the outputs is aligned.
bool stream(const Tensor& x, int64_t tensors, std::initializer_list<const Tensor*> outputs) {
  const int64_t size = x.element_size(), kept = x.sizes()[1];
  bool aligned = kept * size % 64 == 0;
  for (const Tensor* out : outputs) aligned = aligned && reinterpret_cast<uintptr_t>(out->const_data_ptr()) % 64 == 0;
  return aligned && tensors * x.numel() * size >= streamed_traffic();
}

// Elements from one row to the next. The stride of a single row may be anything.
int64_t step(const Tensor& v) { return v.sizes()[0] > 1 ? v.strides()[0] : v.sizes()[1]; }

// Checks that all tensors have rows of the same size, and that the weight has a value for each element of a row.
void check_gated(const Tensor& x, std::initializer_list<const Tensor*> others, const Tensor& weight) {
  bool fit = x.dim() == 2 && weight.numel() == x.sizes()[1];
  for (const Tensor* v : others) fit = fit && v->dim() == 2 && v->sizes()[0] == x.sizes()[0] && v->sizes()[1] == x.sizes()[1];
  STD_TORCH_CHECK(fit, "leannorm: gate and dy must have x's two axes, and weight one value for each column");
}

std::tuple<Tensor, Tensor> row_gated_forward(const Tensor& x, const Tensor& gate, const Tensor& weight, double eps,
                                             StringHandle act, bool norm_before_gate, bool cast_before) {
  check_gated(x, {&gate}, weight);
  const int64_t rows = x.sizes()[0], kept = x.sizes()[1];
  const ScalarType type = compute_type(x);
  const Tensor y = new_tensor(x, {rows, kept}, x.scalar_type()), rstd = new_tensor(x, {rows}, type);
  const GatedForward args{kept, step(x), step(gate), data(x), data(gate), data(weight), mutable_data(y), mutable_data(rstd),
                          eps, activation_index(act), !norm_before_gate, cast_before, stream(x, 3, {&y})};
  const auto forward = LEANNORM_PICK(gated_kernels).forward[element_type(x)];
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
  const auto backward = LEANNORM_PICK(gated_kernels).backward[element_type(x)];
  const GroupSums sums{rows, kept, 1, std::clamp<int64_t>((rows + 63) / 64, 16, 256), want_affine, {mutable_data(dweight)},
                       type, false};
  sums.add_up(x, x.numel(), [&](int64_t begin, int64_t end, const GroupSums::Pointers& to) {
    const std::unique_ptr<double[]> scratch(new double[2 * kept]);
    backward(args, begin, end, to[0], scratch.get());
  });
  return {dx, dgate, dweight};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(leannorm, CPU, library) {
  library.impl("row_gated_forward", TORCH_BOX(&row_gated_forward));
  library.impl("row_gated_backward", TORCH_BOX(&row_gated_backward));
}

}  // namespace leannorm
