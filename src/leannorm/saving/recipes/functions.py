"""leannorm's autograd functions: rebuilt by their own kernels, from the statistics that they saved."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from leannorm._types import Gating, KeptByChannelNorm, Rows
from leannorm.autograd.channel import ChannelAffine, ChannelNorm
from leannorm.autograd.conv import ConvNorm
from leannorm.autograd.fast import call_of
from leannorm.autograd.gated import GatedNorm
from leannorm.autograd.rows import RowNorm, with_scale
from leannorm.ops.backends import CPU, TRITON, Backend
from leannorm.ops.precision import compute_dtype
from leannorm.saving.graph import kept_by, kind_of_function, saved_by_function
from leannorm.saving.recipes.arithmetic import add_to
from leannorm.saving.recipes.fused_norm_act import ACTIVATIONS, EXACT, joined, matches_torch
from leannorm.saving.recipes.norms_on_gpu import in_one_pass
from leannorm.saving.recipes.products import MOST
from leannorm.saving.recipes.registry import ValueOf, copy_of, recipe
from leannorm.saving.steps import Step
from leannorm.saving.values import Value


def _channel_normalize(x: Tensor, *rest: Any) -> Tensor:
    *residual, mask, mean, rstd, weight, bias, backend, act = rest
    kernels: Backend = backend
    r = residual[0] if residual else None
    return kernels.channel_normalize(KeptByChannelNorm(x, mean, rstd, weight, bias, r, mask=mask, act=act))


def norm_then(x: Tensor, *rest: Any) -> Tensor:
    """act(norm(x) + what is added), with the bits of three operators, in one pass where that has them."""
    *added, _, mean, rstd, weight, bias, backend, act = rest
    kernels: Backend = backend
    residual = added[0] if added else None
    if kernels is TRITON:
        y = in_one_pass(x, residual, weight, bias, mean, rstd, act, True)
        if y is not None:
            return y
    elif x.dtype.itemsize > 2:  # in 16 bits, what an operator gives is rounded before the next one
        return kernels.channel_normalize(KeptByChannelNorm(x, mean, rstd, weight, bias, residual, act=act))
    y = kernels.channel_normalize(KeptByChannelNorm(x, mean, rstd, weight, bias))
    return ACTIVATIONS[act](y if residual is None else y + residual)


def _then(step: Step, act: str, added: Value | None = None) -> Step | None:
    """The step with an activation, or an addition, in the same pass."""
    x, (backend, _) = step.inputs[0], step.constants
    dtype = x.dtype if x.tensor is None else x.tensor.dtype
    of_cpu = backend is CPU and dtype.itemsize > 2 and matches_torch(act, dtype)
    if not (of_cpu or (backend is TRITON and act in EXACT)):
        return None
    return joined(step, norm_then, (backend, act), added, _then)


def _kept(node: Any) -> Any:
    """The record of what the node's function keeps (its `Kept`), with a value in each field.

    None while the node is still saving (its output, for example), and if it saved outside of `lean()`.
    """
    record, values = kept_by(node), saved_by_function(node)
    if values is None or values["x"] is None or values["rstd"] is None:
        return None
    return record(*[values.get(name) for name in record._fields if name != "act"])


@recipe(kind_of_function(ChannelNorm), kind_of_function(ChannelAffine))
def channel_norm(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    kept = _kept(node)
    if output or kept is None:
        return None
    call, before_bias = call_of(node), 1 + (kept.weight is not None)
    known, bias = _bias(kept.bias, before_bias, value_of, call.has_bias)
    residual = kept.residual
    if call.has_residual and residual is None:
        residual = value_of(before_bias + call.has_bias)
        if residual is None:
            return None
    if not known:
        return None
    mask = copy_of(kept.mask) if call.zero else None
    captured = mask, kept.mean.look(), kept.rstd.look(), copy_of(kept.weight), bias
    inputs = (kept.x,) if residual is None else (kept.x, residual)
    then = None if call.act != "identity" or call.has_residual or kept.mask is not None else _then
    return Step(_channel_normalize, inputs, captured, (call.backend.whole, call.act), then=then)


def _bias(saved: Value | None, i: int, value_of: ValueOf, there: bool) -> tuple[bool, Tensor | None]:
    """Is the bias known, and a copy of it: saved by the node, or its input i. `there`: it has one."""
    value = saved if saved is not None or not there else value_of(i)
    return value is not None or not there, copy_of(value)


def _row_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, valid: Tensor | None, backend: Backend, rows: Rows
) -> Tensor:
    return backend.row_forward(x, None, weight, bias, rows, valid)[0]


def _sum(value_of: ValueOf) -> Step | None:
    """The second output of a row norm: its input and what was added to it, in the same dtype."""
    a, b = value_of(0), value_of(1)
    if a is None or b is None:
        return None
    return Step(torch.add, (a, b), in_place=add_to, kind="sum")


@recipe(kind_of_function(RowNorm))
def row_norm(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    kept, call = _kept(node), call_of(node)
    if output:
        return _sum(value_of) if call.adds_alike else None
    if kept is None:
        return None
    if kept.scale is not None:
        return _with_scale(kept, call, value_of)
    before_bias = 1 + call.has_residual + (kept.weight is not None)
    known, bias = _bias(None, before_bias, value_of, call.has_bias)
    if not known:
        return None
    captured = copy_of(kept.weight), bias, copy_of(kept.valid)
    return Step(_row_forward, (kept.x,), captured, (call.backend.whole, call.rows))


def _scaled_forward(x: Tensor, scale: Tensor, *rest: Any) -> Tensor:
    *shift, weight, bias, backend, rows = rest
    affine = with_scale(scale, (shift or [None])[0], weight, bias, compute_dtype(x))
    y: Tensor = backend.row_forward(x, None, *affine, rows)[0]
    return y


def _with_scale(kept: Any, call: Any, value_of: ValueOf) -> Step | None:
    """From x or the sum; scale and shift may be as large, so they are inputs and no copies."""
    inputs = [kept.x, kept.scale]
    if call.has_shift:
        shift = value_of(2 + call.has_residual + (kept.gate is not None))
        if shift is None:
            return None
        inputs.append(shift)
    captured = copy_of(kept.weight), copy_of(kept.bias)
    return Step(_scaled_forward, tuple(inputs), captured, (call.backend.whole, call.rows))


def _gated_forward(
    x: Tensor, gate: Tensor, weight: Tensor | None, backend: Backend, gating: Gating
) -> Tensor:
    return backend.row_gated_forward(x, gate, weight, gating)[0]


@recipe(kind_of_function(GatedNorm))
def gated_norm(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    kept = _kept(node)
    if kept is None or kept.gate is None:
        return None
    captured = (copy_of(kept.weight),)
    return Step(_gated_forward, (kept.x, kept.gate), captured, (node.backend, node.gating))


def _conv_norm(x: Tensor, kernel: Tensor, *rest: Any) -> Tensor:
    *conv_bias, mean, rstd, weight, bias, convolution, backend = rest
    y = convolution.apply(x, kernel, *(conv_bias or (None,)))
    normalized: Tensor = backend.channel_normalize(KeptByChannelNorm(y, mean, rstd, weight, bias))
    return normalized


@recipe(kind_of_function(ConvNorm))
def conv_norm(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    kept = _kept(node)
    if output or kept is None or kept.x.products:
        return None
    has_weight, has_bias = (dtype is not None for dtype in node.dtypes)
    known, bias = _bias(None, 2 + (kept.conv_bias is not None) + has_weight, value_of, has_bias)
    if not known:
        return None
    captured = kept.mean.look(), kept.rstd.look(), copy_of(kept.weight), bias
    inputs = tuple(v for v in (kept.x, kept.conv_weight, kept.conv_bias) if v is not None)
    flops = 2 * kept.conv_weight.look()[0].numel() * prod(node._input_metadata[0].shape)
    constants = node.convolution, node.backend
    costly = flops > MOST * prod(node._input_metadata[0].shape)
    return Step(_conv_norm, inputs, captured, constants, kind="product", flops=flops, costly=costly)
