"""Layer and RMS norm as an autograd function: what it saves for the backward pass, and that pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leannorm._types import KeptByRowNorm, Rows
from leannorm.autograd.channel import applied_directly, for_both_gradients, twice_differentiable
from leannorm.ops.backends import REFERENCE, TRITON
from leannorm.ops.backends.reference_rows import of_valid
from leannorm.ops.modes import recorded
from leannorm.ops.select import pick, transformed


def mean_to_keep(mean: Tensor, rms: bool, backend: object) -> Tensor | None:
    """None for an RMS norm, but where zeros in its place would be one more launch."""
    return None if rms and backend is not TRITON else mean


class RowNorm(torch.autograd.Function):
    """y (and x + residual) of `row_forward`.

    Saves x (with a residual: the sum, which is an output anyway) and two statistics a row (an RMS norm one),
    in float32 or float64, and where rows are masked a byte a row: 0 bytes per element beside the input, which
    the caller holds already.
    """

    Kept = KeptByRowNorm

    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Any) -> tuple[Tensor, Tensor] | Tensor:
        residual, weight, bias, rows, valid = given
        backend = ctx.backend = pick(x, residual, weight, bias)
        y, total, mean, rstd = backend.row_forward(x, residual, weight, bias, rows, valid)
        kept = x if residual is None else total
        ctx.save_for_backward(kept, mean_to_keep(mean, rows.rms, backend), rstd, weight, valid)
        ctx.rows = rows
        ctx.dtypes = [None if t is None else t.dtype for t in (x, residual, weight, bias)]
        ctx.set_materialize_grads(False)
        return y if residual is None else (y, total)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None = None) -> tuple[Tensor | None, ...]:
        x, mean, rstd, weight, valid = ctx.saved_tensors
        want_affine = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        if dy is None:  # only x + residual was used
            return _grads(ctx, of_valid(valid, dtotal), None, None)
        backend = ctx.backend
        if twice_differentiable():
            # the statistics are recomputed from x, so that the second derivative has all its terms
            backend = REFERENCE
            mean, rstd = REFERENCE.row_moments(x, ctx.rows, valid)
        mean = torch.zeros_like(rstd) if mean is None else mean
        kept = KeptByRowNorm(x, mean, rstd, for_both_gradients(weight, *ctx.dtypes[2:]), valid)
        return _grads(ctx, *backend.row_backward(dy, dtotal, kept, ctx.rows, want_affine))


def _grads(
    ctx: Any, dx: Tensor | None, dweight: Tensor | None, dbias: Tensor | None
) -> tuple[Tensor | None, ...]:
    """One gradient for each argument of `forward`, in that argument's dtype, where it is wanted."""
    found = zip((dx, dx, dweight, dbias), ctx.needs_input_grad, ctx.dtypes, strict=False)
    grads = [
        (g if g.dtype is dtype else g.to(dtype)) if wanted and g is not None else None
        for g, wanted, dtype in found
    ]
    return (*grads, None, None)


_norm = applied_directly(RowNorm)


def row_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    rows: Rows,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y and x + residual (else x): `RowNorm`, or under a functorch transform its formula in plain torch."""
    tensors = (x, residual, weight, bias)
    in_transform = transformed(*tensors)
    if in_transform or not recorded(*tensors):
        backend = REFERENCE if in_transform else pick(*tensors)
        y, total, _, _ = backend.row_forward(x, residual, weight, bias, rows, valid)
        return y, total
    apply = RowNorm.apply if torch.compiler.is_compiling() else _norm
    out = apply(x, residual, weight, bias, rows, valid)
    return (out, x) if residual is None else out
