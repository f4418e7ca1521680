"""Row norms with a scale and a shift, or with a gate, as autograd functions.

Saved in addition to the parameters, which the caller keeps anyway: x (or the sum) and one or two statistics
per row. A gated norm also saves its gate, which has x's shape, and a gated residual whose gate needs a
gradient saves the branch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leannorm._types import Gating, KeptByAdaNorm, KeptByGatedNorm, Modulation, Rows
from leannorm.autograd.channel import applied_directly, twice_differentiable
from leannorm.autograd.rows import mean_to_keep
from leannorm.ops.backends import REFERENCE
from leannorm.ops.modes import recorded, traced
from leannorm.ops.select import pick, transformed


def _in_dtypes(ctx: Any, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The gradients that are needed, each in its input's dtype."""
    needed = ctx.needs_input_grad
    return tuple(
        (g if g.dtype == dtype else g.to(dtype)) if need and g is not None else None
        for g, dtype, need in zip(gradients, ctx.dtypes, needed, strict=False)
    )


class AdaNorm(torch.autograd.Function):
    """norm(x + gate * branch) * (1 + scale) + shift, and with a branch the sum. The mean: `mean_to_keep`."""

    Kept = KeptByAdaNorm

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Any) -> tuple[Tensor, Tensor] | Tensor:
        *tensors, rows = others
        modulation = branch, gate, scale, _, weight, bias = Modulation(*tensors)
        backend = ctx.backend = pick(x, *tensors)
        y, total, mean, rstd = backend.ada_forward(x, modulation, rows)
        kept_x, centre = x if branch is None else total, mean_to_keep(mean, rows.rms, backend)
        of_gate = branch if gate is not None and ctx.needs_input_grad[2] else None
        ctx.save_for_backward(kept_x, centre, rstd, scale, weight, bias, of_gate, gate)
        ctx.rows, ctx.dtypes = rows, tuple(None if t is None else t.dtype for t in (x, *tensors))
        ctx.set_materialize_grads(False)
        return y if branch is None else (y, total)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None = None) -> tuple[Tensor | None, ...]:
        kept, rows = KeptByAdaNorm(*ctx.saved_tensors), ctx.rows
        needed, backend = ctx.needs_input_grad, ctx.backend
        if twice_differentiable():
            backend = REFERENCE
            mean, rstd = REFERENCE.row_moments(kept.x, rows)
            kept = kept._replace(mean=mean, rstd=rstd)
        dx, others = dtotal, (None,) * 4
        if dy is not None:
            if kept.mean is None:
                kept = kept._replace(mean=torch.zeros_like(kept.rstd))
            wanted = needed[3] or needed[4], needed[5] or needed[6]
            dx, *others = backend.ada_backward(dy, dtotal, kept, rows, *wanted)
        dbranch = dgate = None
        if dx is not None and (needed[1] or needed[2]):
            dbranch, dgate = backend.add_gated_backward(dx, kept.branch, kept.gate, rows.start)
        return (*_in_dtypes(ctx, (dx, dbranch, dgate, *others)), None)


class GatedNorm(torch.autograd.Function):
    """rms_norm(x) * act(gate), or rms_norm(x * act(gate))."""

    Kept = KeptByGatedNorm

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor | None, gating: Gating) -> Tensor:
        ctx.backend = pick(x, gate, weight)
        y, rstd = ctx.backend.gated_forward(x, gate, weight, gating)
        ctx.save_for_backward(*KeptByGatedNorm(x, gate, rstd, weight))
        ctx.gating, ctx.dtypes = gating, tuple(None if t is None else t.dtype for t in (x, gate, weight))
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        kept, gating, backend = KeptByGatedNorm(*ctx.saved_tensors), ctx.gating, ctx.backend
        if twice_differentiable():
            backend = REFERENCE
            _, rstd = REFERENCE.gated_forward(kept.x, kept.gate, None, gating._replace(cast_before=False))
            kept = kept._replace(rstd=rstd)
        gradients = backend.gated_backward(dy, kept, gating, ctx.needs_input_grad[2])
        return (*_in_dtypes(ctx, gradients), None)


_ada, _gated = applied_directly(AdaNorm), applied_directly(GatedNorm)


def ada_norm(x: Tensor, modulation: Modulation, rows: Rows) -> tuple[Tensor, Tensor]:
    """y and the sum (else x): `AdaNorm`, or under a functorch transform its formula in plain torch."""
    tensors = (x, *modulation)
    in_transform = transformed(*tensors)
    if in_transform or not recorded(*tensors):
        backend = REFERENCE if in_transform else pick(*tensors)
        y, total, _, _ = backend.ada_forward(x, modulation, rows)
        return y, total
    apply = AdaNorm.apply if traced() else _ada
    out = apply(*tensors, rows)
    return (out, x) if modulation.branch is None else out


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor | None, gating: Gating) -> Tensor:
    """`GatedNorm`, or under a functorch transform its formula in plain torch."""
    in_transform = transformed(x, gate, weight)
    if in_transform or not recorded(x, gate, weight):
        backend = REFERENCE if in_transform else pick(x, gate, weight)
        return backend.gated_forward(x, gate, weight, gating)[0]
    apply = GatedNorm.apply if traced() else _gated
    return apply(x, gate, weight, gating)  # type: ignore[no-any-return]
