"""The reference's row family: layer and RMS norm over the axes start..stop-1. Read `reference.py` first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leannorm._types import KeptByRowNorm, Maybe, MaybeTensor, Rows, RowTensors
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


def has_lines(v: Tensor | None, rows: Rows) -> bool:
    """Whether a parameter has axes before those of the normalized shape."""
    return v is not None and v.dim() > rows.stop - rows.start


def spread(v: Tensor, x: Tensor, start: int) -> Tensor:
    """v, with an axis of size 1 for each axis of x before the normalized ones that it lacks."""
    leading = v.dim() - (x.dim() - start)
    return v.reshape(*v.shape[:leading], *(1,) * (start - leading), *v.shape[leading:])


def summed_like(g: Tensor, v: Tensor, start: int) -> Tensor:
    """g, of the input's shape, summed over the axes that v is broadcast over."""
    wide = spread(v, g, start)
    axes = [d for d in range(start) if wide.shape[d] == 1 and g.shape[d] != 1]
    return (g.sum(axes, keepdim=True) if axes else g).reshape(v.shape)


def _along_row(v: Tensor, x: Tensor, start: int, stop: int) -> Tensor:
    """weight or bias, spread so that it broadcasts against x."""
    if v.dim() > stop - start:
        return spread(v, x, start)
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

    `valid` is bool, of the statistics' shape: a row for which it is False is not read, and gets zeros. The
    weight, with it the bias, and the gate of a residual may have lines: some of the input's leading axes,
    each of its size or 1, then the normalized shape; over the other axes they are broadcast.
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

    def add_residual(self, x: Tensor, residual: Tensor, gate: Tensor | None, start: int) -> Tensor:
        """x + gate * residual, rounded once."""
        dtype = compute_dtype(x)
        added = residual.to(dtype)
        added = added if gate is None else spread(gate, x, start).to(dtype) * added
        return in_dtype(x.to(dtype) + added, x.dtype)

    def row_forward(
        self, tensors: RowTensors, rows: Rows, valid: Maybe = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """y, x + gate * residual (x itself without one), mean, rstd."""
        x, residual, gate, _, _, weight, bias = tensors
        total = x if residual is None else of_valid(valid, self.add_residual(x, residual, gate, rows.start))
        mean, rstd = self.row_moments(total, rows, valid)
        y = self.row_normalize(of_valid(valid, total), mean, rstd, weight, bias, rows)
        return of_valid(valid, y), total, mean, rstd

    def row_grad_sums(self, dy: Tensor, kept: KeptByRowNorm, rows: Rows) -> tuple[Tensor, Tensor]:
        """dweight = sum of dy * (x - mean) * rstd over the rows of each line; dbias = sum of dy."""
        x, mean, rstd, weight, *_ = kept
        dy, shape = dy.to(mean.dtype), x.shape[rows.start : rows.stop]
        dims = [d for d in range(x.dim()) if not rows.start <= d < rows.stop]
        dgamma, dbeta = dy * ((x.to(mean.dtype) - mean) * rstd), dy
        if weight is not None and has_lines(weight, rows):
            return summed_like(dgamma, weight, rows.start), summed_like(dbeta, weight, rows.start)
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
        x, mean, rstd, weight, *_ = kept
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
        self,
        dy: Tensor,
        dtotal: Tensor | None,
        kept: KeptByRowNorm,
        rows: Rows,
        want_affine: bool = True,
        want_bias: bool | None = None,
    ) -> tuple[Any, ...]:
        """dx, dweight, dbias (the weight's or normalized shape, `row_gradient_dtype`; None unless requested),
        and with a gate what `gate_backward` gives. A bias is requested unless it is an RMS norm."""
        valid = kept.valid
        if valid is not None:
            dy, dtotal = of_valid(valid, dy), of_valid(valid, dtotal)
            kept = kept._replace(x=of_valid(valid, kept.x))
        dx = self.row_input_grad(dy, dtotal, kept, rows)
        dweight = dbias = None
        if want_affine:
            sums, dtype = self.row_grad_sums(dy, kept, rows), row_gradient_dtype(kept.x, kept.weight)
            dweight, dbias = (v.to(kept.mean.dtype if has_lines(kept.weight, rows) else dtype) for v in sums)
        dbias = dbias if want_bias or (want_bias is None and not rows.rms) else None
        return dx, dweight, dbias, *(() if kept.gate is None else self.gate_backward(dx, kept, rows))

    def gate_backward(self, dtotal: Tensor, kept: KeptByRowNorm, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """The gradients of the residual, and of its gate if the residual is given."""
        gate, residual = kept.gate, kept.residual
        if gate is None:
            return dtotal, None
        dtype = compute_dtype(dtotal)
        wide = dtotal.to(dtype)
        dgate = None if residual is None else summed_like(wide * residual.to(dtype), gate, rows.start)
        return (wide * spread(gate, dtotal, rows.start).to(dtype)).to(dtotal.dtype), dgate
