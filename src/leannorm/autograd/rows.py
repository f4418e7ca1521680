"""Layer and RMS norm as an autograd function: what it saves for the backward pass, and that pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leannorm._types import KeptByRowNorm, Maybe, Rows, RowTensors
from leannorm.autograd import by_torch
from leannorm.autograd.channel import applied_directly, twice_differentiable, wide_for
from leannorm.autograd.gated import RowCall, gated_norm
from leannorm.ops.backends import ATEN, REFERENCE
from leannorm.ops.backends.reference_rows import of_valid
from leannorm.ops.modes import recorded, traced
from leannorm.ops.precision import compute_dtype
from leannorm.ops.select import pick, transformed


def with_scale(
    scale: Tensor, shift: Maybe, weight: Maybe, bias: Maybe, dtype: torch.dtype
) -> tuple[Maybe, Maybe]:
    """The weight and the bias with 1 + scale and shift behind them, as lines of the arithmetic's dtype.

    Without a weight and a bias they are scale and shift, and `weight_offset` is 1.
    """
    if weight is None and bias is None:
        return scale, shift
    factor = scale.to(dtype) + 1
    shift = None if shift is None else shift.to(dtype)
    if bias is not None:
        bias = bias.to(dtype)
        shift = factor * bias if shift is None else torch.addcmul(shift, factor, bias)
    return factor if weight is None else factor * weight.to(dtype), shift


def _of_scale(
    dweight: Tensor, dbias: Maybe, scale: Tensor, weight: Maybe, bias: Maybe, dtype: torch.dtype
) -> tuple[Maybe, ...]:
    """The gradients of scale, weight and bias, from those of what `with_scale` gives."""
    if weight is None and bias is None:
        return dweight, None, None
    factor, dscale = scale.to(dtype) + 1, dweight
    of_weight = of_bias = None
    if weight is not None:
        weight = weight.to(dtype)
        dscale, of_weight = dweight * weight, (factor * dweight).sum_to_size(weight.shape)
    if bias is not None and dbias is not None:
        bias = bias.to(dtype)
        dscale, of_bias = torch.addcmul(dscale, dbias, bias), (factor * dbias).sum_to_size(bias.shape)
    return dscale, of_weight, of_bias


class RowNorm(torch.autograd.Function):
    """y (and x + gate * residual) of `row_forward`.

    Saves x (with a residual the sum, which is an output anyway), two statistics per row (one for an RMS norm)
    in float32 or float64, and a byte per row if rows are masked. That is 0 bytes per element in addition to
    the input, which the caller keeps anyway. Scale and gate are saved as parameters are; if the gate needs a
    gradient, the residual too.
    """

    Kept = KeptByRowNorm

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Any) -> Any:
        residual, gate, scale, shift, weight, bias, valid, call = others
        backend, rows = call.backend, call.rows
        factor, added, of_scale = weight, bias, None
        if scale is not None:
            of_scale = bias
            factor, added = with_scale(scale, shift, weight, bias, compute_dtype(x))
        tensors: Any = (x, residual, gate, None, None, factor, added)  # making a record takes time
        y, total, mean, rstd = backend.row_forward(tensors, rows, valid)
        kept = x if residual is None else total
        # an RMS norm has none; on a device zeros instead of it would be one more launch
        centre = mean if backend.launches or not rows.rms else None
        of_gate = residual if gate is not None and ctx.needs_input_grad[2] else None
        ctx.save_for_backward(kept, centre, rstd, weight, valid, gate, of_gate, scale, of_scale)
        ctx.call = call
        if residual is None:
            return y
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None = None) -> tuple[Tensor | None, ...]:
        x, mean, rstd, weight, valid, gate, residual, scale, bias = ctx.saved_tensors
        backend, rows, wide = ctx.call
        needed = ctx.needs_input_grad
        dweight = dbias = dscale = dshift = dgate = None
        if dy is None:  # only the sum was used
            dx = dresidual = of_valid(valid, dtotal)
            if gate is not None and dx is not None:
                kept = KeptByRowNorm(x, rstd, rstd, None, valid, gate, residual)
                dresidual, dgate = REFERENCE.gate_backward(dx, kept, rows)
        else:
            if twice_differentiable():
                # the statistics are recomputed from x, so that the second derivative has all its terms
                backend = REFERENCE
                mean, rstd = REFERENCE.row_moments(x, rows, valid)
            mean = torch.zeros_like(rstd) if mean is None else mean
            factor = weight if wide is None else weight.to(wide)
            if scale is not None:
                factor, _ = with_scale(scale, None, weight, bias, rstd.dtype)
            kept = KeptByRowNorm(x, mean, rstd, factor, valid, gate, residual)
            want_bias = needed[4] or needed[6] or (needed[3] and bias is not None)
            want_affine = want_bias or needed[3] or needed[5]
            dx, dweight, dbias, *of_gate = backend.row_backward(
                dy, dtotal, kept, rows, want_affine, want_bias
            )
            dresidual, dgate = of_gate or (dx, None)
            if scale is not None and want_affine:
                of_scale, dshift = (scale, weight, bias, rstd.dtype), dbias
                dscale, dweight, dbias = _of_scale(dweight, dbias, *of_scale)
        return (
            dx if needed[0] else None,
            dresidual if needed[1] else None,
            dgate if needed[2] else None,
            dscale if needed[3] else None,
            dshift if needed[4] else None,
            dweight if needed[5] else None,
            dbias if needed[6] else None,
            *(None, None),
        )


apply_row_norm = applied_directly(RowNorm)


def row_norm(tensors: RowTensors, rows: Rows, valid: Maybe = None) -> tuple[Tensor, Tensor]:
    """y and x + gate * residual (else x): `RowNorm`, or under a functorch transform its formula in plain
    torch."""
    x, residual, gate, scale, shift, weight, bias = tensors
    if rows.act is not None:
        assert gate is not None
        return gated_norm(x, gate, weight, rows), x
    given = tensors if scale is not None else (x, residual, weight, bias)
    in_transform = transformed(*given)
    backend = REFERENCE if in_transform else pick(*given)
    if backend is ATEN and valid is None and scale is None and gate is None and not traced():
        made = by_torch.row_norm(x, residual, weight, bias, rows)
        if made is not None:
            return made
    if in_transform or not recorded(*given):
        if scale is not None:
            of_scale = with_scale(scale, shift, weight, bias, compute_dtype(x))
            tensors = RowTensors(x, residual, gate, None, None, *of_scale)
        y, total, _, _ = backend.row_forward(tensors, rows, valid)
        return y, total
    apply = RowNorm.apply if traced() else apply_row_norm
    wide = None if scale is not None else wide_for(weight, bias)
    out = apply(*tensors, valid, RowCall(backend, rows, wide))
    return (out, x) if residual is None else out
