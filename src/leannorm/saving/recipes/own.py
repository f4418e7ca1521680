"""leannorm's own autograd functions: rebuilt by the kernels and from the statistics that they saved."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor

from leannorm.autograd.channel import ChannelAffine, ChannelNorm
from leannorm.autograd.conv import ConvNorm
from leannorm.autograd.rows import RowNorm
from leannorm.autograd.sync import SyncNorm
from leannorm.ops.backends import Backend
from leannorm.saving.graph import ours, saved_by_function
from leannorm.saving.recipes.registry import Given, copy_of, recipe
from leannorm.saving.values import Step, Value

_SYNC, _AFFINE = ours(SyncNorm), ours(ChannelAffine)


def _channel_normalize(x: Tensor, *rest: Any) -> Tensor:
    *residual, mean, rstd, weight, bias, backend, act = rest
    kernels: Backend = backend
    return kernels.channel_normalize(x, mean, rstd, weight, bias, (residual or [None])[0], act)


@recipe(ours(ChannelNorm), _AFFINE, _SYNC)
def channel_norm(node: Any, output: int, given: Given, like: Tensor | None) -> Step | None:
    values = saved_by_function(node, 8 if isinstance(node, SyncNorm._backward_cls) else 7)
    if output or values is None:  # not all there yet: the node is saving its own output
        return None
    x, mean, rstd, weight, bias, residual = values[:6]
    if x is None or mean is None or rstd is None:
        return None
    statistics = 2 if isinstance(node, ChannelAffine._backward_cls) else 0
    has_x, has_weight, has_bias, has_residual = (dtype is not None for dtype in node.dtypes)
    before_bias = has_x + statistics + has_weight
    known, b = _affine(bias, before_bias, given, has_bias)
    if has_residual and residual is None:
        residual = given(before_bias + has_bias)
        if residual is None:
            return None
    if not known:
        return None
    captured = mean.look(), rstd.look(), copy_of(weight), b
    inputs = (x,) if residual is None else (x, residual)
    return Step(_channel_normalize, inputs, captured, (node.backend, node.act))


def _affine(saved: Value | None, i: int, given: Given, there: bool) -> tuple[bool, Tensor | None]:
    """Is the bias known, and a copy of it: saved by the node, or its input i (an absent one is no input)."""
    value = saved if saved is not None or not there else given(i)
    return value is not None or not there, copy_of(value)


def _row_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    backend: Backend,
    start: int,
    stop: int,
    eps: float,
    rms: bool,
) -> Tensor:
    return backend.row_forward(x, None, weight, bias, start, stop, eps, rms)[0]


@recipe(ours(RowNorm))
def row_norm(node: Any, output: int, given: Given, like: Tensor | None) -> Step | None:
    values = saved_by_function(node, 4)
    if output or values is None:
        return None
    x, _, _, weight = values
    *before_bias, has_bias = (dtype is not None for dtype in node.dtypes)
    known, b = _affine(None, sum(before_bias), given, has_bias)
    if x is None or not known:
        return None
    constants = node.backend, *node.span, node.eps, node.rms
    return Step(_row_forward, (x,), (copy_of(weight), b), constants)


def _conv_norm(x: Tensor, kernel: Tensor, *rest: Any) -> Tensor:
    *conv_bias, mean, rstd, weight, bias, convolution, backend = rest
    y = convolution(x, kernel, *(conv_bias or (None,)))
    normalized: Tensor = backend.channel_normalize(y, mean, rstd, weight, bias)
    return normalized


@recipe(ours(ConvNorm))
def conv_norm(node: Any, output: int, given: Given, like: Tensor | None) -> Step | None:
    values = saved_by_function(node, 6)
    if output or values is None:
        return None
    x, kernel, conv_bias, weight, mean, rstd = values
    if x is None or kernel is None or mean is None or rstd is None or x.products:
        return None
    has_weight, has_bias = (dtype is not None for dtype in node.dtypes)
    known, b = _affine(None, 2 + (conv_bias is not None) + has_weight, given, has_bias)
    if not known:
        return None
    captured = mean.look(), rstd.look(), copy_of(weight), b
    inputs = (x, kernel) if conv_bias is None else (x, kernel, conv_bias)
    flops = 2 * kernel.look()[0].numel() * prod(node._input_metadata[0].shape)
    constants = node.convolution, node.backend
    return Step(_conv_norm, inputs, captured, constants, kind="product", flops=flops)
