"""RMS norm with a gate of the input's shape as an autograd function: what it saves, and its backward pass.

Here is also what the functions of all row norms know of their call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from leannorm._types import KeptByGatedNorm, Rows
from leannorm.autograd.channel import applied_directly, twice_differentiable
from leannorm.ops.backends import REFERENCE, Backend
from leannorm.ops.modes import recorded, traced
from leannorm.ops.select import pick, transformed


class RowCall(NamedTuple):
    """The arguments of a row norm that are not tensors; `wide` as in `ChannelCall`."""

    backend: Backend
    rows: Rows
    wide: torch.dtype | None = None


class GatedNorm(torch.autograd.Function):
    """rms_norm(x) * act(gate), or rms_norm(x * act(gate)). Saves x, the gate and one statistic per row."""

    Kept = KeptByGatedNorm

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor | None, rows: Rows) -> Tensor:
        ctx.call = RowCall(pick(x, gate, weight), rows)
        y, rstd = ctx.call.backend.row_gated_forward(x, gate, weight, rows)
        ctx.save_for_backward(*KeptByGatedNorm(x, gate, rstd, weight))
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        kept, (backend, rows, _) = KeptByGatedNorm(*ctx.saved_tensors), ctx.call
        if twice_differentiable():
            backend = REFERENCE
            _, rstd = REFERENCE.row_gated_forward(kept.x, kept.gate, None, rows._replace(cast_before=False))
            kept = kept._replace(rstd=rstd)
        needed = ctx.needs_input_grad
        found = backend.row_gated_backward(dy, kept, rows, needed[2])
        return *(v if need else None for v, need in zip(found, needed, strict=False)), None


_apply = applied_directly(GatedNorm)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor | None, rows: Rows) -> Tensor:
    """`GatedNorm`, or under a functorch transform its formula in plain torch."""
    in_transform = transformed(x, gate, weight)
    if in_transform or not recorded(x, gate, weight):
        backend = REFERENCE if in_transform else pick(x, gate, weight)
        return backend.row_gated_forward(x, gate, weight, rows)[0]
    apply = GatedNorm.apply if traced() else _apply
    return apply(x, gate, weight, rows)  # type: ignore[no-any-return]
