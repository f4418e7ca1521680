"""Torch's own functions instead of ours, for exported graphs (`ops.modes.exporting`).

What runs such a graph (ONNX Runtime, AOTInductor, a process without leannorm) knows torch's norms and not
ours. So a call that uses no statistics of a training batch is written as torch's norm, then the addition,
then the activation. A call that does is written as one operator of ours (`door.py`), which has a gradient and
updates the running statistics.

Torch's functions check what they are given. No size is read here: a tracer would warn.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leannorm._types import Channels, ChannelTensors, Rows, RowTensors
from leannorm.functional.valid import UNMASKED, Masking, exported_positions
from leannorm.ops.activation import ACTIVATIONS
from leannorm.ops.backends import REFERENCE
from leannorm.ops.backends.reference_rows import rounded_then_weighted, shifted_weight, spread
from leannorm.ops.layout import memory_format
from leannorm.ops.modes import traced
from leannorm.ops.precision import compute_dtype

_CONVOLUTIONS = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}


def batch_norm(tensors: ChannelTensors, norm: Channels) -> Tensor:
    """Normalize by the running statistics, or by the input's own if there are none, as a layer without them
    does.

    None of torch's norms has eps outside of the root: then it is a difference, a product and a sum.
    """
    x, weight, bias, residual, mean, var, *_ = tensors
    wide, mean, var, weight, bias = _of_one_dtype(x, mean, var, weight, bias)
    if norm.outside:
        if var is None:
            var, mean = torch.var_mean(wide, (0, *range(2, x.dim())))
        scale, positions = (var.sqrt() + norm.eps).reciprocal(), (1,) * (x.dim() - 2)
        scale = scale if weight is None else scale * weight
        y = (wide - mean.view(-1, *positions)) * scale.view(-1, *positions)
        return _finished(y if bias is None else y + bias.view(-1, *positions), x, residual, norm.act)
    y = F.batch_norm(wide, mean, var, weight, bias, mean is None, norm.momentum or 0.0, norm.eps)
    return _finished(y, x, residual, norm.act)


def convolve(x: Tensor, *arguments: Any) -> Tensor:
    """The convolution whose name has the input's rank, which readers of graphs look for."""
    y: Tensor = _CONVOLUTIONS[x.dim()](x, *arguments)
    return y


def group_norm(tensors: ChannelTensors, norm: Channels, masking: Masking = UNMASKED) -> Tensor:
    """By the statistics of each group of channels of each sample, of its valid positions: then a formula, as
    torch has no such norm."""
    (x, weight, bias, *_), (groups, eps, act, *_), (mask, lengths, _) = tensors, norm, masking
    if mask is None and lengths is None:
        wide, weight, bias = _of_one_dtype(x, weight, bias)
        return _finished(F.group_norm(wide, groups, weight, bias, eps), x, None, act)
    padding = ~exported_positions(x, mask, lengths)

    def of_groups(v: Tensor) -> Tensor:
        apart: Tensor = v.unflatten(1, (groups, -1))
        return apart.flatten(2)

    wide = x.to(compute_dtype(x))
    count = of_groups((~padding).expand_as(x).to(wide.dtype)).sum(2, keepdim=True).clamp_min(1)
    seen = of_groups(wide.masked_fill(padding, 0))
    mean = seen.sum(2, keepdim=True) / count
    outside = of_groups(padding.expand_as(x))
    var = (seen - mean).masked_fill(outside, 0).square().sum(2, keepdim=True) / count
    y = ((of_groups(wide) - mean) * torch.rsqrt(var + eps)).reshape(x.shape)
    along = (-1, *(1,) * (x.dim() - 2))
    y = y if weight is None else y * weight.to(y.dtype).view(along)
    y = y if bias is None else y + bias.to(y.dtype).view(along)
    result: Tensor = _finished(y, x, None, act)
    return result.masked_fill(padding, 0) if norm.zero else result


def instance_norm(tensors: ChannelTensors, norm: Channels) -> Tensor:
    """By the statistics of each channel of each sample, or by the running ones; nothing moves."""
    x, weight, bias, residual, mean, var, *_ = tensors
    wide, mean, var, weight, bias = _of_one_dtype(x, mean, var, weight, bias)
    y = F.instance_norm(wide, mean, var, weight, bias, norm.by_batch, norm.momentum or 0.0, norm.eps)
    return _finished(y, x, residual, norm.act)


def row_norm(
    tensors: RowTensors, shape: tuple[int, ...], rows: Rows, masking: Masking = UNMASKED
) -> tuple[Tensor, Tensor]:
    """y and input + residual; a single axis that is not the last is moved there and back."""
    if rows.act is not None:
        return _gated(tensors, shape, rows), tensors.x
    if tensors.scale is not None:
        return _with_scale(tensors, shape, rows)
    input, residual, *_, weight, bias = tensors
    start, stop, eps, rms, offset, cast_before, *_ = rows
    mask, lengths, _ = masking
    x = input if residual is None else (input + residual).to(input.dtype)
    if mask is not None or lengths is not None:
        padding = ~exported_positions(x, mask, lengths, (start, stop))
        valid = RowTensors(x.masked_fill(padding, 0), weight=weight, bias=bias)
        y, x = row_norm(valid, shape, rows)
        return y.masked_fill(padding, 0), x if residual is not None else input
    last = x.dim() - 1
    moved = x if stop > last else x.permute(*(i for i in range(last + 1) if i != start), start)
    if cast_before:
        xhat = _finished(_rms_norm(moved, shape, None, eps), x)
        y = rounded_then_weighted(xhat, weight, offset, xhat.dim() - len(shape), xhat.dim())
    elif rms:
        if weight is not None and offset:
            weight = shifted_weight(weight, offset, compute_dtype(x))
        wide, weight = _of_one_dtype(moved, weight)
        y = _finished(_rms_norm(wide, shape, weight, eps), x)
    else:
        wide, weight, bias = _of_one_dtype(moved, weight, bias)
        y = _finished(F.layer_norm(wide, shape, weight, bias, eps), x)
    if stop <= last:
        y = y.permute(*range(start), last, *range(start, last))
        layout = memory_format(x)  # the operations that follow may rely on it
        y = y if y.is_contiguous(memory_format=layout) else y.contiguous(memory_format=layout)
    return y, x


def _with_scale(tensors: RowTensors, shape: tuple[int, ...], rows: Rows) -> tuple[Tensor, Tensor]:
    """y and the sum: one of torch's norms, then a product and a sum."""
    x, residual, gate, scale, shift, weight, bias = tensors
    assert scale is not None
    dtype, start = compute_dtype(x), rows.start
    x = x if residual is None else REFERENCE.add_residual(x, residual, gate, start)
    y, _ = row_norm(RowTensors(x.to(dtype), weight=weight, bias=bias), shape, rows)
    y = y * (1 + spread(scale, x, start).to(dtype))
    y = y if shift is None else y + spread(shift, x, start).to(dtype)
    return _finished(y, x), x


def _gated(tensors: RowTensors, shape: tuple[int, ...], rows: Rows) -> Tensor:
    """A norm of torch's and a product, in the one order or in the other."""
    x, _, gate, _, _, weight, _ = tensors
    assert gate is not None
    dtype = compute_dtype(x)
    opened = ACTIVATIONS[str(rows.act)].forward(gate.to(dtype))
    value = x.to(dtype) if rows.norm_before_gate else x.to(dtype) * opened
    wide = None if weight is None else weight.to(dtype)
    y = _rms_norm(value, shape, None if rows.cast_before else wide, rows.eps)
    if rows.cast_before:
        y = rounded_then_weighted(y.to(x.dtype), weight, 0.0, rows.start, rows.stop)
    if rows.norm_before_gate:
        return _finished(y * opened, x)
    return y if rows.cast_before else _finished(y, x)


def _rms_norm(x: Tensor, shape: tuple[int, ...], weight: Tensor | None, eps: float) -> Tensor:
    """torch's function; its formula for TorchScript's ONNX exporter, which knows no RMS norm."""
    if traced() or not torch.onnx.is_in_onnx_export():
        return F.rms_norm(x, shape, weight, eps)
    wide = x.to(compute_dtype(x))
    y = wide * torch.rsqrt((wide * wide).mean(tuple(range(-len(shape), 0)), keepdim=True) + eps)
    return (y if weight is None else y * weight.to(wide.dtype)).to(x.dtype)


def _of_one_dtype(x: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """The tensors as they are if they have one dtype, otherwise in the dtype that our kernels compute in."""
    if all(v is None or v.dtype == x.dtype for v in others):
        return (x, *others)
    dtype = compute_dtype(x)
    return (x.to(dtype), *(None if v is None else v.to(dtype) for v in others))


def _finished(y: Tensor, x: Tensor, residual: Tensor | None = None, act: str = "identity") -> Tensor:
    """Adds, activates, and casts to the dtype of x, which autocast may have changed."""
    y = y if residual is None else y + residual
    y = ACTIVATIONS[act].forward(y)
    return y if y.dtype == x.dtype else y.to(x.dtype)
