"""Recipes for leannorm's own autograd functions: by the kernels and the statistics that they saved."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor

from leannorm.saving.recipes import Given, _copy, recipe
from leannorm.saving.values import Step, Value, saved_by_function


@recipe("ChannelNormBackward", "ChannelAffineBackward", "SyncNormBackward")
def channel_norm(node: Any, output: int, given: Given, like: Tensor | None) -> Step | None:
    values = saved_by_function(node, 8 if node.name() == "SyncNormBackward" else 7)
    if output or values is None:  # not all there yet: the node is saving its own output
        return None
    x, mean, rstd, weight, bias, residual = values[:6]
    if x is None or mean is None or rstd is None:
        return None
    act, backend = node.act, node.backend
    statistics = 2 if node.name() == "ChannelAffineBackward" else 0
    has_x, has_weight, has_bias, has_residual = (dtype is not None for dtype in node.dtypes)
    before_bias = has_x + statistics + has_weight
    known, b = _affine(bias, node, before_bias, given, has_bias)
    if has_residual and residual is None:
        residual = given(node, before_bias + has_bias)
        if residual is None:
            return None
    if not known:
        return None
    w, m, r = _copy(weight), mean.look(), rstd.look()

    def rebuild(x: Tensor, residual: Tensor | None = None) -> Tensor:
        y: Tensor = backend.channel_normalize(x, m, r, w, b, residual, act)
        return y

    inputs = (x,) if residual is None else (x, residual)
    return Step(rebuild, inputs, ("channel", act, backend.__name__, w is None, b is None))


def _affine(saved: Value | None, node: Any, i: int, given: Given, there: bool) -> tuple[bool, Tensor | None]:
    """Is the bias known, and a copy of it: saved by the node, or its input i (an absent one is no input)."""
    value = saved if saved is not None or not there else given(node, i)
    return value is not None or not there, _copy(value)


@recipe("RowNormBackward")
def row_norm(node: Any, output: int, given: Given, like: Tensor | None) -> Step | None:
    values = saved_by_function(node, 4)
    if output or values is None:
        return None
    x, _, _, weight = values
    *before_bias, has_bias = (dtype is not None for dtype in node.dtypes)
    known, b = _affine(None, node, sum(before_bias), given, has_bias)
    if x is None or not known:
        return None
    w, (start, stop), eps, rms, backend = _copy(weight), node.span, node.eps, node.rms, node.backend

    def rebuild(x: Tensor) -> Tensor:
        y: Tensor = backend.row_forward(x, None, w, b, start, stop, eps, rms)[0]
        return y

    return Step(rebuild, (x,), ("row", start, stop, eps, rms, backend.__name__, w is None, b is None))


@recipe("ConvNormBackward")
def conv_norm(node: Any, output: int, given: Given, like: Tensor | None) -> Step | None:
    values = saved_by_function(node, 6)
    if output or values is None:
        return None
    x, kernel, conv_bias, weight, mean, rstd = values
    if x is None or kernel is None or mean is None or rstd is None or x.products:
        return None
    has_weight, has_bias = (dtype is not None for dtype in node.dtypes)
    known, b = _affine(None, node, 2 + (conv_bias is not None) + has_weight, given, has_bias)
    if not known:
        return None
    w, m, r, convolution, backend = _copy(weight), mean.look(), rstd.look(), node.convolution, node.backend

    def rebuild(x: Tensor, kernel: Tensor, conv_bias: Tensor | None = None) -> Tensor:
        y: Tensor = backend.channel_normalize(convolution(x, kernel, conv_bias), m, r, w, b)
        return y

    inputs = (x, kernel) if conv_bias is None else (x, kernel, conv_bias)
    flops = 2 * kernel.look()[0].numel() * prod(node._input_metadata[0].shape)
    return Step(rebuild, inputs, (convolution, backend.__name__, w is None), kind="product", flops=flops)
