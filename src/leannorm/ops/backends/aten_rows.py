"""The row verbs by torch's own kernels on the CPU: layer and RMS norm. Read `aten.py` first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from leannorm._types import KeptByRowNorm, Maybe, Rows, RowTensors
from leannorm.ops.backends import native
from leannorm.ops.backends.backend import Backend
from leannorm.ops.backends.reference import _SLICE
from leannorm.ops.backends.reference_rows import has_lines, rounded_then_weighted, shifted_weight
from leannorm.ops.plan import row_plan
from leannorm.ops.precision import compute_dtype, row_gradient_dtype, statistics_dtype


class AtenRows(Backend):
    """Torch's layer norm, and the formula of an RMS norm for some rows at a time."""

    @torch.no_grad()
    def row_forward(
        self, tensors: RowTensors, rows: Rows, valid: Maybe = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, residual, gate, _, _, weight, bias = tensors
        size = _row_size(x, rows)
        # a cast between the norm and the weight, which torch does not have
        between = rows.cast_before and not rows.rms
        more = valid is not None or gate is not None or has_lines(weight, rows)
        if not size or more or between or not native.serves(*tensors, valid):
            return super().row_forward(tensors, rows, valid)
        total = x if residual is None else x + residual.to(x.dtype)
        if rows.rms:
            return self._rms_forward(total, weight, bias, rows, size)
        shape = total.shape[rows.start :]
        dtype = compute_dtype(x)
        gamma = torch.ones(shape, dtype=dtype)
        gamma = gamma if weight is None else shifted_weight(weight, rows.weight_offset, dtype)
        beta = torch.zeros_like(gamma) if bias is None else bias.to(dtype)
        y, mean, rstd = torch.native_layer_norm(total, shape, gamma, beta, rows.eps)
        if not native.near(mean, rstd):
            return super().row_forward(RowTensors(total, weight=weight, bias=bias), rows)
        return y, total, mean, rstd

    def _rms_forward(
        self, x: Tensor, weight: Maybe, bias: Maybe, rows: Rows, size: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Some rows at a time, so that temporaries stay in cache."""
        shape, dtype = x.shape[rows.start :], compute_dtype(x)
        flat = x.reshape(-1, *shape)
        gamma = None if weight is None else shifted_weight(weight, rows.weight_offset, dtype)

        def normed(part: Tensor) -> tuple[Tensor, Tensor]:
            z = part.to(dtype)
            square = z.square().sum([*range(1, flat.dim())], keepdim=True)
            rstd = square.to(statistics_dtype(x)).div_(size).add_(rows.eps).rsqrt_().to(dtype)
            z = z * rstd
            if rows.cast_before:
                z = rounded_then_weighted(z.to(x.dtype), weight, rows.weight_offset, 1, flat.dim())
            elif gamma is not None:
                z.mul_(gamma)
            return z if bias is None else z.add_(bias.to(z.dtype)), rstd

        wide = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
        of_y = wide if rows.cast_before else x.dtype
        if x.numel() <= _SLICE:
            y, rstd = normed(flat)
            y = y.to(of_y)
        else:
            y = flat.new_empty(flat.shape, dtype=of_y)
            rstd = flat.new_empty(flat.shape[0], *(1,) * len(shape), dtype=dtype)
            for part in _row_parts(flat, size):
                y[part], rstd[part] = normed(flat[part])
        if not native.usual(rstd, rstd):
            return super().row_forward(RowTensors(x, weight=weight, bias=bias), rows)
        rstd = rstd.reshape(*x.shape[: rows.start], *(1,) * len(shape))
        return y.reshape(x.shape), x, torch.zeros_like(rstd), rstd

    @torch.no_grad()
    def row_backward(
        self,
        dy: Tensor,
        dtotal: Tensor | None,
        kept: KeptByRowNorm,
        rows: Rows,
        want_affine: bool = True,
        want_bias: bool | None = None,
    ) -> tuple[Any, ...]:
        x, mean, rstd, weight, valid, gate, *_ = kept
        size = _row_size(x, rows)
        more = valid is not None or gate is not None or has_lines(weight, rows) or (want_bias and rows.rms)
        if not size or more or not native.serves(x, mean, rstd, weight, dy, dtotal):
            return super().row_backward(dy, dtotal, kept, rows, want_affine, want_bias)
        if rows.rms and x.numel() <= _SLICE:
            dx, dweight = _rms_norm_backward(dy, dtotal, kept, rows, want_affine)
            return dx, None if dweight is None else dweight.to(row_gradient_dtype(x, weight)), None
        near = not rows.rms and dy.dtype == x.dtype and native.near(mean, rstd)
        if near and x.dtype == compute_dtype(x):
            return _layer_norm_backward(dy, dtotal, kept, rows, want_affine)
        return self._some_rows_backward(dy, dtotal, kept, rows, size, want_affine, near)

    def _some_rows_backward(
        self,
        dy: Tensor,
        dtotal: Tensor | None,
        kept: KeptByRowNorm,
        rows: Rows,
        size: int,
        want_affine: bool,
        near: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The reference's formula for some rows at a time; `near`: torch's in float32, whose sums are
        exact."""
        x, shape = kept.x, kept.x.shape[rows.start :]
        each, of_flat = (-1, *(1,) * len(shape)), rows._replace(start=1, stop=1 + len(shape))
        flat, dy = x.reshape(-1, *shape), dy.reshape(-1, *shape)
        mean, rstd = kept.mean.reshape(each), kept.rstd.reshape(each)
        through = None if dtotal is None else dtotal.reshape(-1, *shape)
        dx, sums = torch.empty_like(flat), []
        for part in _row_parts(flat, size):
            some = KeptByRowNorm(flat[part], mean[part], rstd[part], kept.weight)
            given = dy[part], None if through is None else through[part], some, of_flat
            if rows.rms:
                dx[part], dweight = _rms_norm_backward(*given, want_affine)
                affine = [] if dweight is None else [dweight, dweight]
            elif near:
                some = some._replace(x=some.x.to(mean.dtype))
                of_rows = _layer_norm_backward(dy[part].to(mean.dtype), given[1], some, of_flat, want_affine)
                dx[part], affine = of_rows[0], [v for v in of_rows[1:] if v is not None]
            else:
                dx[part] = self.row_input_grad(*given)
                affine = [*self.row_grad_sums(dy[part], some, of_flat)] if want_affine else []
            if want_affine:
                sums.append(torch.stack(affine).to(statistics_dtype(x)))
        if not want_affine:
            return dx.reshape(x.shape), None, None
        dweight, dbias = torch.stack(sums).sum(0).to(row_gradient_dtype(x, kept.weight))
        return dx.reshape(x.shape), dweight, None if rows.rms else dbias


def _row_size(x: Tensor, rows: Rows) -> int:
    """The number of values per row if rows are contiguous; otherwise 0."""
    lines = rows.stop == x.dim() and x.is_contiguous()
    return row_plan(x.shape, rows.start, rows.stop).kept if lines else 0


def _row_parts(flat: Tensor, size: int) -> Iterator[slice]:
    step = max(1, _SLICE // size)
    return (slice(i, i + step) for i in range(0, flat.shape[0], step))


def _rms_norm_backward(
    dy: Tensor, dtotal: Tensor | None, kept: KeptByRowNorm, rows: Rows, want_affine: bool
) -> tuple[Tensor, Tensor | None]:
    """dx and dweight by the reference's formula, in few tensors."""
    x, _, rstd, weight, *_ = kept
    dims, dtype, dweight = [*range(rows.start, x.dim())], rstd.dtype, None
    xhat, g = x.to(dtype) * rstd, dy.to(dtype)
    product = g * xhat
    if want_affine:
        dweight = product.sum([*range(rows.start)]) if rows.start else product.clone()
    if weight is not None:
        weight = shifted_weight(weight, rows.weight_offset, dtype)
        g, product = g * weight, product.mul_(weight)
    dx = torch.addcmul(g, xhat, product.mean(dims, keepdim=True), value=-1).mul_(rstd)
    return (dx if dtotal is None else dx.add_(dtotal)).to(x.dtype), dweight


def _layer_norm_backward(
    dy: Tensor, dtotal: Tensor | None, kept: KeptByRowNorm, rows: Rows, want_affine: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    x, mean, rstd, weight, *_ = kept
    shape, dtype = x.shape[rows.start :], compute_dtype(x)
    gamma = torch.ones(shape, dtype=dtype)
    gamma = gamma if weight is None else shifted_weight(weight, rows.weight_offset, dtype)
    wanted = True, want_affine, want_affine
    given = dy.contiguous(), x, shape, mean, rstd, gamma, torch.zeros_like(gamma), wanted
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(*given)
    dx = dx if dtotal is None else (dx.to(dtype) + dtotal.to(dtype)).to(x.dtype)
    if not want_affine:
        return dx, None, None
    dtype = row_gradient_dtype(x, weight)
    return dx, dweight.to(dtype), dbias.to(dtype)
