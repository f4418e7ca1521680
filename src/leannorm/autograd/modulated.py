"""Row norms with a scale and a shift, or with a gate, as autograd functions: what they save, and back.

Saved beside the parameters, which the caller holds: x (or the sum) and one or two statistics a row. A gated
norm saves its gate, which has x's shape, and a gated residual whose gate needs a gradient saves the branch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from leannorm.autograd.channel import applied_directly, twice_differentiable
from leannorm.autograd.rows import mean_to_keep
from leannorm.ops.backends import REFERENCE
from leannorm.ops.modes import recorded
from leannorm.ops.select import pick, transformed


def _in_dtypes(ctx: Any, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The gradients that are needed, each in its input's dtype."""
    needed = ctx.needs_input_grad
    return tuple(
        (g if g.dtype == dtype else g.to(dtype)) if need and g is not None else None
        for g, dtype, need in zip(gradients, ctx.dtypes, needed, strict=False)
    )


class KeptByAdaNorm(NamedTuple):
    """What a modulated norm saves; with a branch `x` is the sum. Of the mean, see `mean_to_keep`."""

    x: Tensor
    mean: Tensor | None
    rstd: Tensor
    scale: Tensor
    weight: Tensor | None
    bias: Tensor | None
    branch: Tensor | None
    gate: Tensor | None


class AdaNorm(torch.autograd.Function):
    """norm(x + gate * branch) * (1 + scale) + shift, and with a branch the sum."""

    Kept = KeptByAdaNorm

    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Any) -> tuple[Tensor, Tensor] | Tensor:
        branch, gate, scale, shift, weight, bias, *rows = given
        tensors = (x, branch, gate, scale, shift, weight, bias)
        backend = ctx.backend = pick(*tensors)
        y, total, mean, rstd = backend.ada_forward(*tensors, *rows)
        centre = mean_to_keep(mean, rows[2], backend)
        gate_learns = gate is not None and ctx.needs_input_grad[2]
        ctx.save_for_backward(
            *KeptByAdaNorm(
                *(x if branch is None else total, centre, rstd, scale, weight, bias),
                *(branch if gate_learns else None, gate),
            )
        )
        ctx.rows, ctx.dtypes = rows, tuple(None if t is None else t.dtype for t in tensors)
        ctx.set_materialize_grads(False)
        return y if branch is None else (y, total)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None = None) -> tuple[Tensor | None, ...]:
        x, mean, rstd, scale, weight, bias, branch, gate = KeptByAdaNorm(*ctx.saved_tensors)
        start, eps, rms = ctx.rows
        needed, backend = ctx.needs_input_grad, ctx.backend
        if twice_differentiable():
            backend = REFERENCE
            mean, rstd = REFERENCE.row_moments(x, start, x.dim(), eps, rms)
        dx, others = dtotal, (None,) * 4
        if dy is not None:
            mean = torch.zeros_like(rstd) if mean is None else mean
            wanted = needed[3] or needed[4], needed[5] or needed[6]
            statistics = x, mean, rstd, scale, weight, bias, start, rms
            dx, *others = backend.ada_backward(dy, dtotal, *statistics, *wanted)
        dbranch = dgate = None
        if dx is not None and (needed[1] or needed[2]):
            dbranch, dgate = backend.add_gated_backward(dx, branch, gate, start)
        return (*_in_dtypes(ctx, (dx, dbranch, dgate, *others)), None, None, None)


class KeptByGatedNorm(NamedTuple):
    """What a gated RMS norm saves."""

    x: Tensor
    gate: Tensor
    rstd: Tensor
    weight: Tensor | None


class GatedNorm(torch.autograd.Function):
    """rms_norm(x) * act(gate), or rms_norm(x * act(gate))."""

    Kept = KeptByGatedNorm

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor | None, *how: Any) -> Tensor:
        ctx.backend = pick(x, gate, weight)
        y, rstd = ctx.backend.gated_forward(x, gate, weight, *how)
        ctx.save_for_backward(*KeptByGatedNorm(x, gate, rstd, weight))
        ctx.how, ctx.dtypes = how, tuple(None if t is None else t.dtype for t in (x, gate, weight))
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, rstd, weight = KeptByGatedNorm(*ctx.saved_tensors)
        start, eps, act, norm_before_gate, _ = ctx.how
        backend = ctx.backend
        if twice_differentiable():
            backend = REFERENCE
            _, rstd = REFERENCE.gated_forward(x, gate, None, start, eps, act, norm_before_gate, False)
        how = start, act, norm_before_gate, ctx.needs_input_grad[2]
        gradients = backend.gated_backward(dy, x, gate, rstd, weight, *how)
        return (*_in_dtypes(ctx, gradients), *(None,) * 5)


_ada, _gated = applied_directly(AdaNorm), applied_directly(GatedNorm)


def ada_norm(
    x: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    scale: Tensor,
    shift: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *rows: Any,
) -> tuple[Tensor, Tensor]:
    """y and the sum (else x): `AdaNorm`, or under a functorch transform its formula in plain torch.

    `rows` are start, eps and rms.
    """
    tensors = (x, branch, gate, scale, shift, weight, bias)
    in_transform = transformed(*tensors)
    if in_transform or not recorded(*tensors):
        backend = REFERENCE if in_transform else pick(*tensors)
        y, total, _, _ = backend.ada_forward(*tensors, *rows)
        return y, total
    apply = AdaNorm.apply if torch.compiler.is_compiling() else _ada
    out = apply(*tensors, *rows)
    return (out, x) if branch is None else out


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor | None, *how: Any) -> Tensor:
    """`GatedNorm`, or under a functorch transform its formula in plain torch.

    `how` is start, eps, act, norm_before_gate and cast_before.
    """
    in_transform = transformed(x, gate, weight)
    if in_transform or not recorded(x, gate, weight):
        backend = REFERENCE if in_transform else pick(x, gate, weight)
        return backend.gated_forward(x, gate, weight, *how)[0]
    apply = GatedNorm.apply if torch.compiler.is_compiling() else _gated
    return apply(x, gate, weight, *how)  # type: ignore[no-any-return]
