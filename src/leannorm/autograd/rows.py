"""Layer and RMS norm as an autograd function: what it saves for the backward pass, and that pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from leannorm._types import KeptByRowNorm, Maybe, Rows
from leannorm.autograd import by_torch
from leannorm.autograd.channel import applied_directly, twice_differentiable, wide_for
from leannorm.ops.backends import ATEN, REFERENCE, Backend
from leannorm.ops.backends.reference_rows import of_valid
from leannorm.ops.modes import recorded, traced
from leannorm.ops.select import pick, transformed


class RowCall(NamedTuple):
    """The arguments of a row norm that are not tensors; `wide` as in `ChannelCall`.

    `adds_alike`: whether the residual has the dtype of x.
    """

    backend: Backend
    rows: Rows
    wide: torch.dtype | None = None
    has_bias: bool = False
    has_residual: bool = False
    adds_alike: bool = False


def mean_to_keep(mean: Tensor, rms: bool, backend: Backend) -> Tensor | None:
    """None for an RMS norm, unless zeros instead of it would be one more launch."""
    return mean if backend.launches or not rms else None


class RowNorm(torch.autograd.Function):
    """y (and x + residual) of `row_forward`.

    Saves x (with a residual the sum, which is an output anyway), two statistics per row (one for an RMS norm)
    in float32 or float64, and a byte per row if rows are masked. That is 0 bytes per element in addition to
    the input, which the caller keeps anyway.
    """

    Kept = KeptByRowNorm

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Any) -> Any:
        residual, weight, bias, valid, call = others
        backend, rows = call.backend, call.rows
        y, total, mean, rstd = backend.row_forward(x, residual, weight, bias, rows, valid)
        kept = x if residual is None else total
        ctx.save_for_backward(kept, mean_to_keep(mean, rows.rms, backend), rstd, weight, valid)
        ctx.call = call
        if residual is None:
            return y
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None = None) -> tuple[Tensor | None, ...]:
        x, mean, rstd, weight, valid = ctx.saved_tensors
        backend, rows, wide, *_ = ctx.call
        need_x, need_residual, need_weight, need_bias, *_ = ctx.needs_input_grad
        dx = dweight = dbias = None
        if dy is None:  # only x + residual was used
            dx = of_valid(valid, dtotal)
        else:
            if twice_differentiable():
                # the statistics are recomputed from x, so that the second derivative has all its terms
                backend = REFERENCE
                mean, rstd = REFERENCE.row_moments(x, rows, valid)
            mean = torch.zeros_like(rstd) if mean is None else mean
            kept = KeptByRowNorm(x, mean, rstd, weight if wide is None else weight.to(wide), valid)
            want_affine = need_weight or need_bias
            dx, dweight, dbias = backend.row_backward(dy, dtotal, kept, rows, want_affine)
        return (
            dx if need_x else None,
            dx if need_residual else None,
            dweight if need_weight else None,
            dbias if need_bias else None,
            *(None, None),
        )


apply_row_norm = applied_directly(RowNorm)


def row_norm(
    x: Tensor, residual: Maybe, weight: Maybe, bias: Maybe, rows: Rows, valid: Maybe = None
) -> tuple[Tensor, Tensor]:
    """y and x + residual (else x): `RowNorm`, or under a functorch transform its formula in plain torch."""
    tensors = (x, residual, weight, bias)
    in_transform = transformed(*tensors)
    backend = REFERENCE if in_transform else pick(*tensors)
    if backend is ATEN and valid is None and not traced():
        made = by_torch.row_norm(*tensors, rows)
        if made is not None:
            return made
    if in_transform or not recorded(*tensors):
        y, total, _, _ = backend.row_forward(x, residual, weight, bias, rows, valid)
        return y, total
    apply = RowNorm.apply if traced() else apply_row_norm
    alike = residual is not None and residual.dtype is x.dtype
    call = RowCall(backend, rows, wide_for(weight, bias), bias is not None, residual is not None, alike)
    out = apply(x, residual, weight, bias, valid, call)
    return (out, x) if residual is None else out
