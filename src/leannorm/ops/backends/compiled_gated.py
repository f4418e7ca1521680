"""The verbs of `reference_gated.py` as calls of operators, which see a tensor as (rows, kept).

Tensors of a wider dtype than the input, which no kernel takes, are computed by the reference's formula.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from leannorm._types import KeptByGatedNorm, Maybe, Rows
from leannorm.ops.backends.compiled import Compiled, apart, wider
from leannorm.ops.plan import row_statistics_shape
from leannorm.ops.precision import compute_dtype


def _shaped(y: Tensor, x: Tensor) -> Tensor:
    """y in x's shape: no view for autograd, which forbids to edit a view that a function returns."""
    return torch.ops.aten._unsafe_view.default(y, x.shape)  # type: ignore[no-any-return]


class CompiledGated(Compiled):
    """Kernels for a gate of the input's shape."""

    def row_gated_forward(self, x: Tensor, gate: Tensor, weight: Maybe, rows: Rows) -> tuple[Tensor, Tensor]:
        start, stop, eps, _, _, cast_before, *gating = rows
        if x.numel() == 0 or wider(gate, x) or (cast_before and wider(weight, x)):
            return super().row_gated_forward(x, gate, weight, rows)
        both = [apart(t, start, x.dtype) for t in (x, gate)]
        weight = self._weight(x, weight, start)
        y, rstd = self.ops.row_gated_forward(*both, weight, eps, *gating, cast_before)
        return _shaped(y, x), rstd.view(row_statistics_shape(x.shape, start, stop))

    def row_gated_backward(
        self, dy: Tensor, kept: KeptByGatedNorm, rows: Rows, want_affine: bool = True
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        x, gate, rstd, weight = kept
        start, *_, act, norm_before_gate = rows
        if x.numel() == 0 or wider(dy, x) or wider(gate, x):
            return super().row_gated_backward(dy, kept, rows, want_affine)
        three = [apart(t, start, x.dtype) for t in (dy, x, gate)]
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
        weight = weight if weight.dtype is dtype else weight.to(dtype)
        return weight.contiguous().view(-1)
