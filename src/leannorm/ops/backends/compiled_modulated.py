"""The verbs of `reference_modulated.py` as calls of operators, which see a tensor as (rows, kept).

A scale, a shift and a gate of the sum become lines (groups, kept) of the arithmetic's dtype, each for the
same number of consecutive rows. One that is broadcast otherwise, over samples but not over tokens, becomes a
line for every row. Tensors of a wider dtype than the input, which no kernel takes, are computed by the
reference's formula.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from leannorm._types import Gating, KeptByAdaNorm, KeptByGatedNorm, Maybe, Modulation, Rows
from leannorm.ops.backends.compiled import Compiled
from leannorm.ops.backends.reference_modulated import spread, summed_like
from leannorm.ops.plan import row_statistics_shape
from leannorm.ops.precision import compute_dtype


def _rows(t: Tensor, start: int, dtype: torch.dtype) -> Tensor:
    """(rows, kept), contiguous."""
    return t.to(dtype).contiguous().view(-1, prod(t.shape[start:]))


def _apart(t: Tensor, start: int, dtype: torch.dtype) -> Tensor:
    """(rows, kept), each row contiguous; a copy only if the axes do not make it so."""
    t = t.to(dtype).reshape(-1, prod(t.shape[start:]))
    return t if t.stride(1) == 1 or t.shape[1] == 1 else t.contiguous()


def _wider(t: Tensor | None, x: Tensor) -> bool:
    """Whether t loses digits in the dtype of x."""
    return t is not None and torch.promote_types(t.dtype, x.dtype) != x.dtype


def _by_group(wide: Tensor, x: Tensor, start: int) -> bool:
    """Whether v, spread to x's axes, has x's sizes on the first axes and size 1 after them."""
    broadcast = False
    for size, of_x in zip(wide.shape[:start], x.shape[:start], strict=True):
        if of_x == 1:
            continue
        if broadcast and size != 1:
            return False
        broadcast = size == 1
    return True


def _from_lines(lines: Tensor, v: Tensor, x: Tensor, start: int) -> Tensor:
    """Sums over each group's rows, of v's shape."""
    if lines.numel() == v.numel():
        return lines.view(v.shape)
    return summed_like(lines.view(x.shape), v, start)


class CompiledModulated(Compiled):
    """Kernels for a scale and a shift, for a gated residual and for a gate."""

    narrow_lines = False  # whether the kernels take lines of x's dtype, and sum in the arithmetic's

    def _lines(self, v: Tensor, x: Tensor, start: int, narrow: bool = True) -> Tensor:
        """v as lines (groups, kept) of the arithmetic's dtype; with `narrow`, a line per row may stay as it
        is."""
        wide, shape = spread(v, x, start), x.shape[start:]
        stays = narrow and v.dtype == x.dtype and (self.narrow_lines or v.numel() == x.numel())
        if not _by_group(wide, x, start):
            wide, stays = wide.expand(*x.shape[:start], *shape), False
        return _apart(wide, start, x.dtype if stays else compute_dtype(x))

    def ada_forward(
        self, x: Tensor, modulation: Modulation, rows: Rows
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """weight and bias are multiplied into the lines, which are few if they are per sample."""
        branch, gate, scale, shift, weight, bias = modulation
        start = rows.start
        if x.numel() == 0 or _wider(branch, x):
            return super().ada_forward(x, modulation, rows)
        narrow = weight is None and bias is None
        factor, one = self._lines(scale, x, start, narrow), 1.0
        width, dtype = factor.shape[1], compute_dtype(x)
        if shift is None:
            addend = factor.new_zeros(1, width, dtype=dtype)
        else:
            addend = self._lines(shift, x, start, narrow)
        if weight is not None or bias is not None:
            factor, one = factor + 1, 0.0
            w, b = (None if p is None else p.to(factor.dtype).reshape(width) for p in (weight, bias))
            addend = addend if b is None else torch.addcmul(addend, factor, b)
            factor = factor if w is None else factor * w
        of_sum = (
            None if branch is None else _rows(branch, start, x.dtype),
            None if gate is None else self._lines(gate, x, start),
        )
        arguments = _rows(x, start, x.dtype), *of_sum, factor, addend, one, rows.eps, rows.rms
        y, total, mean, rstd = self.ops.row_ada_forward(*arguments)
        total = x if branch is None else total.view(x.shape)
        shape = row_statistics_shape(x.shape, start, x.dim())
        return y.view(x.shape), total, mean.view(shape), rstd.view(shape)

    def ada_backward(
        self,
        dy: Tensor,
        dtotal: Tensor | None,
        kept: KeptByAdaNorm,
        rows: Rows,
        want_modulation: bool = True,
        want_affine: bool = True,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Every gradient but dx follows from each group's sums of dy * xhat and of dy."""
        x, mean, rstd, scale, weight, bias, *_ = kept
        start, rms, wanted = rows.start, rows.rms, (want_modulation, want_affine)
        if x.numel() == 0:
            return super().ada_backward(dy, dtotal, kept, rows, *wanted)
        factor, one = self._lines(scale, x, start, weight is None and bias is None and not want_affine), 1.0
        w, b = (None if p is None else p.to(factor.dtype).reshape(-1) for p in (weight, bias))
        if w is not None or want_affine:
            factor, one = factor + 1, 0.0
        scaled = factor if w is None else factor * w
        dense = [None if t is None else _rows(t, start, x.dtype) for t in (dy, dtotal, x)]
        statistics = mean.reshape(-1), rstd.reshape(-1)
        dx, of_xhat, plain = self.ops.row_ada_backward(*dense, *statistics, scaled, one, rms, any(wanted))
        dscale = dshift = dweight = dbias = None
        alone = plain.shape[0] != of_xhat.shape[0]  # the sum over one row is dy itself
        itself = alone and scale.shape == dy.shape
        if alone and not (itself and b is None and not want_affine):
            plain = _rows(dy, start, of_xhat.dtype)
        if want_modulation:
            of_z = of_xhat if w is None else of_xhat * w
            of_z = of_z if b is None else torch.addcmul(of_z, plain, b)
            dscale = _from_lines(of_z, scale, x, start)
            # never a view of dy, which autograd would take for a tensor of its own
            dshift = dy if itself else _from_lines(plain.clone() if alone else plain, scale, x, start)
        if want_affine:
            dweight, dbias = ((factor * v).sum(0).view(x.shape[start:]) for v in (of_xhat, plain))
        return dx.view(x.shape), dscale, dshift, dweight, None if rms else dbias

    def add_gated_backward(
        self, dtotal: Tensor, branch: Tensor | None, gate: Tensor | None, start: int
    ) -> tuple[Tensor, Tensor | None]:
        if gate is None or dtotal.numel() == 0 or _wider(branch, dtotal):
            return super().add_gated_backward(dtotal, branch, gate, start)
        rows = [None if t is None else _rows(t, start, dtotal.dtype) for t in (dtotal, branch)]
        dbranch, dgate = self.ops.row_gate_backward(*rows, self._lines(gate, dtotal, start))
        return dbranch.view(dtotal.shape), None if branch is None else _from_lines(dgate, gate, dtotal, start)

    def gated_forward(self, x: Tensor, gate: Tensor, weight: Maybe, gating: Gating) -> tuple[Tensor, Tensor]:
        start, *settings = gating
        if x.numel() == 0 or _wider(gate, x) or (gating.cast_before and _wider(weight, x)):
            return super().gated_forward(x, gate, weight, gating)
        both = [_apart(t, start, x.dtype) for t in (x, gate)]
        y, rstd = self.ops.row_gated_forward(*both, self._weight(x, weight, start), *settings)
        return y.view(x.shape), rstd.view(row_statistics_shape(x.shape, start, x.dim()))

    def gated_backward(
        self, dy: Tensor, kept: KeptByGatedNorm, gating: Gating, want_affine: bool = True
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        x, gate, rstd, weight = kept
        start, _, act, norm_before_gate, _ = gating
        if x.numel() == 0 or _wider(dy, x) or _wider(gate, x):
            return super().gated_backward(dy, kept, gating, want_affine)
        three = [_apart(t, start, x.dtype) for t in (dy, x, gate)]
        others = rstd.reshape(-1), self._weight(x, weight, start), act, norm_before_gate, want_affine
        dx, dgate, dweight = self.ops.row_gated_backward(*three, *others)
        dgate = dgate.view(x.shape)
        return (
            dx.view(x.shape),
            dgate if gate.dtype == x.dtype else dgate.to(gate.dtype),
            dweight.view(x.shape[start:]) if want_affine else None,
        )

    @staticmethod
    def _weight(x: Tensor, weight: Tensor | None, start: int) -> Tensor:
        dtype = compute_dtype(x)
        if weight is None:
            return x.new_ones(prod(x.shape[start:]), dtype=dtype)
        return weight.to(dtype).contiguous().view(-1)
