"""The operators of `schema.py` for RMS norm with a gate of the input's shape, which see tensors as rows.

Launches of each call, and the bytes that memory must move, in sizes S of the input:

    forward      one launch, 3 S
    backward     one launch, 5 S, and the shares' sum
"""

from __future__ import annotations

import torch
from torch import Tensor

from leannorm.ops.backends.triton import row_gate_kernels as kernels
from leannorm.ops.backends.triton import row_tiles as tiles
from leannorm.ops.backends.triton.activations import check_activation
from leannorm.ops.backends.triton.launch import processors
from leannorm.ops.backends.triton.rows import run, unspilled
from leannorm.ops.backends.triton.shares import Shares
from leannorm.ops.backends.triton.tape import empty, taped
from leannorm.ops.plan import Plan
from leannorm.ops.precision import compute_dtype


def _check(x: Tensor, *others: Tensor | None) -> None:
    """Raise for arguments that the kernels, which see pointers and integers, would read wrongly."""
    for other in others:
        if other is not None and not (other.dtype == x.dtype and other.shape == x.shape):
            raise RuntimeError("dy and gate must have the dtype and shape of x")


def _step(t: Tensor) -> int:
    """The step from one row to the next; each row is contiguous."""
    if t.shape[1] > 1 and t.stride(1) != 1:
        raise RuntimeError(f"rows must be lines of memory, strides are {t.stride()}")
    return t.stride(0) if t.shape[0] > 1 else t.shape[1]


def _rows(kept: int, *tensors: Tensor) -> list[Tensor]:
    """The tensors, copied if the step between rows does not allow loads as wide as the tile's."""
    divides = tiles.vector(kept, 1)
    return [t.contiguous() if _step(t) % divides else t for t in tensors]


@taped
def row_gated_forward(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, act: str, norm_before_gate: bool, cast_before: bool
) -> tuple[Tensor, Tensor]:
    check_activation(act)
    _check(x, gate)
    plan = Plan(x.shape[0], x.shape[1], 1)
    y, rstd = empty(x.shape, x.dtype, x.device), empty(x.shape[:1], compute_dtype(x), x.device)
    x, gate = _rows(plan.kept, x, gate)
    tile = unspilled(tiles.gated(plan.kept, x.element_size()), x, 128)
    run(
        kernels.gated_forward,
        tile.needed(plan.outer, 1),
        *(x, tile, plan),
        *(x, gate, weight.contiguous(), y, rstd, plan.outer, plan.kept, _step(x), _step(gate)),
        EPS=eps,
        ACT=act,
        BEFORE=norm_before_gate,
        CHECKED=x.dtype in (torch.float32, torch.bfloat16),
        CAST=cast_before and x.element_size() == 2,
        WHOLE=tile.whole,
    )
    return y, rstd


@taped
def row_gated_backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    rstd: Tensor,
    weight: Tensor,
    act: str,
    norm_before_gate: bool,
    want_affine: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    check_activation(act)
    _check(x, dy, gate)
    outer, kept = x.shape
    plan = Plan(outer, kept, 1)
    dx, dgate = (empty(x.shape, x.dtype, x.device) for _ in range(2))
    dweight = empty((1 if want_affine else 0, kept), compute_dtype(x), x.device)
    dy, x, gate = _rows(kept, dy, x, gate)
    tile, programs, _, _, stages = tiles.gated_backward(kept, x.element_size())
    count = tile.needed(outer, 1)
    programs = min(count, processors(x.device) * programs)
    # for rows longer than a tile a second kernel sums
    at_once = dweight if want_affine and tile.whole else None
    shares = Shares(at_once, None, programs, kept, rstd.dtype)
    steps = _step(dy), _step(x), _step(gate)
    tensors = dy, x, gate, rstd.contiguous(), weight.contiguous(), dx, dgate
    form = {"ACT": act, "BEFORE": norm_before_gate}
    if tile.whole:
        arguments = (*tensors, shares.dweight, outer, kept, count, *steps)
        run(kernels.gated_backward_tile, programs, x, tile, plan, *arguments, **form, STAGES=stages)
    else:
        run(kernels.gated_backward_long, count, x, tile, plan, *tensors, outer, kept, *steps, **form)
    if want_affine and not tile.whole:
        tile = tiles.shares(1, x.element_size())
        count, blocks = tile.needed(outer, 1), -(-kept // tile.block)
        parts = min(count, max(4 * processors(x.device) // blocks, 1))
        shares = Shares(dweight, None, parts, kept, rstd.dtype)
        run(
            kernels.gated_shares,
            parts * blocks,
            *(x, tile, plan),
            *(*tensors[:4], shares.dweight, outer, kept, count, parts, *steps),
            ACT=act,
        )
    shares.add_up()
    return dx, dgate, dweight
