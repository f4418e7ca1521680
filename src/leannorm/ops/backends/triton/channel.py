"""The per-channel operators of `schema.py` on a GPU: checks, then launches.

Launches of each call, and the bytes that memory must move, in sizes S of the input:

    forward      one launch, 2 S (a program reads all values of its statistics twice, the second time from
                 the cache), or three, 3 S and some KB of partial statistics (`tiling.py`: where which)
    backward     one launch, 3 S, or three, 5 S; for several samples one more, which adds up their C sums
    moments      two, 1 S; normalize: one, 2 S; gradient sums: two, 2 S; input gradient: one, 3 S

A mask is read by the kernels like the input, one byte per position for each block of channels. Elements that
are not data are masked off in each load, so their values do not matter, and results there are written once,
as 0.

A residual, its gradient dz, and an output from which the derivative is computed add an S each time they are
read or written. If dz is dy or 0 (`MASKS`), the first pass of the backward writes it, and the second reads it
instead of dy.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from leannorm._types import Channels, ChannelTensors, KeptByChannelNorm, Maybe, kept_of
from leannorm.ops.backends.compiled import is_dense
from leannorm.ops.backends.reference import Forward
from leannorm.ops.backends.triton.activations import check_activation
from leannorm.ops.backends.triton.channel_kernels import (
    merge_moments_kernel,
    moments_kernel,
    normalize_kernel,
)
from leannorm.ops.backends.triton.channel_set_kernels import set_forward_kernel
from leannorm.ops.backends.triton.launch import cache_bytes, launch, processors
from leannorm.ops.backends.triton.statistics import move_running_
from leannorm.ops.backends.triton.tape import empty, empty_like, taped
from leannorm.ops.backends.triton.tiling import (
    PRESSED_REGISTERS,
    SET_REGISTERS,
    Launches,
    Tiling,
    merging,
    planned,
)
from leannorm.ops.backends.triton.tuned import choice_for
from leannorm.ops.plan import channel_plan, statistics_shape


def plan_of(x: Tensor, groups: int, pressed: bool = False) -> Launches:
    """`pressed`: programs that read a whole set need many registers, as in the backward pass."""
    of_device = processors(x.device), choice_for(x.device), cache_bytes(x.device)
    of_x = tuple(x.shape), groups, x.is_contiguous(), x.element_size()
    return planned(*of_x, *of_device, pressed)


def groups_of(x: Tensor, mean: Tensor) -> int:
    """The `groups` that x was given with, by the shape of its statistics."""
    if mean.dim() == 1:
        return 0
    same = mean.shape[0] == x.shape[0]  # every sample has its own
    return mean.shape[1] if same else -(x.shape[0] // mean.shape[0])


def check(tensors: ChannelTensors, norm: Channels, *others: Maybe) -> None:
    """Raise for arguments that the kernels, which see pointers and integers, would read wrongly; `others`
    must be like x."""
    x, weight, bias, residual, *_, mask = tensors
    check_activation(norm.act)
    if not is_dense(x):
        raise RuntimeError(f"x must be contiguous or channels_last, its strides are {x.stride()}")
    for other in (residual, *others):
        if other is None or (other.stride() == x.stride() and other.dtype == x.dtype):
            continue
        like = other.dtype == x.dtype and other.shape == x.shape
        if not (like and is_dense(other) and other.is_contiguous() == x.is_contiguous()):
            raise RuntimeError("dy, residual and out must have the dtype, shape and layout of x")
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and value.numel() != x.shape[1]:
            raise RuntimeError(f"{name} must have one value a channel: {value.numel()} for {x.shape[1]}")
    if mask is None:
        return
    if norm.groups < 0:
        raise RuntimeError("a mask cannot be combined with groups of samples")
    shape = (x.shape[0], prod(x.shape[2:]))
    if mask.dtype != torch.bool or mask.shape != shape or not mask.is_contiguous():
        raise RuntimeError(f"mask must be bool, contiguous and of shape {shape}, got {tuple(mask.shape)}")


def check_kept(kept: KeptByChannelNorm, *others: Maybe) -> None:
    """`check` of what a norm keeps."""
    x, _, _, weight, bias, residual, _, mask, _, norm = kept
    check(ChannelTensors(x, weight, bias, residual, mask=mask), norm, *others)


def _new_count(x: Tensor, mask: Maybe, groups: int) -> Maybe:
    """A tensor for the number of valid values per statistic, of all samples or of each. The kernels write
    it."""
    if mask is None:
        return None
    shape = (x.shape[0], 1) if groups else ()
    return zeros(x, shape) if x.numel() == 0 else empty(shape, torch.float64, x.device)


def new_statistics(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return empty(shape, torch.float64, x.device)


def zeros(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64, device=x.device)


def _moments(
    x: Tensor, groups: int, eps: float | None, mask: Maybe, count: Maybe
) -> tuple[Tensor, Tensor, Maybe]:
    """Mean, M2, and rstd if there is an eps, of the valid values, whose number is written to `count`."""
    plan = plan_of(x, groups)
    geometry, parts = plan.geometry, plan.moments
    merged = merging(geometry, parts)
    mean, m2 = (new_statistics(x, statistics_shape(x.shape, groups)) for _ in range(2))
    rstd = None if eps is None else empty_like(mean)
    shape = (geometry.segments, parts.parts, geometry.channels)
    part_mean, part_m2 = (new_statistics(x, shape) for _ in range(2))
    part_count = None if mask is None else new_statistics(x, shape[:2])
    arguments = (x, mask, part_mean, part_m2, part_count, *geometry.sizes, parts.tiles, parts.parts)
    launch(
        moments_kernel,
        plan.programs(parts),
        x.device,
        *arguments,
        registers=plan.choice.registers(plan.choice.moments),
        TILE=plan.tiling,
        warps=plan.tiling.warps,
        STAGES=plan.choice.moments_stages,
    )
    launch(
        merge_moments_kernel,
        merged.programs(geometry),
        x.device,
        *(part_mean, part_m2, part_count, mean, m2, rstd, count),
        *(*geometry.sizes, parts.tiles, parts.parts, geometry.groups),
        TILE=Tiling(geometry.columns, 1, False, 1, plan.tiling.elements, 8),  # nothing else is compiled for
        EPS=eps,
        GROUPED=geometry.grouped,
        **merged.constants,
    )
    return mean, m2, rstd


@taped
def channel_moments(x: Tensor, groups: int, mask: Maybe = None) -> tuple[Tensor, Tensor, Maybe]:
    check(ChannelTensors(x, mask=mask), Channels(groups))
    count = _new_count(x, mask, groups)
    if x.numel() == 0:
        shape = statistics_shape(x.shape, groups)
        return zeros(x, shape), zeros(x, shape), count
    mean, m2, _ = _moments(x, groups, None, mask, count)
    return mean, m2, count


def launch_mapping(
    kernel: object, x: Tensor, mean: Tensor, act: str, *arguments: Any, **constants: Any
) -> None:
    """Run a kernel that goes through x once, with the statistics that `mean` belongs to."""
    plan = plan_of(x, groups_of(x, mean))
    launch(
        kernel,
        plan.programs(plan.mapping),
        x.device,
        *arguments,
        *(*plan.geometry.sizes, *plan.mapping, plan.geometry.groups),
        ACT=act,
        TILE=plan.tiling,
        warps=plan.tiling.warps,
        STAGES=plan.choice.mapping_stages,
        **constants,
    )


def _normalized(kept: KeptByChannelNorm, eps: float | None = None) -> Tensor:
    """With an eps, the variance takes the place of rstd."""
    x, mean, spread, weight, bias, residual, _, mask, _, norm = kept
    check_kept(kept)
    y = empty_like(x)
    if x.numel() == 0:
        return y
    tensors = x, residual, y, mask, mean, spread, weight, bias
    launch_mapping(normalize_kernel, x, mean, norm.act, *tensors, EPS=eps)
    return y


@taped
def channel_normalize(
    x: Tensor, mean: Tensor, rstd: Tensor, weight: Maybe, bias: Maybe, residual: Maybe, act: str,
    mask: Maybe = None,
) -> Tensor:  # fmt: skip
    tensors = ChannelTensors(x, weight, bias, residual, mask=mask)
    return _normalized(kept_of(tensors, mean, rstd, Channels(act=act)))


@taped
def channel_evaluate(
    x: Tensor, running_mean: Tensor, running_var: Tensor, eps: float, weight: Maybe, bias: Maybe,
    residual: Maybe, act: str,
) -> Tensor:  # fmt: skip
    """`channel_normalize` by running statistics, whose rstd the kernel computes: no operator, one launch."""
    for name, value in (("running_mean", running_mean), ("running_var", running_var)):
        if not value.is_contiguous() or value.numel() != x.shape[1]:
            raise RuntimeError(f"{name} must be contiguous and have one value a channel")
    tensors = ChannelTensors(x, weight, bias, residual)
    return _normalized(kept_of(tensors, running_mean, running_var, Channels(act=act)), float(eps))


def _forward(tensors: ChannelTensors, norm: Channels) -> Forward:
    check(tensors, norm)
    x, weight, bias, residual, *_, mask = tensors
    groups, eps, act, *_ = norm
    shape, count = statistics_shape(x.shape, groups), _new_count(x, mask, groups)
    if x.numel() == 0:
        rstd = zeros(x, shape).add_(eps).rsqrt_()
        return torch.empty_like(x), zeros(x, shape), zeros(x, shape), rstd, count
    plan = plan_of(x, groups, mask is not None)
    if plan.sets is None:
        mean, m2, of_eps = _moments(x, groups, eps, mask, count)
        assert of_eps is not None
        return _normalized(kept_of(tensors, mean, of_eps, norm)), mean, m2, of_eps, count
    y = empty_like(x)
    mean, m2, rstd = (new_statistics(x, shape) for _ in range(3))
    geometry, (programs, constants) = plan.geometry, plan.of_sets()
    limit = SET_REGISTERS if plan.sets.columns or mask is not None else None
    limit = PRESSED_REGISTERS if plan.sets.alone and mask is not None else limit
    launch(
        set_forward_kernel,
        programs,
        x.device,
        *(x, residual, y, mask, mean, m2, rstd, count, weight, bias, *geometry.sizes, geometry.groups),
        ACT=act,
        EPS=eps,
        registers=limit,
        **constants,
    )
    return y, mean, m2, rstd, count


@taped
def channel_forward(
    x: Tensor, weight: Maybe, bias: Maybe, residual: Maybe, eps: float, act: str, groups: int,
    mask: Maybe = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Maybe]:  # fmt: skip
    return _forward(ChannelTensors(x, weight, bias, residual, mask=mask), Channels(groups, eps, act))


@taped
def channel_forward_tracked_(
    x: Tensor, weight: Maybe, bias: Maybe, residual: Maybe, eps: float, act: str,
    running_mean: Tensor, running_var: Tensor, num_batches: Maybe, momentum: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    y, mean, m2, rstd, _ = _forward(ChannelTensors(x, weight, bias, residual), Channels(0, eps, act))
    plan = channel_plan(x.shape)
    move_running_(running_mean, running_var, num_batches, momentum, mean, m2, plan.outer * plan.inner, None)
    return y, mean, m2, rstd
