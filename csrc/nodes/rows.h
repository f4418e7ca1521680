// The calls and the autograd nodes of row norms: layer and RMS norm over any axes, of a sum or with a scale and a shift per sample
// or token, and RMS norm with a gate of the input's shape.
#pragma once

#include "norms.h"

#include <ATen/ExpandUtils.h>
#include <ATen/TensorUtils.h>
#include <ATen/ops/add.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/reshape.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>

namespace leannorm {

// What a row norm computes, as `Rows` of _types.py.
struct RowForm {
  int64_t start = 0, stop = 0;
  double eps = 0, weight_offset = 0;
  bool rms = false, cast_before = false;

  // The last axes of x, whose sizes are `shape`, or the single axis `dim`; false if its sizes are others.
  bool read_axes(const Tensor& x, PyObject* shape, PyObject* dim) {
    if (!PyTuple_Check(shape)) return false;
    const int64_t axes = PyTuple_GET_SIZE(shape), rank = x.dim();
    start = rank - axes;
    if (dim != Py_None && !(PyLong_Check(dim) && axes == 1 && read(dim, start))) return false;
    if (dim != Py_None && start < 0) start += rank;
    stop = start + axes;
    if (axes == 0 || start < 0 || stop > rank) return false;
    for (int64_t i = 0, size; i < axes; ++i)
      if (!read(PyTuple_GET_ITEM(shape, i), size) || x.size(start + i) != size) return false;
    return true;
  }
  void collect(torch::dynamo::autograd::CompiledNodeArgs& args) const {
    args.collect(start), args.collect(stop), args.collect(eps), args.collect(weight_offset);
    args.collect(rms), args.collect(cast_before);
  }
  bool fits(const Tensor& x, const Tensor& parameter) const {
    return !parameter.defined() || (parameter.is_floating_point() && parameter.sizes() == x.sizes().slice(start, stop - start));
  }
  // Otherwise the output has the wider dtype of the weight.
  bool keeps_type(const Tensor& x, const Tensor& weight) const {
    return !cast_before || !weight.defined() || c10::promoteTypes(weight.scalar_type(), x.scalar_type()) == x.scalar_type();
  }
};

inline at::ScalarType compute_type(const Tensor& x) { return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }
inline int64_t values_of_a_row(const Tensor& x, int64_t start) { return c10::multiply_integers(x.sizes().slice(start)); }

// (rows, kept), each row contiguous, of this dtype: `apart` of compiled.py.
inline Tensor apart(const Tensor& v, int64_t kept, at::ScalarType dtype) {
  const Tensor same = in_type(v, dtype);
  const Tensor rows = same.dim() == 2 && same.size(1) == kept ? same : same.reshape({-1, kept});
  return kept == 1 || rows.stride(1) == 1 ? rows : rows.contiguous();
}

// Whether `apart` copies nothing. A pass in lean() would not see a copy, as it sees no operators below autograd.
inline bool is_apart(const Tensor& v, int64_t kept, at::ScalarType dtype) {
  if (v.scalar_type() != dtype) return false;
  const auto strides = at::detail::computeStride(v.sizes(), v.strides(), at::DimVector{v.numel() / kept, kept});
  return strides && (kept == 1 || (*strides)[1] == 1);
}

// Whether a scale or a shift has a line for each group of consecutive rows of x: the sizes of x's first axes, then 1.
inline bool has_lines(const Tensor& v, const Tensor& x, int64_t start) {
  const int64_t leading = v.dim() - (x.dim() - start);
  if (leading < 0 || leading > start || v.sizes().slice(leading) != x.sizes().slice(start)) return false;
  bool is_broadcast = false;
  for (int64_t d = 0; d < start; ++d) {
    const int64_t size = d < leading ? v.size(d) : 1;
    if (size != 1 && (size != x.size(d) || is_broadcast)) return false;
    if (x.size(d) != 1) is_broadcast = size == 1;
  }
  return v.is_floating_point();
}
// These lines as kernels take them: `Compiled._lines`.
inline at::ScalarType type_of_lines(const Tensor& v, const Tensor& x, bool by_triton) {
  const bool stays = v.scalar_type() == x.scalar_type() && (by_triton || v.numel() == x.numel());
  return stays ? x.scalar_type() : compute_type(x);
}
inline Tensor lines_of(const Tensor& v, const Tensor& x, int64_t start, bool by_triton) {
  if (!v.defined()) return v;
  return apart(v, values_of_a_row(x, start), type_of_lines(v, x, by_triton));
}
inline bool are_lines(const Tensor& v, const Tensor& x, int64_t start, bool by_triton) {
  return !v.defined() || is_apart(v, values_of_a_row(x, start), type_of_lines(v, x, by_triton));
}

// What a row norm takes in addition to x, a weight and a bias: norm(x + gate * residual) * (1 + scale) + shift.
struct SumAndScale {
  Tensor residual, gate, scale, shift;

  // Reads them; false if kernels do not take them as they are.
  bool read_from(PyObject* const* from, Given& of, const RowForm& form) {
    for (Tensor* const v : {&residual, &gate, &scale, &shift})
      if (!read(*from++, *v, of.by_triton)) return false;
    const Tensor& x = of.x;
    if (!of.can_record(residual, gate, scale, shift) || !of.takes(residual)) return false;
    if (!scale.defined()) return of.alike() && !gate.defined() && !shift.defined();
    if (!x.is_contiguous() || x.numel() == 0 || !has_lines(scale, x, form.start)) return false;
    if (gate.defined() && !(residual.defined() && has_lines(gate, x, form.start))) return false;
    if (shift.defined() && !(shift.is_floating_point() && shift.sizes() == scale.sizes())) return false;
    if (scale.numel() == x.numel() && scale.sizes() != x.sizes()) return false;  // whose shift has dy's gradient in other sizes
    for (const Tensor* const v : {&of.weight, &of.bias, &gate, &scale, &shift})
      if (v->defined() && v->device() != x.device()) return false;
    if (!is_watched()) return true;
    const auto are_taken = [&](const auto&... lines) { return (are_lines(lines, x, form.start, of.by_triton) && ...); };
    return !of.weight.defined() && !of.bias.defined() && are_taken(gate, scale, shift);
  }
};

// 1 + scale if there is a weight or a bias, as in `with_scale` of autograd/rows.py; otherwise kernels add the 1.
inline Tensor factor_of(const Tensor& scale, const Tensor& weight, const Tensor& bias, const Tensor& x) {
  if (!scale.defined() || !(weight.defined() || bias.defined())) return {};
  const auto one = [](at::ScalarType dtype) {  // in the dtype of the sum: torch would convert a number in every call
    const c10::InferenceMode usual(false);
    return at::ones({}, dtype);
  };
  static const Tensor of_float = one(at::kFloat), of_double = one(at::kDouble);
  const Tensor wide = in_type(scale, compute_type(x));
  return at::add(wide, wide.scalar_type() == at::kDouble ? of_double : of_float);
}
inline Tensor times(const Tensor& v, const Tensor& weight) {
  return weight.defined() ? at::mul(v, in_type(weight, v.scalar_type())) : v;
}
inline Tensor plus(const Tensor& sum, const Tensor& v, const Tensor& weight) {
  return at::addcmul(sum, v, in_type(weight, sum.scalar_type()));
}

// The node of `RowNorm`. With a residual it saves the sum, which is the second result, and otherwise x.
struct RowNorm final : Direct {
  enum Input { kOfX, kOfResidual, kOfGate, kOfScale, kOfShift, kOfWeight, kOfBias, kInputs };
  RowForm form;

  std::string name() const override { return "RowNormBackward"; }
  py::tuple how() const override {
    return py::make_tuple(by_triton, form.start, form.stop, form.eps, form.rms, form.weight_offset, form.cast_before);
  }
  variable_list by_kernels(const Tensor& dy, const Tensor& dtotal, const Tensors& kept) override {
    static const Operator backward("row_backward");
    const bool has_residual = kept[kOut].defined();
    const Tensor &x = has_residual ? kept[kOut] : kept[kX], &weight = kept[kWeight], &bias = kept[kBias];
    const Tensor &gate = kept[kGate], &scale = kept[kScale];
    if (has_residual && (dy.defined() ? dy.scalar_type() != x.scalar_type() : gate.defined())) return {};
    if (scale.defined() && !x.is_contiguous()) return {};  // a hook has returned it in another layout
    variable_list found(kInputs);
    if (!dy.defined()) {  // only the sum was used
      found[kOfX] = found[kOfResidual] = dtotal;
      return found;
    }
    const bool want_bias = needs(kOfShift) || needs(kOfBias) || (needs(kOfScale) && bias.defined());
    const bool want_weight = want_bias || needs(kOfScale) || needs(kOfWeight);
    const Tensor mean = kept[kMean].defined() ? kept[kMean] : at::zeros_like(kept[kRstd]);
    const Tensor factor = factor_of(scale, weight, bias, x);
    const auto lines = [&](const Tensor& v) { return lines_of(v, x, form.start, by_triton); };
    Stack stack = stack_of(dy, dtotal, x, mean, kept[kRstd],
                           scale.defined() ? lines(factor.defined() ? times(factor, weight) : scale) : weight, form.start, form.stop,
                           form.rms, want_weight, want_bias, form.weight_offset, Tensor(), lines(gate), kept[kResidual]);
    if (!backward(stack, by_triton)) return {};
    const auto sums = [&](size_t i) {
      const Tensor made = tensor(stack, i);
      if (!scale.defined() || made.sizes() == scale.sizes()) return made;
      return made.numel() == 0 ? dy : made.view(scale.sizes());  // dy is the sum over a single row
    };
    const Tensor dx = tensor(stack, 0), dweight = want_weight ? sums(1) : Tensor(), dbias = want_bias ? sums(2) : Tensor();
    const auto give = [&](Input to, auto make) {
      if (needs(to)) found[to] = make();
    };
    give(kOfX, [&] { return dx; });
    give(kOfResidual, [&] { return gate.defined() ? tensor(stack, 3) : dx; });
    give(kOfGate, [&] { return tensor(stack, 4).view(gate.sizes()); });
    give(kOfScale, [&] { return bias.defined() ? plus(times(dweight, weight), dbias, bias) : times(dweight, weight); });
    give(kOfShift, [&] { return dbias; });
    give(kOfWeight, [&] { return factor.defined() ? at::sum_to(at::mul(factor, dweight), weight.sizes()) : dweight; });
    give(kOfBias, [&] { return factor.defined() ? at::sum_to(at::mul(factor, dbias), bias.sizes()) : dbias; });
    return found;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    Direct::compiled_args(args);
    form.collect(args);
  }
};

// y, and the sum that it is the norm of, if there is a residual.
inline std::array<Tensor, 2> row_norm(const Given& of, const SumAndScale& and_of, const RowForm& form) {
  static const Operator forward("row_forward");
  const auto& [x, weight, bias, eps, by_triton, records] = of;
  const auto& [residual, gate, scale, shift] = and_of;
  Stack stack;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    const Tensor factor = factor_of(scale, weight, bias, x);
    const auto lines = [&](const Tensor& v) { return lines_of(v, of.x, form.start, of.by_triton); };
    Tensor added = shift;
    if (factor.defined() && shift.defined()) added = in_type(shift, factor.scalar_type());
    if (factor.defined() && bias.defined()) added = shift.defined() ? plus(added, factor, bias) : times(factor, bias);
    stack = stack_of(x, residual, scale.defined() ? lines(factor.defined() ? times(factor, weight) : scale) : weight,
                     scale.defined() ? lines(added) : bias, form.start, form.stop, eps, form.rms, form.weight_offset, form.cast_before,
                     Tensor(), lines(gate));
  }
  if (!forward.taken(stack, by_triton)) return {};
  Tensor y = tensor(stack, 0), total = residual.defined() ? tensor(stack, 1) : Tensor();
  if (!records) return {y, total};
  const auto node = node_of<RowNorm>(x, residual, gate, scale, shift, weight, bias);
  torch::autograd::set_history(y, node);
  if (residual.defined()) torch::autograd::set_history(total, node);
  residual.defined() ? node->save(kOut, total, true) : node->save(kX, x);
  if (!form.rms || by_triton) node->save(kMean, tensor(stack, 2));  // otherwise zeros would be one more launch
  node->save(kRstd, tensor(stack, 3));
  node->save(kWeight, weight);
  node->save(kGate, gate);
  if (gate.defined() && gate.requires_grad()) node->save(kResidual, residual);
  node->save(kScale, scale);
  if (scale.defined()) node->save(kBias, bias);
  node->by_triton = by_triton, node->form = form, node->form.eps = eps;
  return {y, total};
}

// row_norm(x, weight, bias, eps, shape, dim, rms, weight_offset, cast_before, residual, gate, scale, shift, by_triton): a pair if
// there is a residual
inline PyObject* call_row_norm(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Given given;
  RowForm form;
  SumAndScale others;
  if (count != 14 || !given.read_from(arguments, count) || !form.read_axes(given.x, arguments[4], arguments[5])) Py_RETURN_NONE;
  if (!others.read_from(arguments + 9, given, form)) Py_RETURN_NONE;
  const auto& [x, weight, bias, eps, by_triton, records] = given;
  form.rms = arguments[6] == Py_True, form.cast_before = arguments[8] == Py_True;
  if (!(eps >= 0) || !form.fits(x, weight) || !form.fits(x, bias) || !form.keeps_type(x, weight)) Py_RETURN_NONE;
  const bool is_number = PyFloat_Check(arguments[7]) || PyLong_Check(arguments[7]);
  if (!(is_number && read(arguments[7], form.weight_offset) && std::isfinite(form.weight_offset))) Py_RETURN_NONE;
  if (others.scale.defined() && !weight.defined() && !bias.defined()) form.weight_offset = 1;
  std::array<Tensor, 2> made;
  {
    const py::gil_scoped_release others_run;
    made = row_norm(given, others, form);
  }
  if (!others.residual.defined() || !made[0].defined()) return THPVariable_Wrap(std::move(made[0]));
  const auto given_to_python = [](Tensor& v) { return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(v))); };
  return py::make_tuple(given_to_python(made[0]), given_to_python(made[1])).release().ptr();
  END_HANDLE_TH_ERRORS
}

// The node of `GatedNorm`; its inputs are x, gate and weight.
struct GatedNorm final : Direct {
  RowForm form;
  bool norm_before_gate = true;

  std::string name() const override { return "GatedNormBackward"; }
  py::tuple how() const override {
    return py::make_tuple(by_triton, form.start, form.stop, form.eps, true, 0.0, form.cast_before, act.toStringRef(), norm_before_gate);
  }
  variable_list by_kernels(const Tensor& dy, const Tensor&, const Tensors& kept) override {
    static const Operator backward("row_gated_backward");
    const Tensor &x = kept[kX], &weight = kept[kWeight];
    if (dy.scalar_type() != x.scalar_type()) return {};
    const int64_t in_a_row = values_of_a_row(x, form.start);
    const auto rows = [&](const Tensor& v) { return apart(v, in_a_row, x.scalar_type()); };
    Stack stack = stack_of(rows(dy), rows(x), rows(kept[kGate]), kept[kRstd].reshape(-1), flat(weight, x, in_a_row), act,
                           norm_before_gate, needs(2));
    if (!backward(stack, by_triton)) return {};
    const auto like = [&](size_t i, const Tensor& v) {
      if (i > 0 && !needs(i)) return Tensor();
      const Tensor found = tensor(stack, i);
      return found.sizes() == v.sizes() ? found : found.view(v.sizes());
    };
    return {like(0, x), like(1, x), like(2, weight)};
  }
  // The weight as kernels take it: `CompiledGated._weight`.
  static Tensor flat(const Tensor& weight, const Tensor& x, int64_t in_a_row) {
    if (!weight.defined()) return at::ones({in_a_row}, x.options().dtype(compute_type(x)));
    const Tensor same = in_type(weight, compute_type(x));
    return same.dim() == 1 && same.is_contiguous() ? same : same.contiguous().view(-1);
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    Direct::compiled_args(args);
    form.collect(args), args.collect(norm_before_gate);
  }
};

inline Tensor gated_norm(const Given& of, const RowForm& form, const c10::IValue& act, bool norm_before_gate) {
  static const Operator forward("row_gated_forward");
  const auto& [x, gate, weight, eps, by_triton, records] = of;
  const int64_t in_a_row = values_of_a_row(x, form.start);
  auto sizes = x.sizes().vec();
  std::fill(sizes.begin() + form.start, sizes.end(), 1);
  Tensor y, rstd;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    Stack stack = stack_of(apart(x, in_a_row, x.scalar_type()), apart(gate, in_a_row, x.scalar_type()),
                           GatedNorm::flat(weight, x, in_a_row), eps, act, norm_before_gate, form.cast_before);
    if (!forward.taken(stack, by_triton)) return {};
    y = tensor(stack, 0), rstd = tensor(stack, 1);
    if (x.dim() != 2) y = y.view(x.sizes());
    if (records) rstd = rstd.view(sizes);
  }
  if (!records) return y;
  const auto node = node_of<GatedNorm>(x, gate, weight);
  node->save(kX, x);
  node->save(kGate, gate);
  node->save(kRstd, rstd);
  node->save(kWeight, weight);
  node->by_triton = by_triton, node->act = act, node->form = form, node->form.eps = eps, node->norm_before_gate = norm_before_gate;
  torch::autograd::set_history(y, node);
  return y;
}

// gated_norm(x, gate, weight, eps, shape, act, norm_before_gate, cast_before, by_triton)
inline PyObject* call_gated_norm(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Given given;
  RowForm form;
  c10::IValue act;
  if (count != 9 || !given.read_from(arguments, count) || !form.read_axes(given.x, arguments[4], Py_None)) Py_RETURN_NONE;
  const auto& [x, gate, weight, eps, by_triton, records] = given;
  if (!(eps >= 0) || x.numel() == 0 || !gate.defined() || !form.fits(x, weight) || !read(arguments[5], act)) Py_RETURN_NONE;
  if (gate.sizes() != x.sizes() || gate.scalar_type() != x.scalar_type()) Py_RETURN_NONE;
  form.rms = true, form.cast_before = arguments[7] == Py_True;
  if (!form.keeps_type(x, weight)) Py_RETURN_NONE;
  const int64_t kept = values_of_a_row(x, form.start);
  const bool are_rows = is_apart(x, kept, x.scalar_type()) && is_apart(gate, kept, x.scalar_type());
  if (is_watched() && !(are_rows && weight.defined() && is_apart(weight, kept, compute_type(x)))) Py_RETURN_NONE;
  const bool norm_before_gate = arguments[6] == Py_True;
  return result([&] { return gated_norm(given, form, act, norm_before_gate); });
  END_HANDLE_TH_ERRORS
}

}  // namespace leannorm
