"""The reference's RMS norm with a gate of the input's shape. Read `reference_rows.py` first."""

from __future__ import annotations

import torch
from torch import Tensor

from leannorm._types import KeptByGatedNorm, KeptByRowNorm, Maybe, Rows
from leannorm.ops.activation import ACTIVATIONS
from leannorm.ops.backends.reference_rows import RowVerbs, rounded_then_weighted
from leannorm.ops.precision import compute_dtype, in_dtype


class GatedVerbs(RowVerbs):
    """The axes from `start` to the last are normalized."""

    def row_gated_forward(self, x: Tensor, gate: Tensor, weight: Maybe, rows: Rows) -> tuple[Tensor, Tensor]:
        """rms_norm(x) * act(gate) or rms_norm(x * act(gate)), and rstd."""
        dtype, first = compute_dtype(x), rows.norm_before_gate
        opened, value = ACTIVATIONS[str(rows.act)].forward(gate.to(dtype)), x.to(dtype)
        value = value if first else value * opened
        mean, rstd = self.row_moments(value, rows)
        if rows.cast_before:
            y = rounded_then_weighted(in_dtype(value * rstd, x.dtype), weight, 0.0, rows.start, rows.stop)
        else:
            y = self.row_normalize(value, mean, rstd, weight, None, rows)
        if first:
            y = y * opened
        return (y if rows.cast_before and not first else in_dtype(y, x.dtype)), rstd

    def row_gated_backward(
        self, dy: Tensor, kept: KeptByGatedNorm, rows: Rows, want_affine: bool = True
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """dx, dgate, dweight (compute dtype)."""
        x, gate, rstd, weight = kept
        dtype, activation = rstd.dtype, ACTIVATIONS[str(rows.act)]
        dy, value, z = dy.to(dtype), x.to(dtype), gate.to(dtype)
        opened, slope, mean = activation.forward(z), activation.grad(z), torch.zeros_like(rstd)
        if rows.norm_before_gate:
            of_row, unrounded = KeptByRowNorm(value, mean, rstd, weight), rows._replace(cast_before=False)
            dgate = dy * self.row_normalize(value, mean, rstd, weight, None, unrounded) * slope
            dx, dweight, _ = self.row_backward(dy * opened, None, of_row, rows, want_affine)
        else:
            of_row = KeptByRowNorm(value * opened, mean, rstd, weight)
            dvalue, dweight, _ = self.row_backward(dy, None, of_row, rows, want_affine)
            dx, dgate = dvalue * opened, dvalue * value * slope
        return dx.to(x.dtype), dgate.to(gate.dtype), dweight
