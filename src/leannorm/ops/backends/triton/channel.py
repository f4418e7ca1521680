"""The per-channel operators of `schema.py` on a GPU: checks, then launches.

Launches of each call, and the bytes that memory must move, in sizes S of the input:

    forward      one launch, 2 S (a program reads its set twice, the second time from the cache), or
                 three, 3 S and some KB of partial statistics
    backward     one launch, 3 S, or three, 5 S; group and instance norm two more, which add up C sums
    moments      two, 1 S; normalize: one, 2 S; gradient sums: two, 2 S; input gradient: one, 3 S

A residual, its gradient, or an output that tells the derivative add an S each time they pass. Where the
residual's gradient is dy or 0, the first pass backward writes it, and the second reads it in place of dy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leannorm.ops.activation import ACTIVATIONS
from leannorm.ops.backends.triton.activations import MASKS
from leannorm.ops.backends.triton.channel_gradient_kernels import (
    grad_sums_kernel,
    input_grad_kernel,
    merge_sums_kernel,
)
from leannorm.ops.backends.triton.channel_kernels import (
    merge_moments_kernel,
    moments_kernel,
    normalize_kernel,
)
from leannorm.ops.backends.triton.channel_set_kernels import set_backward_kernel, set_forward_kernel
from leannorm.ops.backends.triton.launch import launch, processors
from leannorm.ops.backends.triton.tiling import Plan, merging, planned
from leannorm.ops.plan import statistics_shape


def _plan(x: Tensor, groups: int) -> Plan:
    return planned(tuple(x.shape), groups, x.is_contiguous(), x.element_size(), processors(x.device))


def _groups(mean: Tensor) -> int:
    return mean.shape[1] if mean.dim() == 2 else 0


def _dense(x: Tensor) -> bool:
    return x.is_contiguous() or x.movedim(1, -1).is_contiguous()


def _check(
    act: str, x: Tensor, *others: Tensor | None, weight: Tensor | None = None, bias: Tensor | None = None
) -> None:
    """The kernels see pointers and integers: what they would read wrongly ends here."""
    if act not in ACTIVATIONS:
        raise RuntimeError(f"unknown activation {act}; the kernels have {', '.join(ACTIVATIONS)}")
    if not _dense(x):
        raise RuntimeError(f"x must be contiguous or channels_last, its strides are {x.stride()}")
    for other in others:
        if other is None or (other.stride() == x.stride() and other.dtype == x.dtype):
            continue
        like = other.dtype == x.dtype and other.shape == x.shape
        if not (like and _dense(other) and other.is_contiguous() == x.is_contiguous()):
            raise RuntimeError("dy, residual and out must have the dtype, shape and layout of x")
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and value.numel() != x.shape[1]:
            raise RuntimeError(f"{name} must have one value a channel: {value.numel()} for {x.shape[1]}")


def _statistics(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.float64, device=x.device)


def _zeros(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64, device=x.device)


def _moments(x: Tensor, groups: int, eps: float | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Mean, M2, and rstd where there is an eps."""
    plan = _plan(x, groups)
    geometry, parts = plan.geometry, plan.moments
    merged = merging(geometry, parts)
    mean, m2 = (_statistics(x, statistics_shape(x.shape, groups)) for _ in range(2))
    rstd = None if eps is None else torch.empty_like(mean)
    shape = (geometry.segments, parts.parts, geometry.channels)
    part_mean, part_m2 = (_statistics(x, shape) for _ in range(2))
    double = x.dtype == torch.float64
    arguments = (x, part_mean, part_m2, *geometry.sizes, parts.tiles, parts.parts)
    launch(moments_kernel, plan.programs(parts), x.device, *arguments, **plan.constants, DOUBLE=double)
    launch(
        merge_moments_kernel,
        merged.programs(geometry),
        x.device,
        *(part_mean, part_m2, mean, m2, rstd, *geometry.sizes, parts.tiles, parts.parts, geometry.groups),
        COLUMNS=geometry.columns,
        BE=plan.tiling.block_elements,
        EPS=eps,
        GROUPED=geometry.grouped,
        **merged.constants,
    )
    return mean, m2, rstd


def channel_moments(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    _check("identity", x)
    if x.numel() == 0:
        shape = statistics_shape(x.shape, groups)
        return _zeros(x, shape), _zeros(x, shape)
    mean, m2, _ = _moments(x, groups, None)
    return mean, m2


def channel_normalize(
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    act: str,
) -> Tensor:
    _check(act, x, residual, weight=weight, bias=bias)
    y = torch.empty_like(x)
    if x.numel() == 0:
        return y
    plan = _plan(x, _groups(mean))
    arguments = (
        x,
        residual,
        y,
        mean,
        rstd,
        weight,
        bias,
        *plan.geometry.sizes,
        *plan.mapping,
        plan.geometry.groups,
    )
    double = x.dtype == torch.float64
    launch(
        normalize_kernel,
        plan.programs(plan.mapping),
        x.device,
        *arguments,
        ACT=act,
        **plan.constants,
        DOUBLE=double,
    )
    return y


def channel_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    act: str,
    groups: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(act, x, residual, weight=weight, bias=bias)
    shape = statistics_shape(x.shape, groups)
    if x.numel() == 0:
        rstd = _zeros(x, shape).add_(eps).rsqrt_()
        return torch.empty_like(x), _zeros(x, shape), _zeros(x, shape), rstd
    plan = _plan(x, groups)
    if plan.sets is None:
        mean, m2, of_eps = _moments(x, groups, eps)
        assert of_eps is not None
        return channel_normalize(x, mean, of_eps, weight, bias, residual, act), mean, m2, of_eps
    y = torch.empty_like(x)
    mean, m2, rstd = (_statistics(x, shape) for _ in range(3))
    geometry = plan.geometry
    launch(
        set_forward_kernel,
        plan.set_programs(),
        x.device,
        *(x, residual, y, mean, m2, rstd, weight, bias, *geometry.sizes, geometry.groups),
        ACT=act,
        EPS=eps,
        GROUPED=geometry.grouped,
        **plan.sets.constants,
        DOUBLE=x.dtype == torch.float64,
    )
    return y, mean, m2, rstd


def _needed(
    act: str, bias: Tensor | None, residual: Tensor | None, out: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """bias, residual and out, without what the derivative of `act` is not read from."""
    if act == "identity":
        return None, None, None
    if out is not None and ACTIVATIONS[act].grad_from_output is not None:
        return None, None, out
    return bias, residual, None


def _sums(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
    act: str,
    dz: Tensor | None,
    want_means: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Sums of dz and dz * xhat of every channel of every segment, p and q; writes dz where it is given."""
    plan = _plan(x, _groups(mean))
    geometry, parts = plan.geometry, plan.sums
    merged = merging(geometry, parts)
    bias, residual, out = _needed(act, bias, residual, out)
    part_dz, part_dz_xhat = (
        _statistics(x, (geometry.segments, parts.parts, geometry.channels)) for _ in range(2)
    )
    shape = (geometry.channels,) if mean.dim() == 1 else (geometry.segments, geometry.channels)
    sum_dz, sum_dz_xhat = (_statistics(x, shape) for _ in range(2))
    p, q = (torch.empty_like(mean) if want_means else None for _ in range(2))
    # behind `out` and behind no activation the weight is not needed
    scale = None if act == "identity" or out is not None else weight
    launch(
        grad_sums_kernel,
        plan.programs(parts),
        x.device,
        *(dy, x, residual, out, dz, mean, rstd, scale, bias, part_dz, part_dz_xhat),
        *(*geometry.sizes, parts.tiles, parts.parts, geometry.groups),
        ACT=act,
        **plan.constants,
        DOUBLE=x.dtype == torch.float64,
    )
    launch(
        merge_sums_kernel,
        merged.programs(geometry),
        x.device,
        *(part_dz, part_dz_xhat, weight, sum_dz, sum_dz_xhat, p, q),
        *(*geometry.sizes, parts.parts, geometry.groups),
        GROUPED=geometry.grouped,
        **merged.constants,
    )
    return sum_dz, sum_dz_xhat, p, q


def channel_grad_sums(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
    act: str,
) -> tuple[Tensor, Tensor]:
    _check(act, x, dy, residual, out, weight=weight, bias=bias)
    if x.numel() == 0:
        shape = tuple(x.shape[1:2] if mean.dim() == 1 else x.shape[:2])
        return _zeros(x, shape), _zeros(x, shape)
    sums = _sums(dy, x, mean, rstd, weight, bias, residual, out, act, None, False)
    return sums[0], sums[1]


def _input_grad(
    dy: Tensor,
    x: Tensor,
    dx: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
    p: Tensor | None,
    q: Tensor | None,
    act: str,
    dz: Tensor | None,
) -> None:
    plan = _plan(x, _groups(mean))
    bias, residual, out = _needed(act, bias, residual, out)
    launch(
        input_grad_kernel,
        plan.programs(plan.mapping),
        x.device,
        *(dy, x, residual, out, dx, dz, mean, rstd, weight, bias, p, q),
        *(*plan.geometry.sizes, *plan.mapping, plan.geometry.groups),
        ACT=act,
        **plan.constants,
        DOUBLE=x.dtype == torch.float64,
    )


def channel_input_grad(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
    p: Tensor | None,
    q: Tensor | None,
    act: str,
    want_dz: bool,
) -> tuple[Tensor, Tensor]:
    _check(act, x, dy, residual, out, weight=weight, bias=bias)
    dx = torch.empty_like(x)
    dz = torch.empty_like(x) if want_dz else None
    if x.numel() != 0:
        _input_grad(dy, x, dx, mean, rstd, weight, bias, residual, out, p, q, act, dz)
    return dx, x.new_empty(0) if dz is None else dz


def _backward(
    dy: Tensor,
    x: Tensor,
    dx: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
    act: str,
    groups: int,
    want_dz: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dweight, dbias and dz; writes dx."""
    _check(act, x, dy, residual, out, weight=weight, bias=bias)
    channels = (x.shape[1],)
    dz = torch.empty_like(x) if want_dz else None
    returned_dz = x.new_empty(0) if dz is None else dz
    if x.numel() == 0:
        return _zeros(x, channels), _zeros(x, channels), returned_dz
    plan = _plan(x, groups)
    geometry = plan.geometry
    if plan.sets is None:
        first_writes = want_dz and act in MASKS
        sum_dz, sum_dz_xhat, p, q = _sums(
            dy, x, mean, rstd, weight, bias, residual, out, act, dz if first_writes else None, True
        )
        if first_writes:
            dy, act, dz = returned_dz, "identity", None
        _input_grad(dy, x, dx, mean, rstd, weight, bias, residual, out, p, q, act, dz)
    else:
        sum_dz, sum_dz_xhat = (
            _statistics(x, channels if groups == 0 else (geometry.segments, geometry.channels))
            for _ in range(2)
        )
        bias, residual, out = _needed(act, bias, residual, out)
        launch(
            set_backward_kernel,
            plan.set_programs(),
            x.device,
            *(dy, x, residual, out, dx, dz, mean, rstd, weight, bias, sum_dz, sum_dz_xhat),
            *(*geometry.sizes, geometry.groups),
            ACT=act,
            GROUPED=geometry.grouped,
            **plan.sets.constants,
            DOUBLE=x.dtype == torch.float64,
        )
    if groups == 0:
        return sum_dz_xhat, sum_dz, returned_dz
    return sum_dz_xhat.sum(0), sum_dz.sum(0), returned_dz


def channel_backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
    act: str,
    groups: int,
    want_dz: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx = torch.empty_like(x)
    arguments = (mean, rstd, weight, bias, residual, out, act, groups, want_dz)
    return dx, *_backward(dy, x, dx, *arguments)


def channel_backward_(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
    act: str,
    groups: int,
    want_dz: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return _backward(dy, x, x, mean, rstd, weight, bias, residual, out, act, groups, want_dz)
