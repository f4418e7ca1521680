"""Per-channel norms where some positions are no data (padding), of one rank or of several.

Saved, in bytes per input element: as `ChannelNorm`, and the mask, one byte a position.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from leannorm._types import Epilogue, KeptByChannelNorm, Moments, Valid
from leannorm.autograd.channel import (
    applied_directly,
    for_both_gradients,
    gradients_in_dtype,
    keep_for_backward,
    kept_by,
    twice_differentiable,
)
from leannorm.autograd.sync import AddUp, Sharing, repeatable, shared
from leannorm.distributed.call import Call
from leannorm.distributed.collective import add_up
from leannorm.ops.backends import REFERENCE, Backend
from leannorm.ops.backends.reference import over_channels
from leannorm.ops.layout import memory_format
from leannorm.ops.modes import recorded
from leannorm.ops.precision import gradient_dtype
from leannorm.ops.select import pick, transformed


class MaskedNorm(torch.autograd.Function):
    """`ChannelNorm`, or with `sharing` `SyncNorm`, by the positions in `mask`; also mean, M2, count."""

    Kept = KeptByChannelNorm

    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        weight, bias, residual, mask, act, eps, groups, zero, sharing = given
        backend = ctx.backend = pick(x, weight, bias, residual)
        epilogue = Epilogue(weight, bias, residual, act)
        if sharing is None and zero:
            y, mean, m2, rstd, size = backend.channel_forward(x, epilogue, eps, groups, mask=mask)
        else:
            moments = backend.channel_moments(x, groups, mask)
            mean, m2 = moments.mean, moments.m2
            if sharing is None:
                rstd, size = backend.rstd_of(moments, eps), cast(Tensor, moments.count)
            else:
                total = shared(backend.sums_of(moments), moments.count, sharing, x)
                mean, m2, rstd, size = backend.moments_of(total, eps)
            y = _normalized(backend, x, mean, rstd, epilogue, mask if zero else None)
        keep_for_backward(ctx, KeptByChannelNorm(x, mean, rstd, weight, bias, residual, y, mask, size, act))
        ctx.eps, ctx.groups, ctx.zero, ctx.sharing = eps, groups, zero, sharing
        assert size is not None
        ctx.mark_non_differentiable(mean, m2, size)
        ctx.set_materialize_grads(False)
        return y, mean, m2, size

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *unused: Any) -> tuple[Tensor | None, ...]:
        kept = kept_by(ctx)
        x, mask, size = kept.x, cast(Tensor, kept.mask), cast(Tensor, kept.size)
        needed, sharing, backend = ctx.needs_input_grad[:4], ctx.sharing, ctx.backend
        if dy is None:
            if sharing is None:
                return (None,) * 10
            dy = torch.zeros_like(x)  # the other ranks wait for this one's sums all the same
        twice = twice_differentiable()
        if twice:
            backend = REFERENCE
            what = None if sharing is None else sharing.call("moments to differentiate twice", x)
            mean, _, rstd, _ = _moments(x, mask, ctx.groups, ctx.eps, sharing, what)
            kept = kept._replace(mean=mean, rstd=rstd)
        kept = kept._replace(weight=for_both_gradients(kept.weight, *ctx.dtypes[1:3]))
        if sharing is None and ctx.zero:
            dx, dweight, dbias, dz = backend.channel_backward(dy, kept, ctx.groups, needed[3])
        else:
            kept = kept if ctx.zero else kept._replace(mask=None)
            sums = dbias, dweight = backend.channel_grad_sums(dy, kept)
            means = dx = dz = None
            if sharing is None:
                means = backend.channel_means(sums, kept.weight, ctx.groups, size)
                dtype = gradient_dtype(x, kept.weight)
                dbias, dweight = ((s.sum(0) if ctx.groups else s).to(dtype) for s in sums)
            elif needed[0]:
                call = sharing.call("backward", x)
                if twice:
                    total = AddUp.apply(torch.cat(sums), 0, sharing.group, call)
                else:
                    total = add_up(sums, 0, sharing.group, call)
                means = backend.means_of(total, kept.weight, size)
            if needed[0] or needed[3]:
                dx, dz = backend.channel_input_grad(dy, kept, means, needed[3])
            if means is not None and dx is not None and not ctx.zero:  # no statistic is of the others
                constant, _ = backend.channel_input_grad(dy, kept)
                dx = torch.where(over_channels(mask, dx), dx, constant)
        return (*gradients_in_dtype(ctx, needed, dx, dweight, dbias, dz), *(None,) * 6)


class MaskedAffine(torch.autograd.Function):
    """`ChannelAffine`, with 0 at the positions that are not in `mask`."""

    Kept = KeptByChannelNorm

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, rstd: Tensor, *given: Any) -> Tensor:
        weight, bias, residual, mask, act = given
        ctx.backend = pick(x, weight, bias, residual)
        kept = KeptByChannelNorm(x, mean, rstd, weight, bias, residual, mask=mask, act=act)
        y: Tensor = ctx.backend.channel_normalize(kept)
        constant, ctx.layout = not ctx.needs_input_grad[3], memory_format(y)
        keep_for_backward(ctx, kept._replace(output=y), constant)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        kept = kept_by(ctx)
        backend = REFERENCE if twice_differentiable() else ctx.backend
        needed = need_x, need_weight, need_bias, need_residual = [
            ctx.needs_input_grad[i] for i in (0, 3, 4, 5)
        ]
        dweight = dbias = dx = dz = None
        if kept.x is None:  # only its shape and layout are read
            dy = dy.contiguous(memory_format=ctx.layout)
            kept = kept._replace(x=dy)
        if need_weight or need_bias:
            dbias, dweight = backend.channel_grad_sums(dy, kept)
        if need_x or need_residual:
            dx, dz = backend.channel_input_grad(dy, kept, want_dz=need_residual)
        dx, *of_others = gradients_in_dtype(ctx, needed, dx, dweight, dbias, dz)
        return (dx, None, None, *of_others, None, None)


def _normalized(
    backend: Backend, x: Tensor, mean: Tensor, rstd: Tensor, epilogue: Epilogue, mask: Tensor | None
) -> Tensor:
    weight, bias, residual, act = epilogue
    kept = KeptByChannelNorm(x, mean, rstd, weight, bias, residual, mask=mask, act=act)
    return backend.channel_normalize(kept)


def _moments(
    x: Tensor, mask: Tensor, groups: int, eps: float, sharing: Sharing | None, call: Call | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean, M2, rstd and count, of all ranks' inputs, in plain torch that can be differentiated."""
    local = REFERENCE.channel_moments(x, groups, mask)
    assert isinstance(local.count, Tensor)
    if sharing is None:
        return local.mean, local.m2, REFERENCE.rstd_of(local, eps), local.count
    total = AddUp.apply(REFERENCE.sums_of(local), local.count, sharing.group, call)
    mean, m2, rstd, count = REFERENCE.moments_of(total, eps)
    return mean, m2, rstd, count.detach()


_norm, _affine = applied_directly(MaskedNorm), applied_directly(MaskedAffine)


def masked_norm(
    x: Tensor, valid: Valid, epilogue: Epilogue, eps: float, groups: int = 0, sharing: Sharing | None = None
) -> tuple[Tensor, Moments]:
    """`MaskedNorm`, or where autograd must look inside its formula in plain torch; the count is a tensor."""
    weight, bias, residual, act = epilogue
    mask, zero = valid.mask, valid.zero
    in_transform = transformed(x, mask, weight, bias, residual)
    if in_transform:
        call = None if sharing is None else sharing.forward_call(x)
        mean, m2, rstd, count = _moments(x, mask, groups, eps, sharing, call)
        y = _normalized(REFERENCE, x, mean, rstd, epilogue, mask if zero else None)
    else:
        records = sharing is not None or recorded(x, weight, bias, residual)
        apply = MaskedNorm.apply if sharing is not None or torch.compiler.is_compiling() else _norm
        sharing = None if sharing is None else repeatable(sharing)
        if not records and zero:
            backend = pick(x, weight, bias, residual)
            y, mean, m2, _, size = backend.channel_forward(x, epilogue, eps, groups, mask=mask)
            count = cast(Tensor, size)
        else:
            y, mean, m2, count = apply(x, weight, bias, residual, mask, act, eps, groups, zero, sharing)
    return y, Moments(mean, m2, count)


def masked_affine(x: Tensor, valid: Valid, mean: Tensor, rstd: Tensor, epilogue: Epilogue) -> Tensor:
    """`MaskedAffine`, or where autograd need not or must look inside its formula."""
    weight, bias, residual, act = epilogue
    mask = valid.mask
    in_transform = transformed(x, mask, mean, rstd, weight, bias, residual)
    if in_transform or not recorded(x, weight, bias, residual):
        backend = REFERENCE if in_transform else pick(x, weight, bias, residual)
        return _normalized(backend, x, mean, rstd, epilogue, mask)
    apply = MaskedAffine.apply if torch.compiler.is_compiling() else _affine
    y: Tensor = apply(x, mean, rstd, weight, bias, residual, mask, act)
    return y
