// The autograd nodes of per-channel norms, and what all nodes have in common: what they save, and their backward pass, by
// kernels or by Python.
#pragma once

#include "calls.h"

#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <array>

namespace leannorm {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

inline PyObject* by_python = nullptr;  // fast.py's backward pass, for everything unusual

enum Saved { kX, kGate, kMean, kRstd, kWeight, kBias, kResidual, kScale, kOut, kSaved };
using Tensors = std::array<Tensor, kSaved>;

// What the nodes have in common: saved tensors, and a backward pass by kernels or by Python.
struct Direct : Node {
  std::array<SavedVariable, kSaved> saved;
  c10::IValue act;
  bool by_triton;

  // Empty if Python has to do it.
  // `dtotal`: the gradient of a second result.
  virtual variable_list by_kernels(const Tensor& dy, const Tensor& dtotal, const Tensors& kept) = 0;
  virtual py::tuple how() const = 0;  // the arguments of the call that are not tensors, as fast.py reads them

  void save(Saved place, const Tensor& value, bool is_output = false) {
    if (value.defined()) saved[place] = SavedVariable(value, is_output);
  }
  Tensors unpacked() {
    Tensors kept;
    for (int i = 0; i < kSaved; ++i) kept[i] = saved[i].unpack(i == kOut ? getptr() : nullptr);
    return kept;
  }
  bool needs(size_t input) const { return input < num_outputs() && next_edge(input).is_valid(); }
  // An operator's gradients of x, weight and bias; the first is always requested.
  variable_list gradients_in(Stack& stack) const {
    return {tensor(stack, 0), needs(1) ? tensor(stack, 1) : Tensor(), needs(2) ? tensor(stack, 2) : Tensor()};
  }

  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Tensors kept = unpacked();
    Tensor dy = std::move(gradients[0]);
    const Tensor dtotal = gradients.size() > 1 ? std::move(gradients[1]) : Tensor();
    if (!dy.defined() && num_inputs() == 1) dy = input_metadata(0).zeros_like();
    // create_graph=True, a transform, a mode: Python passes them to plain torch
    const auto is_usual = [](const Tensor& v) { return !v.defined() || plain(v); };
    if (at::GradMode::is_enabled() || !plain_thread() || !is_usual(dy) || !is_usual(dtotal)) return of_python(dy, dtotal, kept);
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      variable_list found = by_kernels(dy, dtotal, kept);
      if (!found.empty()) return found;
    }
    return of_python(dy, dtotal, kept);
  }
  variable_list of_python(const Tensor& dy, const Tensor& dtotal, const Tensors& kept) {
    const py::gil_scoped_acquire gil;
    try {
      const auto given = [](const Tensor& v) -> py::object { return v.defined() ? py::cast(v) : py::none(); };
      py::list tensors;
      for (const Tensor& v : kept) tensors.append(given(v));
      py::tuple needed(num_outputs());
      for (size_t i = 0; i < num_outputs(); ++i) needed[i] = py::bool_(needs(i));
      const py::tuple found = py::handle(by_python)(name(), tensors, needed, how(), given(dy), given(dtotal));
      variable_list gradients;
      for (size_t i = 0; i < num_outputs(); ++i) gradients.push_back(found[i].is_none() ? Tensor() : found[i].cast<Tensor>());
      return gradients;
    } catch (py::error_already_set& error) {
      throw_error(error);
    }
  }
  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable& v : saved) v.reset_data();
  }

  // Compiled autograd traces `apply` with proxies of the saved tensors.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(name());
    args.collect(act);
    args.collect(by_triton);
    for (int i = 0; i < kSaved; ++i) args.collect(saved[i], i == kOut);
  }
  variable_list apply_with_saved(const variable_list& given, torch::dynamo::autograd::SwapSavedVariables& swap) override {
    for (SavedVariable& v : saved) swap.before(v);
    variable_list result = apply(variable_list(given));
    for (SavedVariable& v : saved) swap.after(v);
    return result;
  }
};

// The node of a call on these tensors, which autograd records.
template <class Kind, class... Inputs> auto node_of(const Inputs&... inputs) {
  auto node = new_node<Kind, decltype(torch::autograd::Edge().function)>();
  node->set_next_edges(torch::autograd::collect_next_edges(inputs...));
  return node;
}

inline Tensor in_type(const Tensor& v, at::ScalarType dtype) { return v.scalar_type() == dtype ? v : v.to(dtype); }

// dy in the layout of x, which is dense.
inline Tensor like(const Tensor& x, const Tensor& dy) {
  const Tensor same = in_type(dy, x.scalar_type());
  if (x.is_contiguous()) return same.contiguous();
  return channels_last(same) ? same : same.movedim(1, -1).contiguous().movedim(-1, 1);
}

struct ChannelNorm final : Direct {
  double eps;
  int64_t groups;
  bool has_bias, has_residual;

  std::string name() const override { return "ChannelNormBackward"; }
  py::tuple how() const override { return py::make_tuple(by_triton, has_bias, act.toStringRef(), eps, groups, has_residual); }
  variable_list by_kernels(const Tensor& given, const Tensor&, const Tensors& kept) override {
    static const Operator backward("channel_backward");
    if (!dense(kept[kX]) || !kept[kMean].is_contiguous()) return {};  // a hook has returned them in another layout
    const Tensor dy = like(kept[kX], given);
    const bool is_dy = act.toStringRef() == "identity";  // the residual's gradient, which kernels do not write then
    Stack stack = stack_of(dy, kept[kX], kept[kMean], kept[kRstd], kept[kWeight], kept[kBias], kept[kResidual], kept[kOut], act,
                           groups, needs(3) && !is_dy, false, Tensor(), Tensor());
    if (!backward(stack, by_triton)) return {};
    variable_list gradients = gradients_in(stack);
    if (has_residual) gradients.push_back(!needs(3) ? Tensor() : is_dy ? dy : tensor(stack, 3));
    return gradients;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    Direct::compiled_args(args);
    args.collect(eps);
    args.collect(groups);
    args.collect(has_bias);
    args.collect(has_residual);
  }
};

struct ChannelAffine final : Direct {
  at::MemoryFormat layout;  // of y
  bool has_bias;

  std::string name() const override { return "ChannelAffineBackward"; }
  py::tuple how() const override {
    return py::make_tuple(by_triton, has_bias, act.toStringRef(), static_cast<int>(layout));
  }
  variable_list by_kernels(const Tensor& given, const Tensor&, const Tensors& kept) override {
    static const Operator both("channel_backward"), sums("channel_grad_sums"), input("channel_input_grad");
    const bool has_x = kept[kX].defined();
    const Tensor& laid_out = has_x ? kept[kX] : kept[kOut];
    if (laid_out.defined() && !dense(laid_out)) return {};  // a hook has returned it in another layout
    const Tensor dy = laid_out.defined() ? like(laid_out, given) : given.contiguous(layout);
    const Tensor x = has_x ? kept[kX] : dy;  // only the shape and layout are read
    const auto taken = [&](auto... more) {
      return stack_of(dy, x, kept[kMean], kept[kRstd], kept[kWeight], kept[kBias], Tensor(), kept[kOut], more...);
    };
    if (!(needs(1) || needs(2))) {
      Stack stack = taken(Tensor(), Tensor(), act, false, Tensor());
      if (!input(stack, by_triton)) return {};
      return {tensor(stack, 0), Tensor(), Tensor()};
    }
    Stack stack = needs(0) ? taken(act, int64_t(0), false, true, Tensor(), Tensor()) : taken(act, Tensor());
    if (!(needs(0) ? both : sums)(stack, by_triton)) return {};
    if (needs(0)) return gradients_in(stack);
    return {Tensor(), needs(1) ? tensor(stack, 1) : Tensor(), needs(2) ? tensor(stack, 0) : Tensor()};
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    Direct::compiled_args(args);
    args.collect(int64_t(layout));
    args.collect(has_bias);
  }
};

}  // namespace leannorm
