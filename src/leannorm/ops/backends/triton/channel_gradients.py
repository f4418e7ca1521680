"""The per-channel operators of the backward pass on a GPU; their launches and bytes are listed in
`channel.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from leannorm._types import Channels, KeptByChannelNorm, Maybe
from leannorm.ops.activation import ACTIVATIONS
from leannorm.ops.backends.triton.activations import MASKS
from leannorm.ops.backends.triton.channel import (
    check_kept,
    groups_of,
    launch_mapping,
    new_statistics,
    plan_of,
    zeros,
)
from leannorm.ops.backends.triton.channel_gradient_kernels import (
    grad_sums_kernel,
    input_grad_kernel,
    merge_sums_kernel,
)
from leannorm.ops.backends.triton.channel_set_kernels import set_backward_kernel
from leannorm.ops.backends.triton.launch import launch
from leannorm.ops.backends.triton.shares import Shares
from leannorm.ops.backends.triton.tape import empty, empty_like, taped
from leannorm.ops.backends.triton.tiling import PRESSED_REGISTERS, SET_REGISTERS, merging
from leannorm.ops.precision import gradient_dtype, statistics_dtype


def _takes_most(act: str, x: Tensor) -> bool:
    """Whether the activation's slope may need more registers than everything else. In float64 any but relu's
    may."""
    return x.dtype == torch.float64 and act not in ("identity", "relu")


def _needed(kept: KeptByChannelNorm) -> tuple[Maybe, Maybe, Maybe]:
    """bias, residual and output, with None for those that the derivative of the activation does not need."""
    act = kept.norm.act
    if act == "identity":
        return None, None, None
    if kept.output is not None and ACTIVATIONS[act].from_output is not None:
        return None, None, kept.output
    return kept.bias, kept.residual, None


def _sums(
    dy: Tensor, kept: KeptByChannelNorm, dz: Maybe, into: tuple[Tensor, Tensor], want_means: bool
) -> tuple[Maybe, Maybe]:
    """The means; writes the sums of dz and dz * xhat of every channel and segment, and dz if given."""
    x, mean, rstd, weight, *_, out, mask, count, (_, _, act, *_) = kept
    plan = plan_of(x, groups_of(x, mean))
    geometry, parts = plan.geometry, plan.sums
    merged = merging(geometry, parts)
    bias, residual, out = _needed(kept)
    shape = geometry.segments, parts.parts, geometry.channels
    part_dz, part_dz_xhat = (new_statistics(x, shape) for _ in range(2))
    means = [empty_like(mean) if want_means else None for _ in range(2)]
    # dz does not depend on the weight without an activation, nor if the derivative comes from `out`
    scale = None if act == "identity" or out is not None else weight
    # groups make many programs anyway
    free = geometry.grouped or _takes_most(act, x)
    launch(
        grad_sums_kernel,
        plan.programs(parts),
        x.device,
        *(dy, x, residual, out, dz, mask, mean, rstd, scale, bias, part_dz, part_dz_xhat),
        *(*geometry.sizes, parts.tiles, parts.parts, geometry.groups),
        ACT=act,
        registers=None if free else plan.choice.registers(plan.choice.sums),
        TILE=plan.tiling,
        warps=plan.tiling.warps,
        STAGES=plan.choice.sums_stages,
    )
    launch(
        merge_sums_kernel,
        merged.programs(geometry),
        x.device,
        *(part_dz, part_dz_xhat, count, weight, *into, *means),
        *(*geometry.sizes, parts.parts, geometry.groups),
        GROUPED=geometry.grouped,
        **merged.constants,
    )
    return means[0], means[1]


@taped
def channel_grad_sums(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Maybe, bias: Maybe, residual: Maybe,
    out: Maybe, act: str, mask: Maybe = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    kept = KeptByChannelNorm(x, mean, rstd, weight, bias, residual, out, mask, None, Channels(act=act))
    check_kept(kept, dy, out)
    shape = (*mean.shape[:-1], x.shape[1])
    if x.numel() == 0:
        return zeros(x, shape), zeros(x, shape)
    both = new_statistics(x, shape), new_statistics(x, shape)
    _sums(dy, kept, None, both, False)
    return both


def _input_grad(
    dy: Tensor, kept: KeptByChannelNorm, means: tuple[Maybe, Maybe], dx: Tensor, dz: Maybe
) -> None:
    x, mean, rstd, weight, *_, mask, _, (_, _, act, *_) = kept
    bias, residual, out = _needed(kept)
    tensors = dy, x, residual, out, dx, dz, mask, mean, rstd, weight, bias, *means
    launch_mapping(input_grad_kernel, x, mean, act, *tensors)


@taped
def channel_input_grad(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Maybe, bias: Maybe, residual: Maybe,
    out: Maybe, mean_dz: Maybe, mean_dz_xhat: Maybe, act: str, want_dz: bool, mask: Maybe = None,
) -> tuple[Tensor, Maybe]:  # fmt: skip
    kept = KeptByChannelNorm(x, mean, rstd, weight, bias, residual, out, mask, None, Channels(act=act))
    check_kept(kept, dy, out)
    dx = empty_like(x)
    dz = empty_like(x) if want_dz else None
    if x.numel() != 0:
        _input_grad(dy, kept, (mean_dz, mean_dz_xhat), dx, dz)
    return dx, dz


def _backward(dy: Tensor, kept: KeptByChannelNorm, dx: Tensor, want_dz: bool) -> tuple[Tensor, Tensor, Maybe]:
    """dweight, dbias and dz; writes dx.

    With constant statistics in several launches, of which the first sums as `channel_grad_sums` does.
    """
    x, mean, rstd, weight, *_, mask, count, norm = kept
    groups, _, act, by_batch, *_ = norm
    check_kept(kept, dy, kept.output)
    channels = (x.shape[1],)
    dz = empty_like(x) if want_dz else None
    returned_dz = dz
    dtype = gradient_dtype(x, weight)
    if x.numel() == 0:
        dweight, dbias = (torch.zeros(channels, dtype=dtype, device=x.device) for _ in range(2))
        return dweight, dbias, returned_dz
    plan = plan_of(x, groups, True)
    geometry = plan.geometry
    dweight, dbias = (empty(channels, dtype, x.device) for _ in range(2))
    shares = Shares(dweight, dbias, geometry.segments, geometry.channels, statistics_dtype(x))
    assert shares.dweight is not None
    assert shares.dbias is not None
    both = shares.dbias, shares.dweight
    if plan.sets is None or not by_batch:
        first_writes = want_dz and act in MASKS
        means = _sums(dy, kept, dz if first_writes else None, both, by_batch)
        if first_writes and dz is not None:
            dy, kept, dz = dz, kept._replace(norm=norm._replace(act="identity")), None
        _input_grad(dy, kept, means, dx, dz)
    else:
        programs, constants = plan.of_sets()
        bias, residual, out = _needed(kept)
        more = residual is not None or out is not None
        pressed = plan.sets.alone or mask is not None or _takes_most(act, x)
        pressed = pressed or (more if geometry.grouped else plan.sets.vector == 1)
        launch(
            set_backward_kernel,
            programs,
            x.device,
            *(dy, x, residual, out, dx, dz, mask, mean, rstd, count, weight, bias, *both),
            *(*geometry.sizes, geometry.groups),
            ACT=act,
            registers=PRESSED_REGISTERS if pressed else SET_REGISTERS,
            **constants,
        )
    shares.add_up()
    return dweight, dbias, returned_dz


@taped
def channel_backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Maybe, bias: Maybe, residual: Maybe,
    out: Maybe, act: str, groups: int, want_dz: bool, constant: bool = False, mask: Maybe = None,
    count: Maybe = None,
) -> tuple[Tensor, Tensor, Tensor, Maybe]:  # fmt: skip
    dx = empty_like(x)
    norm = Channels(groups, act=act, by_batch=not constant)
    kept = KeptByChannelNorm(x, mean, rstd, weight, bias, residual, out, mask, count, norm)
    return dx, *_backward(dy, kept, dx, want_dz)


@taped
def channel_backward_(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Maybe, bias: Maybe, residual: Maybe,
    out: Maybe, act: str, groups: int, want_dz: bool,
) -> tuple[Tensor, Tensor, Maybe]:  # fmt: skip
    kept = KeptByChannelNorm(x, mean, rstd, weight, bias, residual, out, norm=Channels(groups, act=act))
    return _backward(dy, kept, x, want_dz)
