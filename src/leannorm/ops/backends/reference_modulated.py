"""The reference's row norms with inputs besides the parameters: a scale and a shift, a gate. Read
`reference_rows.py` first.

All normalize the axes from `start` to the last. A scale, a shift and the gate of a residual have some of the
input's leading axes, each of its size or 1, followed by the normalized shape; over the other axes they are
broadcast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leannorm._types import Gating, KeptByAdaNorm, KeptByGatedNorm, KeptByRowNorm, Maybe, Modulation, Rows
from leannorm.ops.activation import ACTIVATIONS
from leannorm.ops.backends.reference_rows import RowVerbs, rounded_then_weighted
from leannorm.ops.precision import compute_dtype, in_dtype


def spread(v: Tensor, x: Tensor, start: int) -> Tensor:
    """v, with an axis of size 1 for each leading axis of x that it lacks."""
    leading = v.dim() - (x.dim() - start)
    return v.reshape(*v.shape[:leading], *(1,) * (start - leading), *v.shape[leading:])


def summed_like(g: Tensor, v: Tensor, start: int) -> Tensor:
    """g, of the input's shape, summed over the axes that v is broadcast over."""
    wide = spread(v, g, start)
    axes = [d for d in range(start) if wide.shape[d] == 1 and g.shape[d] != 1]
    return (g.sum(axes, keepdim=True) if axes else g).reshape(v.shape)


class ModulatedVerbs(RowVerbs):
    """norm(x + gate * branch) * (1 + scale) + shift, and RMS norm with a gate of the input's shape."""

    def add_gated(self, x: Tensor, branch: Tensor, gate: Tensor | None, start: int) -> Tensor:
        """x + gate * branch, rounded once."""
        dtype = compute_dtype(x)
        added = branch.to(dtype) if gate is None else spread(gate, x, start).to(dtype) * branch.to(dtype)
        return in_dtype(x.to(dtype) + added, x.dtype)

    def add_gated_backward(
        self, dtotal: Tensor, branch: Tensor | None, gate: Tensor | None, start: int
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients of the branch, and of the gate if the branch is given."""
        if gate is None:
            return dtotal, None
        dtype = compute_dtype(dtotal)
        wide = dtotal.to(dtype)
        dgate = None if branch is None else summed_like(wide * branch.to(dtype), gate, start)
        return (wide * spread(gate, dtotal, start).to(dtype)).to(dtotal.dtype), dgate

    def ada_forward(
        self, x: Tensor, modulation: Modulation, rows: Rows
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """y, x + gate * branch (x itself without a branch), mean, rstd."""
        branch, gate, scale, shift, weight, bias = modulation
        dtype, start = compute_dtype(x), rows.start
        total = x if branch is None else self.add_gated(x, branch, gate, start)
        mean, rstd = self.row_moments(total, rows)
        y = self.row_normalize(in_dtype(total, dtype), mean, rstd, weight, bias, rows)
        y = y * (1 + spread(scale, x, start).to(dtype))
        y = y if shift is None else y + spread(shift, x, start).to(dtype)
        return in_dtype(y, x.dtype), total, mean, rstd

    def ada_backward(
        self,
        dy: Tensor,
        dtotal: Tensor | None,
        kept: KeptByAdaNorm,
        rows: Rows,
        want_modulation: bool = True,
        want_affine: bool = True,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """dx (of the sum), dscale, dshift, dweight, dbias, all but dx in the compute dtype.

        A kernel may return dscale and dshift in x's dtype if they are not sums.
        """
        x, mean, rstd, scale, weight, bias, *_ = kept
        dtype, start = mean.dtype, rows.start
        dy, wide = dy.to(dtype), x.to(dtype)
        factor = 1 + spread(scale, x, start).to(dtype)
        of_row = KeptByRowNorm(wide, mean, rstd, weight)
        dx, dweight, dbias = self.row_backward(dy * factor, dtotal, of_row, rows, want_affine)
        dscale = dshift = None
        if want_modulation:
            z = self.row_normalize(wide, mean, rstd, weight, bias, rows)
            dscale, dshift = summed_like(dy * z, scale, start), summed_like(dy, scale, start)
        return dx.to(x.dtype), dscale, dshift, dweight, dbias

    def gated_forward(self, x: Tensor, gate: Tensor, weight: Maybe, gating: Gating) -> tuple[Tensor, Tensor]:
        """rms_norm(x) * act(gate) or rms_norm(x * act(gate)), and rstd."""
        start, dtype, first = gating.start, compute_dtype(x), gating.norm_before_gate
        rows = Rows(start, x.dim(), gating.eps, True)
        opened, value = ACTIVATIONS[gating.act].forward(gate.to(dtype)), x.to(dtype)
        value = value if first else value * opened
        mean, rstd = self.row_moments(value, rows)
        if gating.cast_before:
            y = rounded_then_weighted(in_dtype(value * rstd, x.dtype), weight, 0.0, start, x.dim())
        else:
            y = self.row_normalize(value, mean, rstd, weight, None, rows)
        if first:
            y = y * opened
        return (y if gating.cast_before and not first else in_dtype(y, x.dtype)), rstd

    def gated_backward(
        self, dy: Tensor, kept: KeptByGatedNorm, gating: Gating, want_affine: bool = True
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """dx, dgate, dweight (compute dtype)."""
        x, gate, rstd, weight = kept
        dtype, activation = rstd.dtype, ACTIVATIONS[gating.act]
        rows = Rows(gating.start, x.dim(), gating.eps, True)
        dy, value, z = dy.to(dtype), x.to(dtype), gate.to(dtype)
        opened, slope, mean = activation.forward(z), activation.grad(z), torch.zeros_like(rstd)
        if gating.norm_before_gate:
            of_row = KeptByRowNorm(value, mean, rstd, weight)
            dgate = dy * self.row_normalize(value, mean, rstd, weight, None, rows) * slope
            dx, dweight, _ = self.row_backward(dy * opened, None, of_row, rows, want_affine)
        else:
            of_row = KeptByRowNorm(value * opened, mean, rstd, weight)
            dvalue, dweight, _ = self.row_backward(dy, None, of_row, rows, want_affine)
            dx, dgate = dvalue * opened, dvalue * value * slope
        return dx.to(x.dtype), dgate.to(gate.dtype), dweight
