"""Memory layouts of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from leannorm.ops.plan import Plan, row_plan


def memory_format(x: Tensor) -> torch.memory_format:
    """channels_last(_3d) if x has that layout, otherwise contiguous."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if last is None or x.is_contiguous() or not x.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def laid_out_for(x: Tensor, dy: Tensor) -> Tensor:
    """dy in the layout of a channels_last x; unchanged for any other x."""
    layout = memory_format(x)
    return dy if layout == torch.contiguous_format else dy.contiguous(memory_format=layout)


def in_blocks(x: Tensor, size: int) -> Tensor:
    """(N, C, *) as (N / size, C, size, *): the values of a channel in every `size` samples."""
    blocks: Tensor = x.unflatten(0, (x.shape[0] // size, size)).movedim(2, 1)
    return blocks


def out_of_blocks(y: Tensor, like: Tensor) -> Tensor:
    """Undoes `in_blocks`, in the layout of the original tensor."""
    y, layout = y.movedim(2, 1).flatten(0, 1), memory_format(like)
    # as `precision.in_dtype`: a tensor that an autograd function returns is made only once
    return y if y.is_contiguous(memory_format=layout) else y.contiguous(memory_format=layout)


def dense_rows(x: Tensor, start: int, stop: int) -> Plan | None:
    """(outer, kept, inner) of the rows over the axes start..stop-1, in the order of memory.

    None if x is not dense, or if memory has the normalized axes, or the others, in another order than the
    shape: then three integers do not determine the address of a row's values and of its statistics.
    """
    if x.is_contiguous():
        return row_plan(x.shape, start, stop)
    size, stride = x.shape, x.stride()
    axes = sorted((d for d in range(x.dim()) if size[d] != 1), key=lambda d: -stride[d])
    expected, outer, kept, inner = x.numel(), 1, 1, 1
    last = {True: -1, False: -1}  # the last axis seen of the normalized ones, and of the others
    for d in axes:
        expected //= size[d]
        normalized = start <= d < stop
        inner_seen = last[True] >= 0 and inner > 1  # an axis inside of the normalized ones
        if stride[d] != expected or d < last[normalized] or (normalized and inner_seen):
            return None
        last[normalized] = d
        if normalized:
            kept *= size[d]
        elif last[True] >= 0:
            inner *= size[d]
        else:
            outer *= size[d]
    return Plan(outer, kept, inner)
