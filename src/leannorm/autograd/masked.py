"""Per-channel norms where some positions are no data (padding), of one rank or of several.

Saved, in bytes per input element: as `ChannelNorm`, and the mask, one byte a position.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from leannorm._types import Epilogue, Moments, Valid
from leannorm.autograd.channel import (
    applied_directly,
    for_both_gradients,
    gradients_in_dtype,
    keep_for_backward,
    twice_differentiable,
)
from leannorm.autograd.sync import AddUp, Sharing, repeatable, shared
from leannorm.distributed.call import Call
from leannorm.distributed.collective import add_up
from leannorm.ops.backends import REFERENCE
from leannorm.ops.layout import memory_format
from leannorm.ops.modes import recorded
from leannorm.ops.select import pick, transformed


class KeptByMaskedNorm(NamedTuple):
    """As `KeptByChannelNorm`, the mask, and the number of values that each statistic is of."""

    x: Tensor | None
    mean: Tensor
    rstd: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    output: Tensor | None
    mask: Tensor
    size: Tensor | None = None


class MaskedNorm(torch.autograd.Function):
    """`ChannelNorm`, or with `sharing` `SyncNorm`, by the positions in `mask`; also mean, M2, count."""

    Kept = KeptByMaskedNorm

    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        weight, bias, residual, mask, act, eps, groups, zero, sharing = given
        backend = ctx.backend = pick(x, weight, bias, residual)
        epilogue = weight, bias, residual, act
        if sharing is None:
            y, mean, m2, rstd, count = backend.masked_forward(
                x, mask, weight, bias, residual, eps, act, groups, zero
            )
        else:
            local = backend.masked_moments(x, mask)
            total = shared(REFERENCE.sums_of(local), local.count, sharing, x)
            mean, m2, rstd, count = backend.moments_of(total, eps)
            if zero:
                y = backend.masked_normalize(x, mask, mean, rstd, *epilogue)
            else:
                y = backend.channel_normalize(x, mean, rstd, *epilogue)
        keep_for_backward(ctx, (x, mean, rstd, weight, bias, residual, y), act, mask, count)
        ctx.eps, ctx.groups, ctx.zero, ctx.sharing = eps, groups, zero, sharing
        ctx.mark_non_differentiable(mean, m2, count)
        ctx.set_materialize_grads(False)
        return y, mean, m2, count

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *unused: Any) -> tuple[Tensor | None, ...]:
        *saved, mask, size = ctx.saved_tensors
        x, mean, rstd, weight, *others = saved
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
        given: Any = (mean, rstd, for_both_gradients(weight, *ctx.dtypes[1:3]), *others)
        if sharing is None:
            dx, dweight, dbias, dz = backend.masked_backward(
                dy, x, mask, mean, rstd, size, *given[2:], ctx.act, ctx.groups, needed[3], ctx.zero
            )
        else:
            if ctx.zero:
                dbias, dweight = backend.masked_grad_sums(*[dy, x, mask, *given, ctx.act])
            else:
                dbias, dweight = backend.channel_grad_sums(dy, x, *given, ctx.act)
            p = q = dx = dz = None
            if needed[0]:
                call = sharing.call("backward", x)
                if twice:
                    total = AddUp.apply(torch.cat((dbias, dweight)), 0, sharing.group, call)
                else:
                    total = add_up((dbias, dweight), 0, sharing.group, call)
                p, q = backend.means_of(total, weight, size)
            if needed[0] or needed[3]:
                how = p, q, ctx.act, needed[3], ctx.zero
                dx, dz = backend.masked_input_grad(dy, x, mask, *given, *how)
        return (*gradients_in_dtype(ctx, needed, dx, dweight, dbias, dz), *(None,) * 6)


class MaskedAffine(torch.autograd.Function):
    """`ChannelAffine`, with 0 at the positions that are not in `mask`."""

    Kept = KeptByMaskedNorm

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, rstd: Tensor, *given: Any) -> Tensor:
        weight, bias, residual, mask, act = given
        ctx.backend = pick(x, weight, bias, residual)
        y: Tensor = ctx.backend.masked_normalize(x, mask, mean, rstd, weight, bias, residual, act)
        constant, ctx.layout = not ctx.needs_input_grad[3], memory_format(y)
        keep_for_backward(ctx, (x, mean, rstd, weight, bias, residual, y), act, mask, None, constant=constant)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, *others, mask, _ = ctx.saved_tensors
        given: list[Any] = [mean, rstd, *others]
        backend = REFERENCE if twice_differentiable() else ctx.backend
        needed = need_x, need_weight, need_bias, need_residual = [
            ctx.needs_input_grad[i] for i in (0, 3, 4, 5)
        ]
        dweight = dbias = dx = dz = None
        if x is None:  # only its shape and layout are read
            x = dy = dy.contiguous(memory_format=ctx.layout)
        if need_weight or need_bias:
            dbias, dweight = backend.masked_grad_sums(*[dy, x, mask, *given, ctx.act])
        if need_x or need_residual:
            given += None, None, ctx.act, need_residual
            dx, dz = backend.masked_input_grad(*[dy, x, mask, *given])
        dx, *of_others = gradients_in_dtype(ctx, needed, dx, dweight, dbias, dz)
        return (dx, None, None, *of_others, None, None)


def _moments(
    x: Tensor, mask: Tensor, groups: int, eps: float, sharing: Sharing | None, call: Call | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean, M2, rstd and count, of all ranks' inputs, in plain torch that can be differentiated."""
    local = REFERENCE.masked_moments(x, mask, groups)
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
        if zero:
            y = REFERENCE.masked_normalize(x, mask, mean, rstd, *epilogue)
        else:
            y = REFERENCE.channel_normalize(x, mean, rstd, *epilogue)
    elif sharing is None and not recorded(x, weight, bias, residual):
        backend = pick(x, weight, bias, residual)
        given = weight, bias, residual, eps, act, groups, zero
        y, mean, m2, _, count = backend.masked_forward(x, mask, *given)
    else:
        apply = MaskedNorm.apply if sharing is not None or torch.compiler.is_compiling() else _norm
        sharing = None if sharing is None else repeatable(sharing)
        y, mean, m2, count = apply(x, weight, bias, residual, mask, act, eps, groups, zero, sharing)
    return y, Moments(mean, m2, count)


def masked_affine(x: Tensor, valid: Valid, mean: Tensor, rstd: Tensor, epilogue: Epilogue) -> Tensor:
    """`MaskedAffine`, or where autograd need not or must look inside its formula."""
    weight, bias, residual, act = epilogue
    mask = valid.mask
    if transformed(x, mask, mean, rstd, weight, bias, residual):
        return REFERENCE.masked_normalize(x, mask, mean, rstd, *epilogue)
    if not recorded(x, weight, bias, residual):
        return pick(x, weight, bias, residual).masked_normalize(x, mask, mean, rstd, *epilogue)
    apply = MaskedAffine.apply if torch.compiler.is_compiling() else _affine
    y: Tensor = apply(x, mean, rstd, weight, bias, residual, mask, act)
    return y
