"""Torch's own norms, where the C++ kernels are not built: the same operators, recorded by autograd as there.

So a call takes torch's time, in both directions. Its statistics show whether the result is as exact as the
reference's (`native.py`). If it is not, or if torch refuses the arguments, the result here is None, nothing
has changed, and the caller goes on with a backend. A small call takes as long as its operators and its
Python, so there is none to spare of either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leannorm._types import Channels, ChannelTensors, Maybe, Moments, Rows
from leannorm.ops.activation import ACTIVATIONS
from leannorm.ops.backends import native
from leannorm.ops.backends.native import behind
from leannorm.ops.layout import memory_format
from leannorm.ops.modes import rebuilding, recorded

_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
_JUMPS = ("hardswish", "hardtanh", "relu6")  # their derivatives, at numbers to which half precision rounds
_FEW, _LARGE = 8, 1 << 16  # channels of a group and elements for which torch's backward pass is slow


def _in_one(x: Tensor, *vectors: Maybe) -> Any:
    """Vectors as torch takes them: all in the input's dtype, or for half precision all in float32."""
    dtype = x.dtype
    for v in vectors:
        if v is not None and v.dtype is not dtype:
            break
    else:
        return vectors
    wide = _WIDE.get(dtype, dtype)
    for v in vectors:
        if v is not None and (v.dtype is torch.float64 is not wide or not v.is_floating_point()):
            return None  # gradients are as wide as the vectors
    return tuple([v if v is None else v.to(wide) for v in vectors])


def _fuses(tensors: ChannelTensors, act: str) -> bool:
    """Whether torch's activation on its own is as exact, and has autograd keep no more than promised."""
    if act == "identity":
        return True
    if act not in ACTIVATIONS or (act in _JUMPS and tensors[0].dtype in _WIDE):
        return False
    return ACTIVATIONS[act].from_output is not None or not recorded(*tensors[:4])


def batch_norm(tensors: ChannelTensors, norm: Channels) -> tuple[Tensor, Moments | None] | None:
    """By the statistics of the batch, which are returned, or move the running ones if these are given.

    A recompute moves none, and gives the same bits.
    """
    x, weight, bias, residual, mean, var, count, _ = tensors
    _, eps, act, _, momentum, *_ = norm
    if mean is not None and var is not None and not _may_move(x.size(1), mean, var):
        return None
    if not _fuses(tensors, act):
        return None
    channels = x.size(1)
    if mean is None or var is None:
        dtype = _WIDE.get(x.dtype, x.dtype)
        mean, var = torch.zeros(channels, dtype=dtype), torch.zeros(channels, dtype=dtype)
        made = _of_batch(x, weight, bias, mean, var, 1.0, eps)  # with this momentum these are the batch's
        if made is None:
            return None
        values = x.numel() // channels
        return behind(made, residual, act), Moments(mean, var * (values - 1), values)
    if rebuilding():
        mean, var, count = mean.clone(), var.clone(), None
    if momentum is None:
        momentum = 0.0 if count is None else 1 / (count.item() + 1)
    before = torch.cat((mean, var))
    # `data`: autograd keeps these, and does not read them, so they may be edited before the backward pass
    y = _of_batch(x, weight, bias, mean.data, var.data, momentum, eps)
    if y is None:
        mean.copy_(before[:channels])
        var.copy_(before[channels:])
        return None
    torch._C._increment_version((mean, var))
    if count is not None:
        count.add_(1)
    return behind(y, residual, act), None


def _may_move(channels: int, mean: Tensor, var: Tensor) -> bool:
    """Whether torch's operator may write to these running statistics."""
    if not (mean.shape == var.shape == (channels,) and mean.is_contiguous() and var.is_contiguous()):
        return False
    return not (mean.requires_grad or var.requires_grad or mean.is_inference() or var.is_inference())


def _of_batch(
    x: Tensor, weight: Maybe, bias: Maybe, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> Maybe:
    """y; mean and var have moved, even if the result is None."""
    vectors = _in_one(x, weight, bias, mean, var)
    if (
        vectors is None
        or vectors[2] is not mean
        or vectors[3] is not var
        or eps < native.LEAST_EPS
        or not native.dense(x)
    ):
        return None
    if x.numel() <= x.size(1):
        return None
    try:
        made = torch._batch_norm_impl_index(x, vectors[0], vectors[1], mean, var, True, momentum, eps, False)
    except RuntimeError:
        return None
    return made[0] if native.is_exact(made[1], made[2]) else None


def group_norm(tensors: ChannelTensors, norm: Channels) -> Maybe:
    """By the statistics of each sample's groups of channels; there is no residual."""
    (x, weight, bias, *_), (groups, eps, act, *_) = tensors, norm
    vectors = _in_one(x, weight, bias)
    if vectors is None or eps < native.LEAST_EPS or not native.dense(x):
        return None
    if not _fuses(tensors, act):
        return None
    samples, channels, layout = x.size(0), x.size(1), None
    if not x.is_contiguous():
        one_each, slow = groups == channels, channels < _FEW * groups and x.numel() >= _LARGE
        # in channels_last torch adds up gradients one value after the other
        if (one_each or slow or x.dtype not in _WIDE) and recorded(x, weight, bias):
            return None
        if one_each:
            layout, x = memory_format(x), x.contiguous()
    try:
        inner = x.numel() // (samples * channels)
        y, mean, rstd = torch.native_group_norm(
            x, vectors[0], vectors[1], samples, channels, inner, groups, eps
        )
        if not native.is_exact(mean.detach(), rstd.detach()):
            return None
    except (RuntimeError, ZeroDivisionError):
        return None
    return behind(y if layout is None else y.contiguous(memory_format=layout), None, act)


def evaluation(tensors: ChannelTensors, norm: Channels) -> Maybe:
    """By running statistics, which are constants: later training may move them."""
    x, weight, bias, residual, running_mean, running_var, *_ = tensors
    _, eps, act, *_ = norm
    vectors = _in_one(x, weight, bias, running_mean, running_var)
    if vectors is None or not native.dense(x) or not _fuses(tensors, act):
        return None
    weight, bias, mean, var = vectors
    assert mean is not None
    assert var is not None
    if recorded(x, weight, bias, residual):
        if weight is None or not weight.requires_grad:
            return None  # torch would keep x, which only the weight's gradient needs
        if vectors[2] is running_mean:
            mean, var = mean.clone(), var.clone()
    try:
        if not native.is_exact_by_variance(mean, var, eps):
            return None
        y = torch.batch_norm(x, weight, bias, mean, var, False, 0.0, eps, False)
    except RuntimeError:
        return None
    return behind(y, residual, act)


def row_norm(
    x: Tensor, residual: Maybe, weight: Maybe, bias: Maybe, rows: Rows
) -> tuple[Tensor, Tensor] | None:
    """y and x + residual (else x) of a layer norm over the last axes.

    None for an RMS norm: torch's is off by several roundings, and keeps several tensors of the input's size.
    """
    start, stop, eps, rms, offset, cast_before, *_ = rows
    if rms or offset or cast_before or stop != x.dim():
        return None
    vectors = _in_one(x, weight, bias)
    if vectors is None or eps < native.LEAST_EPS or not x.is_contiguous():
        return None
    if x.dtype in _WIDE and any(v is not None and v.dtype is not x.dtype and recorded(v) for v in vectors):
        return None  # torch rounds their gradients to the input's dtype
    total = x if residual is None else x + residual.to(x.dtype)
    try:
        y, mean, rstd = torch.native_layer_norm(total, x.shape[start:], vectors[0], vectors[1], eps)
        return (y, total) if native.is_exact(mean, rstd) else None
    except RuntimeError:
        return None
