"""Per-channel norms as autograd functions: what they save for the backward pass, and that pass.

Saved, in bytes per input element: the input itself (4 in float32, 2 in half precision) and nothing else of
its size, with one exception. With a residual and an activation the output is saved too (the next layer
saves it anyway) if the derivative can be computed from it, else the residual. Mean and rstd are float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from leannorm._types import Epilogue, KeptByChannelNorm, Running
from leannorm.ops.activation import ACTIVATIONS
from leannorm.ops.backends import REFERENCE
from leannorm.ops.backends.shown import shown
from leannorm.ops.layout import memory_format
from leannorm.ops.modes import recorded
from leannorm.ops.select import pick, transformed


def twice_differentiable() -> bool:
    """Does autograd record this backward pass (create_graph=True)? Then it uses plain torch operations."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def applied_directly(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without its check for functorch transforms; the caller has made that check."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def gradients_in_dtype(ctx: Any, needed: Sequence[bool], *gradients: Tensor | None) -> list[Tensor | None]:
    """The gradients of (x, weight, bias, residual) that are needed, each in its input's dtype."""
    return [
        (g if g.dtype is dtype else g.to(dtype)) if need and g is not None else None
        for g, dtype, need in zip(gradients, ctx.dtypes, needed, strict=True)
    ]


def for_both_gradients(
    weight: Tensor | None, dtype: torch.dtype | None, bias_dtype: torch.dtype | None
) -> Tensor | None:
    """The weight, wide enough for the bias's gradient too: a device's kernels store both in its dtype."""
    if weight is None or bias_dtype is None or dtype is bias_dtype:
        return weight
    return weight.to(torch.promote_types(weight.dtype, bias_dtype))


def keep_for_backward(ctx: Any, kept: KeptByChannelNorm, constant: bool = False) -> None:
    """Save those tensors that the backward pass needs.

    `constant`: the statistics are constants and the weight needs no gradient, so only `act` may need x, or in
    its place the output, which the next layer keeps too.
    """
    x, _, _, weight, bias, residual, out, _, _, act = kept
    ctx.dtypes = [None if v is None else v.dtype for v in (x, weight, bias, residual)]
    if ACTIVATIONS[act].from_output is None or (residual is None and not constant):
        out = None
    else:
        residual, out = None, None if act == "identity" else out
    kept_x = None if constant and (act == "identity" or out is not None) else x
    bias = None if act == "identity" else bias
    ctx.save_for_backward(kept_x, *kept[1:4], bias, residual, out, *kept[7:9])
    ctx.act = act


def kept_by(ctx: Any) -> KeptByChannelNorm:
    """What `keep_for_backward` has saved."""
    fields: Any = (*ctx.saved_tensors, ctx.act)
    return KeptByChannelNorm(*fields)


def _with_buffers(tensors: tuple[Tensor | None, ...], running: Running | None) -> tuple[Tensor | None, ...]:
    """All tensors that a call reads or writes: the backend is picked by them."""
    return tensors if running is None else (*tensors, *running[:2])


class ChannelNorm(torch.autograd.Function):
    """act(norm(x) * weight + bias + residual) by the input's own statistics; also returns mean and M2."""

    Kept = KeptByChannelNorm

    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        weight, bias, residual, act, eps, groups, running = given
        backend = ctx.backend = shown(pick(*_with_buffers((x, weight, bias, residual), running)), groups)
        epilogue = Epilogue(weight, bias, residual, act)
        y, mean, m2, rstd, _ = backend.channel_forward(x, epilogue, eps, groups, running)
        keep_for_backward(ctx, KeptByChannelNorm(x, mean, rstd, weight, bias, residual, y, act=act))
        ctx.eps, ctx.groups = eps, groups
        ctx.mark_non_differentiable(mean, m2)
        ctx.set_materialize_grads(False)
        return y, mean, m2

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *unused: Any) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 8
        kept, backend = kept_by(ctx), ctx.backend
        if twice_differentiable():
            backend, moments = REFERENCE, REFERENCE.channel_moments(kept.x, ctx.groups)
            kept = kept._replace(mean=moments.mean, rstd=REFERENCE.rstd_of(moments, ctx.eps))
        needed = ctx.needs_input_grad[:4]
        kept = kept._replace(weight=for_both_gradients(kept.weight, *ctx.dtypes[1:3]))
        dx, dweight, dbias, dz = backend.channel_backward(dy, kept, ctx.groups, needed[3])
        return (*gradients_in_dtype(ctx, needed, dx, dweight, dbias, dz), None, None, None, None)


class ChannelAffine(torch.autograd.Function):
    """act((x - mean) * rstd * weight + bias + residual) by given statistics, which are constants."""

    Kept = KeptByChannelNorm

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, rstd: Tensor, *epilogue: Any) -> Tensor:
        weight, bias, residual, act = epilogue
        ctx.backend = shown(pick(x, weight, bias, residual))
        kept = KeptByChannelNorm(x, mean, rstd, weight, bias, residual, act=act)
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
        if not (need_weight or need_bias):
            dx, dz = backend.channel_input_grad(dy, kept, want_dz=need_residual)
        elif not (need_x or need_residual):
            dbias, dweight = backend.channel_grad_sums(dy, kept)
        else:
            kept = kept._replace(weight=for_both_gradients(kept.weight, *ctx.dtypes[1:3]))
            dx, dweight, dbias, dz = backend.channel_backward(dy, kept, 0, need_residual, constant=True)
        dx, *of_others = gradients_in_dtype(ctx, needed, dx, dweight, dbias, dz)
        return (dx, None, None, *of_others, None)


_norm, _affine = applied_directly(ChannelNorm), applied_directly(ChannelAffine)


def channel_norm(
    x: Tensor, epilogue: Epilogue, eps: float, groups: int = 0, running: Running | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`ChannelNorm`, or under a functorch transform its formula in plain torch."""
    weight, bias, residual, act = epilogue
    tensors = _with_buffers((x, weight, bias, residual), running)
    in_transform = transformed(*tensors)
    if in_transform or not recorded(x, weight, bias, residual):
        backend = REFERENCE if in_transform else shown(pick(*tensors), groups)
        y, mean, m2, *_ = backend.channel_forward(x, epilogue, eps, groups, running)
        return y, mean, m2
    apply = ChannelNorm.apply if torch.compiler.is_compiling() else _norm
    result: tuple[Tensor, Tensor, Tensor] = apply(x, weight, bias, residual, act, eps, groups, running)
    return result


def channel_evaluated(x: Tensor, running: Running, eps: float, epilogue: Epilogue) -> Tensor | None:
    """Evaluation of which nothing is recorded, by one verb; None where `channel_affine` must do it."""
    tensors = (x, running.mean, running.var, epilogue.weight, epilogue.bias, epilogue.residual)
    if torch.compiler.is_compiling() or recorded(*tensors) or transformed(*tensors):
        return None
    return pick(*tensors).channel_evaluate(x, running, eps, epilogue)


def channel_affine(x: Tensor, mean: Tensor, rstd: Tensor, epilogue: Epilogue) -> Tensor:
    """`ChannelAffine`, or under a functorch transform its formula in plain torch."""
    weight, bias, residual, act = epilogue
    kept = KeptByChannelNorm(x, mean, rstd, weight, bias, residual, act=act)
    if transformed(x, mean, rstd, weight, bias, residual):
        return REFERENCE.channel_normalize(kept)
    if not recorded(x, weight, bias, residual):
        return shown(pick(x, weight, bias, residual)).channel_normalize(kept)
    apply = ChannelAffine.apply if torch.compiler.is_compiling() else _affine
    y: Tensor = apply(x, mean, rstd, weight, bias, residual, act)
    return y
