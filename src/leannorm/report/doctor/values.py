"""How many values are behind one statistic, and what a pass does if there is only one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from leannorm._catalog import Norm
from leannorm.distributed.membership import ranks_of, sharing_group
from leannorm.functional.valid import valid_positions
from leannorm.nn.conv import _ConvBatchNorm


def watched(norm: Norm) -> list[Module]:
    """The modules whose calls are the norm's: itself, or layers that compute it with their convolution."""
    return [parent for parent, _, _ in norm.parents if isinstance(parent, _ConvBatchNorm)] or [norm.module]


def input_of(module: Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The tensor that a call of one of those modules normalizes; None if it is not a floating-point
    tensor."""
    x = args[0] if args else next(iter(kwargs.values()), None)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return None
    return module.conv(x) if isinstance(module, _ConvBatchNorm) else x


def data_in(norm: Norm, x: Tensor, kwargs: Mapping[str, Any]) -> Tensor | None:
    """The data: with a mask the valid positions, as samples; None if these are not examined."""
    if x.is_nested:
        return None
    mask, lengths = kwargs.get("mask"), kwargs.get("lengths")
    if mask is None and lengths is None:
        return x.detach()
    if norm.kind not in ("batch", "frozen"):
        return None
    valid = valid_positions(x, mask, lengths)
    data = x if valid is None else x.movedim(1, -1).reshape(*valid.mask.shape, -1)[valid.mask]
    return data.detach()


def values_behind(norm: Norm, x: Tensor) -> int | None:
    """How many values are behind one statistic of this call."""
    if norm.kind in ("layer", "rms"):
        shape = getattr(norm.module, "normalized_shape", None)
        return prod(shape) if isinstance(shape, (tuple, list, torch.Size)) else None
    channels = norm.channels
    if norm.kind == "group":
        return int(x.numel() // x.shape[0] // getattr(norm.module, "num_groups", 1)) if len(x) else 0
    if not channels or x.dim() < 2 or not len(x):
        return None
    each = x[0].numel() // channels
    if norm.kind == "instance":
        return each
    return each * samples_behind(norm, x)


def samples_behind(norm: Norm, x: Tensor) -> int:
    """The number of samples behind a statistic of a batch norm in this call."""
    ghost = getattr(norm.module, "group_size", None)
    samples = len(x) if not x.is_nested else x.size(0)
    return min(samples, ghost if isinstance(ghost, int) else samples) * _ranks(norm.module)


def _ranks(module: Module) -> int:
    if not hasattr(module, "process_group") or not (dist.is_available() and dist.is_initialized()):
        return 1
    group = sharing_group(module.process_group)  # type: ignore[arg-type]
    return 1 if group is None else len(ranks_of(group))


@contextmanager
def one_value_passes(norms: Sequence[Norm]) -> Iterator[set[str]]:
    """Within it a pass continues if a norm would reject a single value per channel; yields the names of such
    norms.

    Such a norm gets the value twice, and normalizes it to 0, as its formula says.
    """
    alone: set[str] = set()
    changed: list[tuple[Module, Any]] = []
    try:
        for norm in norms:
            for module in watched(norm):
                if norm.kind in _REPEATED and not isinstance(module, torch.jit.ScriptModule):
                    changed.append((module, vars(module).get("forward")))
                    vars(module)["forward"] = partial(_forward, norm, module, module.forward, alone)
        yield alone
    finally:
        for module, before in reversed(changed):
            if before is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = before


_REPEATED = {"batch": 0, "group": 0, "instance": -1}  # the axis along which the values of a statistic lie


def _forward(
    norm: Norm, module: Module, forward: Callable[..., Any], alone: set[str], *args: Any, **kwargs: Any
) -> Any:
    try:
        return forward(*args, **kwargs)
    except ValueError:
        read = input_of(module, args, kwargs)
        data = None if read is None else data_in(norm, read, kwargs)
        if data is None or values_behind(norm, data) != 1:
            raise
        alone.add(norm.name)
        return _of_two(module, forward, _REPEATED[norm.kind], args, kwargs)


def _of_two(
    module: Module, forward: Callable[..., Any], axis: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """The call with each value twice along the axis; returns every second value of the result."""
    x, *rest = args or (kwargs.pop(next(iter(kwargs))),)
    valid = valid_positions(x, kwargs.pop("mask", None), kwargs.pop("lengths", None))
    if valid is not None:
        kwargs["mask"] = _twice(valid.mask.reshape(x.shape[:1] + x.shape[2:]), axis)
    ghost = vars(module).get("group_size")
    if ghost is not None:
        vars(module)["group_size"] = 2 * ghost
    try:
        y: Tensor = forward(_twice(x, axis), *rest, **kwargs)
    finally:
        if ghost is not None:
            vars(module)["group_size"] = ghost
    pairs: Tensor = y.unflatten(axis, (-1, 2))
    return pairs.select(axis if axis < 0 else axis + 1, 0)


def _twice(value: Tensor, axis: int) -> Tensor:
    return value.repeat_interleave(2, axis)
