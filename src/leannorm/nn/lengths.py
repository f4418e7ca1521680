"""The lengths of sequences after a convolution or a pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from leannorm._errors import InputError
from leannorm.nn.conv import _ConvBatchNorm

_TRANSPOSED = torch.nn.modules.conv._ConvTransposeNd
_LAYERS = (
    torch.nn.modules.conv._ConvNd,
    torch.nn.modules.pooling._MaxPoolNd,
    torch.nn.modules.pooling._AvgPoolNd,
    torch.nn.modules.pooling._LPPoolNd,
)


def conv_lengths(lengths: Tensor | Sequence[int], layer: torch.nn.Module) -> Tensor:
    """The lengths of sequences after a convolution or a pooling along their last axis.

        out = floor((length + padding - dilation * (kernel - 1) - 1) / stride) + 1

    `padding` is that of both ends. `layer` is a convolution, transposed convolution, max, average or LP
    pooling of torch of any rank, or a `ConvBatchNorm`; its last size and its `ceil_mode` are used. An empty
    sequence, or one that gives no output, has length 0. For several layers, call it for each in turn. The
    host reads no value.

    Returns: int64, of the shape and on the device of `lengths`.
    Raises: `InputError` if lengths are not integers or the layer is of another kind.
    Source: the shapes in the documentation of `torch.nn.Conv1d`, `MaxPool1d` and `ConvTranspose1d`.

    >>> import torch
    >>> from leannorm import conv_lengths
    >>> conv_lengths([7, 4, 0], torch.nn.Conv1d(1, 1, kernel_size=3, stride=2, padding=1))
    tensor([4, 2, 0])
    """
    lengths = torch.as_tensor(lengths)
    dtype = lengths.dtype
    if lengths.numel() and (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool):
        raise InputError(f"lengths must be integers, got {dtype}; pass lengths.long()")
    lengths = lengths.to(torch.int64)
    conv = layer.conv if isinstance(layer, _ConvBatchNorm) else layer
    if not isinstance(conv, _LAYERS):
        raise InputError(
            f"conv_lengths knows convolutions and poolings of torch.nn, got {type(layer).__name__}; ask it "
            "of each such layer in turn, and leave out those that keep the length"
        )
    kernel, dilation = _last(conv.kernel_size), _last(getattr(conv, "dilation", 1))
    stride = kernel if conv.stride is None else _last(conv.stride)
    reach = dilation * (kernel - 1) + 1  # the input positions that one output reads
    if isinstance(conv, _TRANSPOSED):
        both = 2 * _last(conv.padding)
        behind = (lengths - 1) * stride - both + reach + _last(conv.output_padding)
    else:
        first, both = _padding(conv, reach)
        room = lengths + both - reach
        behind = torch.div(room, stride, rounding_mode="floor") + 1
        if getattr(conv, "ceil_mode", False):
            more = -torch.div(-room, stride, rounding_mode="floor") + 1
            # a last window must begin in the sequence or in the padding before it
            behind = torch.where((more - 1) * stride < lengths + first, more, more - 1)
    return torch.where(lengths > 0, behind, 0).clamp_min(0)


def _last(value: Any) -> int:
    """The value along the last axis, given once for all axes or once per axis."""
    return int(value[-1] if isinstance(value, (tuple, list)) else value)


def _padding(conv: Any, reach: int) -> tuple[int, int]:
    """The padding in front, and at both ends."""
    padding = getattr(conv, "padding", 0)
    if isinstance(padding, str):
        both = reach - 1 if padding == "same" else 0
        return both // 2, both
    return _last(padding), 2 * _last(padding)
