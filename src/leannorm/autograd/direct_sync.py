"""The usual call of a batch norm that shares its statistics in one step, as `direct.py` has those of others.

Here a kernel that refuses an argument may come too late: other ranks wait for this one's sums. So whatever
it might refuse is looked at before. Ranks that go this way and ranks that go the whole way send the same.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leannorm.autograd.channel import applied_directly, twice_differentiable
from leannorm.autograd.direct import dispatched
from leannorm.autograd.sync import Sharing, SyncNorm, may_be_repeated
from leannorm.distributed.call import Call
from leannorm.distributed.group import statistics_group
from leannorm.ops.activation import ACTIVATIONS
from leannorm.ops.backends import CPU
from leannorm.ops.backends.compiled import DTYPES, is_dense, like
from leannorm.ops.modes import plain
from leannorm.ops.select import picks_cpu

_MOMENTS, _MOMENTS_OF = dispatched("channel_moments"), dispatched("moments_of")
_SUMS_OF, _MOVE = dispatched("sums_of"), dispatched("move_running_")
_NORMALIZE, _GRAD_SUMS = dispatched("channel_normalize"), dispatched("channel_grad_sums")
_MEANS_OF, _INPUT_GRAD = dispatched("means_of"), dispatched("channel_input_grad")
_DTYPES = frozenset(DTYPES)


class KeptBySyncDirectly(NamedTuple):
    """As `KeptDirectly`, and the number of values that each statistic is of."""

    x: Tensor
    mean: Tensor
    rstd: Tensor
    weight: Tensor | None
    bias: Tensor | None
    size: Tensor


class DirectSyncNorm(torch.autograd.Function):
    """The output of `SyncNorm` without a residual, by the CPU's kernels."""

    Kept = KeptBySyncDirectly

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, how: tuple[Any, ...]
    ) -> Tensor:
        act, running, ctx.sharing = how
        sharing: Sharing = ctx.sharing
        ctx.act, count = act, x.numel() // x.shape[1]
        mean, m2, _ = _MOMENTS(x, 0)
        total = _added_up((_SUMS_OF(mean, m2, count),), count, sharing, "training forward", x)
        mean, m2, rstd, size = _MOMENTS_OF(total, sharing.eps)
        y: Tensor = _NORMALIZE(x, mean, rstd, weight, bias, None, act)
        _MOVE(*running, sharing.momentum, mean, m2, 0, size)
        torch._C._increment_version(running[:2] if running[2] is None else running)
        ctx.save_for_backward(x, mean, rstd, weight, None if act == "identity" else bias, size)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, weight, bias, size = ctx.saved_tensors
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        if twice_differentiable():
            return _backward_twice(ctx, dy)
        act, dx = ctx.act, None
        if not (dy.is_contiguous() and x.is_contiguous()):
            dy = like(x, dy)
        given = dy, x, mean, rstd, weight, bias, None, None
        sums = dbias, dweight = _GRAD_SUMS(*given, act)
        if need_x:
            p, q = _MEANS_OF(_added_up(sums, 0, ctx.sharing, "backward", x), weight, size)
            dx, _ = _INPUT_GRAD(*given, p, q, act, False)
        return dx, dweight if need_weight else None, dbias if need_bias else None, None


def _added_up(sums: tuple[Tensor, ...], count: int, sharing: Sharing, what: str, x: Tensor) -> Tensor:
    group, layer, timeout, debug, _, _, eps, momentum, tracks = sharing
    call = Call(layer, what, x.shape[1], timeout, debug, eps, momentum, tracks)
    return statistics_group(group, call).all_reduce(sums, count, call)


def _backward_twice(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """A backward pass that is recorded, by the function that this one stands in for."""
    x, mean, rstd, weight, bias, size = ctx.saved_tensors
    dtypes = [None if v is None else v.dtype for v in (x, weight, weight, None)]
    whole = SimpleNamespace(
        saved_tensors=(x, mean, rstd, weight, bias, None, None, size),
        needs_input_grad=(*ctx.needs_input_grad[:3], False),
        sharing=ctx.sharing,
        backend=CPU,
        act=ctx.act,
        eps=ctx.sharing.eps,
        dtypes=dtypes,
    )
    return (*SyncNorm.backward(whole, dy)[:3], None)


_norm = applied_directly(DirectSyncNorm)


def _of_channels(vector: Tensor, channels: int) -> bool:
    return (
        vector.is_cpu
        and vector.dtype in _DTYPES
        and vector.layout is torch.strided
        and vector.shape == (channels,)
        and vector.is_contiguous()
    )


def direct_sync_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, act: str, running: Any, sharing: Sharing
) -> Tensor | None:
    """The output of `sync_norm`, if this call is a usual one that no checkpoint repeats.

    Moves the `running` statistics too: mean, variance, counter or None. The caller has checked `eps`, the
    momentum and that x has channels.
    """
    if not (plain() and picks_cpu() and x.is_cpu and x.dtype in _DTYPES and is_dense(x)):
        return None
    channels, (mean, var, num_batches) = x.shape[1], running
    if channels == 0 or act not in ACTIVATIONS or may_be_repeated():
        return None
    if weight is None or bias is None:
        if weight is not bias:
            return None
    elif not (weight.dtype is bias.dtype and _of_channels(weight, channels) and _of_channels(bias, channels)):
        return None
    if not (_of_channels(mean, channels) and _of_channels(var, channels)):
        return None
    if mean.requires_grad or var.requires_grad:
        return None
    if any(v is not None and v.is_inference() for v in (x, weight, bias, mean, var)):
        return None
    if num_batches is not None and not (
        num_batches.is_cpu and num_batches.dtype is torch.int64 and num_batches.numel() == 1
    ):
        return None
    y: Tensor = _norm(x, weight, bias, (act, running, sharing))
    return y
