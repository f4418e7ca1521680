"""The operators of `schema.py` for norms with a scale and a shift, a gated residual or a gate.

All view tensors as rows, and a scale, a shift or a gate as lines of (groups, kept), each for the same number
of consecutive rows. Launches of each call, and the bytes that memory must move, in sizes S of the input:

    ada forward      one launch, 2 S (4 S with a branch)
    ada backward     one launch, 3 S (4 S with the sum's gradient), and a second that adds up the programs'
                     shares where several go through a group; for rows longer than a tile three, 5 S (6 S).
                     Lines of single rows have no sums: 5 S in one launch, 1 S of them lines and 1 S dscale
    gate backward    one launch, 3 S, and the shares' sum
    gated forward    one launch, 3 S
    gated backward   one launch, 5 S, and the shares' sum
"""

from __future__ import annotations

import torch
from torch import Tensor

from leannorm._types import Maybe
from leannorm.ops.backends.compiled import flat
from leannorm.ops.backends.triton import row_gate_kernels as kernels
from leannorm.ops.backends.triton import row_tiles as tiles
from leannorm.ops.backends.triton.activations import check_activation
from leannorm.ops.backends.triton.launch import processors
from leannorm.ops.backends.triton.rows import (
    NO_LINE,
    BackwardCall,
    ForwardCall,
    Line,
    grouped,
    run,
    run_backward,
    run_forward,
    unspilled,
)
from leannorm.ops.backends.triton.shares import Shares
from leannorm.ops.backends.triton.tape import empty, taped
from leannorm.ops.plan import Plan
from leannorm.ops.precision import compute_dtype


def _lines(v: Tensor | None, x: Tensor) -> Line:
    """v as lines for x's rows, copied unless its step is a multiple of the width of loads."""
    if v is None:
        return NO_LINE
    if v.dim() != 2 or v.shape[1] != x.shape[1] or x.shape[0] % v.shape[0]:
        raise RuntimeError(f"lines are (groups, {x.shape[1]}) of {x.shape[0]} rows, got {tuple(v.shape)}")
    step = v.stride(0) if v.shape[0] > 1 else v.shape[1]
    if v.stride(1) != 1 or step % tiles.vector(v.shape[1], 1):
        v, step = v.contiguous(), v.shape[1]
    return Line(v, x.shape[0] // v.shape[0], step)


def _plan(x: Tensor) -> Plan:
    if x.dim() != 2 or not x.is_contiguous():
        raise RuntimeError(f"x must be contiguous rows, its strides are {x.stride()}")
    return Plan(x.shape[0], x.shape[1], 1)


def _check(x: Tensor, *others: Tensor | None) -> None:
    """Raise for arguments that the kernels, which see pointers and integers, would read wrongly."""
    for other in others:
        if other is not None and not (other.dtype == x.dtype and other.shape == x.shape):
            raise RuntimeError("dy, dtotal, branch and gate must have the dtype and shape of x")


@taped
def row_ada_forward(
    x: Tensor, branch: Maybe, gate: Maybe, factor: Tensor, addend: Tensor, one: float, eps: float, rms: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(x, branch)
    plan = _plan(x)
    y, total = (empty(shape, x.dtype, x.device) for shape in (x.shape, (0,) if branch is None else x.shape))
    mean, rstd = (empty(x.shape[:1], compute_dtype(x), x.device) for _ in range(2))
    of_gate, of_factor, of_addend = (_lines(v, x) for v in (gate, factor, addend))
    to = None if branch is None else total
    inputs = x, flat(branch), of_gate, of_factor, of_addend
    run_forward(ForwardCall(*inputs, y, to, mean, rstd, None, plan, eps, rms, float(one)))
    return y, total, mean, rstd


@taped
def row_ada_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    factor: Tensor,
    one: float,
    rms: bool,
    want_sums: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, dy, dtotal)
    plan, groups = _plan(x), factor.shape[0] if want_sums else 0
    dx = empty(x.shape, x.dtype, x.device)
    alone = groups == x.shape[0]  # then the sums of dy are dy
    counts = groups, 0 if alone else groups
    of_xhat, plain = (empty((n, x.shape[1]), factor.dtype, x.device) for n in counts)
    of_line = of_xhat if want_sums else None, plain if want_sums and not alone else None
    dy, dtotal, mean, rstd = dy.contiguous(), flat(dtotal), mean.contiguous(), rstd.contiguous()
    inputs = dy, dtotal, x, mean, rstd, None, _lines(factor, x)
    run_backward(BackwardCall(*inputs, dx, *of_line, plan, rms, float(one)))
    return dx, of_xhat, plain


@taped
def row_gate_backward(dtotal: Tensor, branch: Tensor | None, gate: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the branch and, if it is given, of the gate."""
    _check(dtotal, branch)
    plan, line = _plan(dtotal), _lines(gate, dtotal)
    groups, rows = grouped(line, plan)
    dbranch = empty(dtotal.shape, dtotal.dtype, dtotal.device)
    dgate = empty((0 if branch is None else gate.shape[0], plan.kept), gate.dtype, dtotal.device)
    tile = tiles.elementwise(plan.kept)
    count, blocks = tile.needed(rows, 1), -(-plan.kept // tile.block)
    parts = min(count, max(8 * processors(dtotal.device) // blocks // groups, 1))
    wanted = None if branch is None else dgate
    by_row = wanted is None or line.each == 1
    shares = Shares(wanted, None, 1 if by_row else parts, plan.kept, compute_dtype(dtotal), groups)
    run(
        kernels.gate_backward,
        parts * groups * blocks,
        *(dtotal, tile, plan),
        *(dtotal, flat(branch), line.values, dbranch, shares.dweight, rows, plan.kept, count, parts, groups),
        line.step,
        EACH=line.each == 1,
    )
    shares.add_up()
    return dbranch, dgate


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
