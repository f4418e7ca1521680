"""The per-row operators of `schema.py` on a GPU: memory layouts, then launches.

Launches of each call, and the bytes that memory must move, in sizes S of the input:

    forward      one launch, 2 S (4 S with a residual); where groups of rows share lines, each program goes
                 through many rows of a group, and reads its lines once
    backward     one launch, 3 S (4 S with the sum's gradient), and a second that adds up the programs'
                 shares of dweight and dbias, where several go through a group; for rows longer than a tile
                 three, 5 S (6 S). A weight that has a line for each row has no sums: 5 S in one launch, 1 S
                 of them lines and 1 S dweight
    with a gate  one launch more, 3 S, and the shares' sum

Rows that a mask leaves out are not read: each load is masked off there, and zeros are written. Contiguous
rows of a view, such as the heads of q, k and v, are read where they are (`row_views`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leannorm._types import MaybeTensor, Rows
from leannorm.ops.backends.compiled import flat
from leannorm.ops.backends.triton import row_backward_kernels, row_forward_kernels, row_gate_kernels
from leannorm.ops.backends.triton import row_tiles as tiles
from leannorm.ops.backends.triton.launch import launch, processors
from leannorm.ops.backends.triton.row_views import NO_VIEW, View, view_of
from leannorm.ops.backends.triton.shares import Shares
from leannorm.ops.backends.triton.tape import empty, empty_like, taped
from leannorm.ops.backends.triton.tiling import DEFAULT
from leannorm.ops.backends.triton.tuned import choice_for
from leannorm.ops.layout import dense_rows
from leannorm.ops.plan import Plan, row_plan, row_statistics_shape
from leannorm.ops.precision import compute_dtype, row_gradient_dtype


@cache
def _device(device: torch.device) -> tuple[int, int]:
    """The major compute capability, and the bytes of shared memory that a program may have."""
    if device.type != "cuda":
        return 9, 227 << 10
    properties = torch.cuda.get_device_properties(device)
    return properties.major, getattr(properties, "shared_memory_per_block_optin", 99 << 10)


def unspilled(tile: tiles.Tile, x: Tensor, registers: int) -> tiles.Tile:
    """A limit of registers for Blackwell: without one the compiler chooses 64 there, and spills."""
    free = tile.whole and tile.warps <= 8 and tile.registers is None
    return tile._replace(registers=registers) if free and _device(x.device)[0] >= 10 else tile


class Line(NamedTuple):
    """A parameter, or (groups, kept) lines of it: `each` rows share one, they begin `step` values apart."""

    values: Tensor | None
    each: int | None = None
    step: int | None = None


def _lines(v: Tensor | None, x: Tensor, plan: Plan) -> Line:
    """v as one line, or as lines for x's rows, copied unless their step is a multiple of the width of
    loads."""
    if v is None or v.numel() == plan.kept:
        return Line(flat(v))
    rows = plan.outer
    if v.dim() != 2 or v.shape[1] != plan.kept or not v.shape[0] or rows % v.shape[0]:
        raise RuntimeError(f"lines are (groups, {plan.kept}) of {rows} rows, got {tuple(v.shape)}")
    step = v.stride(0)
    if v.stride(1) != 1 or step % tiles.vector(v.shape[1], 1):
        v, step = v.contiguous(), v.shape[1]
    return Line(v, rows // v.shape[0], step)


def _check_lines(x: Tensor, stop: int, lines: Sequence[Line], gate: Line, valid: Tensor | None) -> bool:
    """Whether there are lines or a gate; they are for contiguous rows without a mask."""
    there = gate.values is not None or any(line.each is not None for line in lines)
    if there and (stop != x.dim() or not x.is_contiguous() or valid is not None):
        raise RuntimeError(
            "with a gate or lines of a weight, x must be contiguous rows without a mask, its strides are "
            f"{x.stride()}"
        )
    return there


def run(
    kernel: object, programs: int, x: Tensor, tile: tiles.Tile, plan: Plan, *arguments: Any, **constants: Any
) -> None:
    """Launch with the constants of the tile and of the layout."""
    constants |= {"TILE": tile.constants(plan.kept, plan.inner), "warps": tile.warps}
    launch(kernel, programs, x.device, *arguments, registers=tile.registers, **constants)


def _dense(x: Tensor, start: int, stop: int) -> tuple[Tensor, Plan]:
    """x if the kernels can address its rows, otherwise a contiguous copy; and its plan in the order of
    memory."""
    plan = dense_rows(x, start, stop)
    return (x, plan) if plan is not None else (x.contiguous(), row_plan(x.shape, start, stop))


def _like(x: Tensor, other: MaybeTensor) -> MaybeTensor:
    """`other` in the dtype and layout of x."""
    if other is None or (other.dtype == x.dtype and other.stride() == x.stride()):
        return other
    return torch.empty_like(x).copy_(other)


def _in_layout_of(x: Tensor, result: Tensor, dense: Tensor) -> Tensor:
    """The result in x's layout, if the kernel read a `dense` copy of x."""
    return result if x is dense else torch.empty_like(x).copy_(result)


class ForwardCall(NamedTuple):
    """Tensors to read, tensors to write, and how."""

    x: Tensor
    residual: Tensor | None
    gate: Line
    weight: Line
    bias: Line
    y: Tensor
    total: Tensor | None
    mean: Tensor
    rstd: Tensor
    valid: Tensor | None
    plan: Plan
    norm: Rows

    def constants(self) -> dict[str, Any]:
        """The kernels' constants that say which norm it is."""
        norm, dtype = self.norm, self.x.dtype
        checked = dtype in (torch.float32, torch.bfloat16)
        cast = norm.cast_before and dtype.itemsize == 2
        return {"EPS": norm.eps, "RMS": norm.rms, "CHECKED": checked, "CAST": cast, "ONE": norm.weight_offset}


def run_forward(call: ForwardCall, view: View = NO_VIEW) -> None:
    """Launch the forward pass of dense rows, or of those of a view."""
    x, residual, gate, weight, bias, *results, plan, _ = call
    size = x.element_size()
    parameters = max((p.values.element_size() for p in (weight, bias) if p.values is not None), default=0)
    pressed = residual is not None or max(parameters, size) > 2 or _device(x.device)[0] < 9
    lines = weight.each is not None or gate.each is not None
    if lines and _run_of_rows(call):
        return
    tile = tiles.forward(plan.kept, plan.inner, size, pressed or lines, lines)
    if parameters > size:
        tile = unspilled(tile, x, 128 if lines else 96)
    kernel = row_forward_kernels.forward_tile if tile.whole else row_forward_kernels.forward_long
    of_lines = *gate[1:], *weight[1:], *bias[1:]
    steps = view.arguments(2) if tile.whole else ()
    run(
        kernel,
        tile.needed(plan.outer, plan.inner),
        *(x, tile, plan),
        *(x, residual, gate.values, weight.values, bias.values, *results, *plan),
        *(*of_lines, *steps),
        **call.constants(),
    )


def _run_of_rows(call: ForwardCall) -> bool:
    """Launch programs that go through many rows of a group, if the rows of a group share every line."""
    x, residual, gate, weight, bias, *results, _, plan, _ = call
    each = {line.each for line in (gate, weight, bias) if line.each is not None}
    stages, shared = (choice_for(x.device) or DEFAULT).run_stages, _device(x.device)[1]
    how = tiles.run(plan.kept, x.element_size(), 1 if residual is None else 2, stages, shared)
    if len(each) != 1 or 1 in each or not stages or how is None:
        return False
    (rows,) = each
    groups = plan.outer // rows
    count = how.tile.needed(rows, 1)
    parts = min(count, max(processors(x.device) * how.programs // groups, 1))
    run(
        row_forward_kernels.forward_run,
        parts * groups,
        *(x, how.tile, plan),
        *(x, residual, gate.values, weight.values, bias.values, *results),
        *(rows, plan.kept, count, parts, gate.step, weight.step, bias.step),
        **call.constants(),
        STAGES=how.stages,
    )
    return True


def _check(valid: Tensor | None, mean: Tensor) -> None:
    """Raise for a mask that the kernels, which see a pointer, would read wrongly."""
    if valid is None:
        return
    if valid.dtype != torch.bool or not valid.is_contiguous() or valid.numel() != mean.numel():
        raise RuntimeError(
            f"valid must be bool, contiguous and have an entry for each of {mean.numel()} rows"
        )


@taped
def row_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    start: int,
    stop: int,
    eps: float,
    rms: bool,
    weight_offset: float = 0.0,
    cast_before: bool = False,
    valid: Tensor | None = None,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = row_statistics_shape(x.shape, start, stop)
    mean, rstd = (empty(shape, compute_dtype(x), x.device) for _ in range(2))
    _check(valid, mean)
    none = empty((0,), x.dtype, x.device)
    if x.numel() == 0:
        total = none if residual is None else torch.empty_like(x)
        return torch.empty_like(x), total, mean.zero_(), rstd.fill_(eps).rsqrt_()
    whole = row_plan(x.shape, start, stop)
    of_gate, of_weight, of_bias = (_lines(v, x, whole) for v in (gate, weight, bias))
    lines = _check_lines(x, stop, (of_weight, of_bias), of_gate, valid)
    y = empty_like(x) if residual is None else None
    view = None if y is None or lines else view_of(start, stop, x, y)
    dense, plan = (x, whole) if view else _dense(x, start, stop)
    y = empty_like(dense) if y is None or dense is not x else y
    total = none if residual is None else empty_like(dense)
    inputs = dense, _like(dense, residual), of_gate, of_weight, of_bias
    results = y, None if residual is None else total, mean, rstd, valid
    norm = Rows(start, stop, eps, rms, float(weight_offset), cast_before)
    run_forward(ForwardCall(*inputs, *results, plan, norm), view or NO_VIEW)
    total = none if residual is None else _in_layout_of(x, total, dense)
    return _in_layout_of(x, y, dense), total, mean, rstd


@taped
def row_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    start: int,
    stop: int,
    rms: bool,
    want_affine: bool,
    want_bias: bool,
    weight_offset: float = 0.0,
    valid: Tensor | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    _check(valid, mean)
    whole = row_plan(x.shape, start, stop)
    line, of_gate = _lines(weight, x, whole), _lines(gate, x, whole)
    lines = _check_lines(x, stop, (line,), of_gate, valid)

    def affine(wanted: bool) -> Tensor:
        if line.each is not None and weight is not None:
            return empty(weight.shape if wanted else (0,), weight.dtype, x.device)
        shape = x.shape[start:stop] if wanted else (0,)
        return empty(shape, row_gradient_dtype(x, weight), x.device)

    want_bias = want_bias and want_affine and line.each != 1  # the sum of dy over one row is dy
    dweight, dbias = affine(want_affine), affine(want_bias)
    if x.numel() == 0:
        return torch.empty_like(x), dweight.zero_(), dbias.zero_(), None, None
    dx = empty_like(x)
    view = None if dtotal is not None or lines else view_of(start, stop, dy, x, dx)
    dense, plan = (x, whole) if view else _dense(x, start, stop)
    dx = dx if dense is x else empty_like(dense)
    inputs = dy if view else _like(dense, dy), _like(dense, dtotal), dense
    statistics = mean.contiguous(), rstd.contiguous(), valid
    of_affine = dweight if want_affine else None, dbias if want_bias else None
    norm = Rows(start, stop, 0.0, rms, float(weight_offset))
    run_backward(BackwardCall(*inputs, *statistics, line, dx, *of_affine, plan, norm), view or NO_VIEW)
    of_residual = (None, None) if gate is None else _gate_backward(dx, _like(dx, residual), of_gate, plan)
    return _in_layout_of(x, dx, dense), dweight, dbias, *of_residual


def _gate_backward(
    dtotal: Tensor, residual: Tensor | None, gate: Line, plan: Plan
) -> tuple[Tensor, Tensor | None]:
    """The gradients of the residual, and of its gate if the residual is given."""
    assert gate.values is not None
    groups, rows = grouped(gate, plan)
    dresidual = empty_like(dtotal)
    dgate = None if residual is None else empty(gate.values.shape, gate.values.dtype, dtotal.device)
    tile = tiles.elementwise(plan.kept)
    count, blocks = tile.needed(rows, 1), -(-plan.kept // tile.block)
    parts = min(count, max(8 * processors(dtotal.device) // blocks // groups, 1))
    by_row = dgate is None or gate.each == 1
    shares = Shares(dgate, None, 1 if by_row else parts, plan.kept, compute_dtype(dtotal), groups)
    run(
        row_gate_kernels.gate_backward,
        parts * groups * blocks,
        *(dtotal, tile, plan),
        *(dtotal, residual, gate.values, dresidual, shares.dweight, rows, plan.kept, count, parts, groups),
        plan.kept if gate.step is None else gate.step,
        EACH=gate.each == 1,
    )
    shares.add_up()
    return dresidual, dgate


class BackwardCall(NamedTuple):
    """Tensors to read, tensors to write, and how. If weight has lines, dweight and dbias have one sum per
    line; dbias is None if every row has its own line, as its sum would be dy."""

    dy: Tensor
    dtotal: Tensor | None
    x: Tensor
    mean: Tensor
    rstd: Tensor
    valid: Tensor | None
    weight: Line
    dx: Tensor
    dweight: Tensor | None
    dbias: Tensor | None
    plan: Plan
    norm: Rows


def run_backward(call: BackwardCall, view: View = NO_VIEW) -> None:
    """Launch the backward pass."""
    x, plan = call.x, call.plan
    tensors = (2 if call.dtotal is None else 3) + (call.weight.each == 1)
    backward = tiles.backward(plan.kept, plan.inner, x.element_size(), tensors, _device(x.device)[1])
    if backward is None:
        _backward_long(call)
    else:
        _backward_tile(call, backward, view)


def grouped(weight: Line, plan: Plan) -> tuple[int, int]:
    """Groups of consecutive rows that share a line, and the number of rows of each."""
    if weight.each is None or weight.each == 1:
        return 1, plan.outer
    return plan.outer // weight.each, weight.each


def _backward_tile(call: BackwardCall, backward: tiles.Backward, view: View) -> None:
    dy, dtotal, x, mean, rstd, valid, weight, dx, dweight, dbias, plan, norm = call
    _, kept, inner = plan
    groups, rows = grouped(weight, plan)
    count = backward.tile.needed(rows, inner)
    halves = 2 if backward.halves else 1
    parts = min(count, max(processors(x.device) * backward.programs // halves // groups, 1))
    in_lines = weight.each is not None and weight.each > 1
    by_row = dweight is None or weight.each == 1  # no sums over rows
    shares = Shares(dweight, dbias, 1 if by_row else parts, kept, mean.dtype, groups)
    lines = (None if in_lines else weight.each), weight.step, (parts if in_lines else None)
    run(
        row_backward_kernels.backward_tile,
        groups * parts * halves,
        *(x, backward.tile, plan),
        *(dy, dtotal, x, mean, rstd, valid, weight.values, dx),
        *(shares.dweight, shares.dbias, rows, kept, inner),
        *(count, *lines, *view.arguments(3)),
        RMS=norm.rms,
        ONE=norm.weight_offset,
        HOW=backward,
    )
    shares.add_up()


def _backward_long(call: BackwardCall) -> None:
    dy, dtotal, x, mean, rstd, valid, weight, dx, dweight, dbias, plan, norm = call
    outer, kept, inner = plan
    tile = tiles.along(inner, x.element_size())
    if valid is not None:
        tile = tile._replace(registers=255)  # if rows are interleaved, each value has its own predicate
    at_once = dweight if weight.each == 1 else None
    arguments = (dy, dtotal, x, mean, rstd, valid, weight.values, dx, at_once, *plan, *weight[1:])
    kernel, constants = row_backward_kernels.backward_long, {"RMS": norm.rms, "ONE": norm.weight_offset}
    run(kernel, tile.needed(outer, inner), x, tile, plan, *arguments, **constants)
    if dweight is None or weight.each == 1:
        return
    groups, rows = grouped(weight, plan)
    tile = tiles.shares(inner, x.element_size())
    count, blocks = tile.needed(rows, inner), -(-kept // tile.block)
    parts = min(count, max(4 * processors(x.device) // blocks // groups, 1))
    shares = Shares(dweight, dbias, parts, kept, mean.dtype, groups)
    tensors = dy, x, mean, rstd, valid, shares.dweight, shares.dbias
    of_shares = (*tensors, rows, kept, inner, count, parts, groups)
    run(row_backward_kernels.backward_shares, parts * groups * blocks, x, tile, plan, *of_shares)
    shares.add_up()
