"""Layer and RMS norm: what is kept for the backward pass, and how it goes back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leannorm.autograd.channel import applied_directly, twice_differentiable
from leannorm.ops.backends import REFERENCE
from leannorm.ops.modes import recorded
from leannorm.ops.select import pick, transformed


class RowNorm(torch.autograd.Function):
    """y (and x + residual) of `row_forward`.

    Keeps x (with a residual: the sum, which is an output anyway) and two statistics a row, in float32 or
    wider: no bytes per element beside the input's own, as the caller holds that already.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        start: int,
        stop: int,
        eps: float,
        rms: bool,
    ) -> tuple[Tensor, Tensor] | Tensor:
        backend = ctx.backend = pick(x, residual, weight, bias)
        y, total, mean, rstd = backend.row_forward(x, residual, weight, bias, start, stop, eps, rms)
        ctx.save_for_backward(x if residual is None else total, mean, rstd, weight)
        ctx.span, ctx.eps, ctx.rms = (start, stop), eps, rms
        ctx.dtypes = tuple(None if t is None else t.dtype for t in (x, residual, weight, bias))
        ctx.set_materialize_grads(False)
        return y if residual is None else (y, total)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None = None) -> tuple[Tensor | None, ...]:
        x, mean, rstd, weight = ctx.saved_tensors
        start, stop = ctx.span
        want_affine = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        if dy is None:  # only x + residual was used
            return _grads(ctx, dtotal, None, None)
        backend = ctx.backend
        if twice_differentiable():
            # create_graph: the statistics become functions of x again, so that no term is lost
            backend = REFERENCE
            mean, rstd = REFERENCE.row_moments(x, start, stop, ctx.eps, ctx.rms)
        grads = backend.row_backward(dy, dtotal, x, mean, rstd, weight, start, stop, ctx.rms, want_affine)
        return _grads(ctx, *grads)


def _grads(
    ctx: Any, dx: Tensor | None, dweight: Tensor | None, dbias: Tensor | None
) -> tuple[Tensor | None, ...]:
    """One gradient for each argument of `forward`, in that argument's dtype, where it is wanted."""
    found = zip((dx, dx, dweight, dbias), ctx.needs_input_grad, ctx.dtypes, strict=False)
    grads = [
        (g if g.dtype == dtype else g.to(dtype)) if wanted and g is not None else None
        for g, wanted, dtype in found
    ]
    return (*grads, None, None, None, None)


_norm = applied_directly(RowNorm)


def row_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    start: int,
    stop: int,
    eps: float,
    rms: bool,
) -> tuple[Tensor, Tensor]:
    """y and x + residual (x where there is none), differentiable in every way torch knows."""
    tensors = (x, residual, weight, bias)
    looked_into = transformed(*tensors)
    if looked_into or not recorded(*tensors):
        backend = REFERENCE if looked_into else pick(*tensors)
        y, total, _, _ = backend.row_forward(*tensors, start, stop, eps, rms)
        return y, total
    apply = RowNorm.apply if torch.compiler.is_compiling() else _norm
    out = apply(x, residual, weight, bias, start, stop, eps, rms)
    return (out, x) if residual is None else out
