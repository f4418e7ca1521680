"""The reference's row family: layer and RMS norm over the axes start..stop-1. Read `reference.py` first."""

from __future__ import annotations

import torch
from torch import Tensor

from leannorm._types import KeptByRowNorm, Maybe, MaybeTensor, Rows
from leannorm.ops.layout import laid_out_for
from leannorm.ops.plan import row_plan
from leannorm.ops.precision import (
    compute_dtype,
    in_dtype,
    power,
    row_gradient_dtype,
    statistics_dtype,
    sum_of_squares,
)


def _along_row(v: Tensor, x: Tensor, start: int, stop: int) -> Tensor:
    """weight or bias of the normalized shape, spread so that it broadcasts against x."""
    return v.reshape(*x.shape[start:stop], *(1,) * (x.dim() - stop))


def shifted_weight(weight: Tensor, offset: float, dtype: torch.dtype) -> Tensor:
    """weight + offset, in the dtype of the arithmetic."""
    weight = weight.to(dtype)
    return weight if offset == 0 else weight + offset


def rounded_then_weighted(xhat: Tensor, weight: Tensor | None, offset: float, *span: int) -> Tensor:
    """xhat, which has the input's dtype, times (weight + offset), in the dtype that torch promotes both to.

    It is torch's own product, so it equals Llama's formula bit for bit in any mix of dtypes.
    """
    if weight is None:
        return xhat
    dtype = torch.promote_types(xhat.dtype, weight.dtype)
    weight = weight if offset == 0 else shifted_weight(weight, offset, compute_dtype(weight))
    return in_dtype(xhat * _along_row(weight, xhat, *span), dtype)


def of_valid(valid: Tensor | None, v: MaybeTensor) -> MaybeTensor:
    """v with 0 in all rows that are not valid, whatever their values are; in v's layout."""
    return v if valid is None or v is None else v.masked_fill(~valid, 0)


class RowVerbs:
    """Statistics of every row: layer and RMS norm over the axes start..stop-1.

    `valid` is bool, of the statistics' shape: a row for which it is False is not read, and gets zeros.
    """

    def row_moments(self, x: Tensor, rows: Rows, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """mean and rstd of every row, in compute dtype, with size 1 for the normalized axes (RMS: mean is
        0)."""

        def rstd_of(square: Tensor) -> Tensor:
            square = square + rows.eps
            if valid is None:
                return power(square, -0.5).to(dtype)
            return of_valid(valid, power(torch.where(valid, square, 1), -0.5)).to(dtype)

        dims, dtype, wide = tuple(range(rows.start, rows.stop)), compute_dtype(x), statistics_dtype(x)
        x = of_valid(valid, in_dtype(x, dtype))
        count = max(row_plan(x.shape, rows.start, rows.stop).kept, 1)
        if rows.rms:
            square = sum_of_squares(x, dims, wide) / count
            return torch.zeros_like(square, dtype=dtype), rstd_of(square)
        mean = x.sum(dims, keepdim=True) / count
        deviation = x - mean
        rest = deviation.sum(dims, keepdim=True).to(wide) / count
        square = sum_of_squares(deviation, dims, wide) / count - rest.square()
        return mean + rest.to(dtype), rstd_of(square.clamp_min(0))

    def row_normalize(
        self, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, rows: Rows
    ) -> Tensor:
        """(x - mean) * rstd * (weight + weight_offset) + bias, in x's dtype.

        With `cast_before`, which takes no bias, computed by `rounded_then_weighted`.
        """
        y, start, stop = (in_dtype(x, mean.dtype) - mean) * rstd, rows.start, rows.stop
        if rows.cast_before:
            return rounded_then_weighted(in_dtype(y, x.dtype), weight, rows.weight_offset, start, stop)
        if weight is not None:
            y = y * _along_row(shifted_weight(weight, rows.weight_offset, y.dtype), x, start, stop)
        y = y if bias is None else y + _along_row(bias.to(y.dtype), x, start, stop)
        return in_dtype(y, x.dtype)

    def row_forward(
        self, x: Tensor, residual: Maybe, weight: Maybe, bias: Maybe, rows: Rows, valid: Maybe = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """y, x + residual (x itself without one), mean, rstd."""
        total = x if residual is None else of_valid(valid, x + residual.to(x.dtype))
        mean, rstd = self.row_moments(total, rows, valid)
        y = self.row_normalize(of_valid(valid, total), mean, rstd, weight, bias, rows)
        return of_valid(valid, y), total, mean, rstd

    def row_grad_sums(self, dy: Tensor, kept: KeptByRowNorm, rows: Rows) -> tuple[Tensor, Tensor]:
        """dweight = sum over rows of dy * (x - mean) * rstd; dbias = sum of dy."""
        x, mean, rstd, *_ = kept
        dy, shape = dy.to(mean.dtype), x.shape[rows.start : rows.stop]
        dims = [d for d in range(x.dim()) if not rows.start <= d < rows.stop]
        dgamma, dbeta = dy * ((x.to(mean.dtype) - mean) * rstd), dy
        if dims:
            dgamma, dbeta = dgamma.sum(dims), dbeta.sum(dims)
        return dgamma.reshape(shape), dbeta.reshape(shape)

    def row_input_grad(self, dy: Tensor, dtotal: Tensor | None, kept: KeptByRowNorm, rows: Rows) -> Tensor:
        """dx = a*dy*weight + b*x + c, of each row; RMS norm has no c. `dtotal` goes straight through to x.

        With ds = sum(dy*w*x), db = sum(dy*w), n values per row:
        a = rstd, b = (db*mean - ds) * a^3 / n, c = -b*mean - db*a/n.
        Written here with xhat = (x - mean)*rstd instead of x, which is the same formula without the
        cancellation in db*mean - ds and the overflow of a^3: dx = a * (g - mean(g) - xhat * mean(g*xhat)).
        """
        x, mean, rstd, weight, _ = kept
        start, stop = rows.start, rows.stop
        dims = tuple(range(start, stop))
        count = max(row_plan(x.shape, start, stop).kept, 1)
        dy = laid_out_for(x, dy)  # so that dx has x's layout
        g = dy.to(mean.dtype)
        if weight is not None:
            g = g * _along_row(shifted_weight(weight, rows.weight_offset, g.dtype), x, start, stop)
        xhat = (x.to(mean.dtype) - mean) * rstd
        inner = g - xhat * ((g * xhat).sum(dims, keepdim=True) / count)
        if not rows.rms:
            inner = inner - g.sum(dims, keepdim=True) / count
        dx = rstd * inner
        return (dx if dtotal is None else dx + dtotal.to(dx.dtype)).to(x.dtype)

    def row_backward(
        self, dy: Tensor, dtotal: Tensor | None, kept: KeptByRowNorm, rows: Rows, want_affine: bool = True
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """dx, dweight, dbias (normalized shape, `row_gradient_dtype`; None unless requested; RMS: no
        bias)."""
        valid = kept.valid
        if valid is not None:
            dy, dtotal = of_valid(valid, dy), of_valid(valid, dtotal)
            kept = kept._replace(x=of_valid(valid, kept.x))
        dx = self.row_input_grad(dy, dtotal, kept, rows)
        if not want_affine:
            return dx, None, None
        dweight, dbias = self.row_grad_sums(dy, kept, rows)
        dtype = row_gradient_dtype(kept.x, kept.weight)
        return dx, dweight.to(dtype), None if rows.rms else dbias.to(dtype)
