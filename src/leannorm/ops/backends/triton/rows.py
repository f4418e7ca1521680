"""The per-row operators of `schema.py` on a GPU: memory layouts, then launches.

Launches of each call, and the bytes that memory must move, in sizes S of the input:

    forward      one launch, 2 S (4 S with a residual)
    backward     one launch, 3 S (4 S with the sum's gradient), and a second that adds up the programs'
                 shares of dweight and dbias; for rows longer than a tile three, 5 S (6 S)

Rows of a view that are lines of memory, such as the heads of q, k and v, are read where they are
(`row_views`).
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from leannorm._errors import InputError
from leannorm.ops.backends.triton import row_backward_kernels, row_forward_kernels
from leannorm.ops.backends.triton import row_tiles as tiles
from leannorm.ops.backends.triton.launch import launch, processors
from leannorm.ops.backends.triton.row_views import NO_VIEW, View, view_of
from leannorm.ops.backends.triton.shares import Shares
from leannorm.ops.backends.triton.tape import empty, empty_like, taped
from leannorm.ops.layout import dense_rows
from leannorm.ops.plan import Plan, row_plan, row_statistics_shape
from leannorm.ops.precision import compute_dtype, row_gradient_dtype


@cache
def _device(device: torch.device) -> tuple[int, int]:
    """Major compute capability, and bytes of shared memory that a program may have."""
    if device.type != "cuda":
        return 9, 227 << 10
    found = torch.cuda.get_device_properties(device)
    return found.major, getattr(found, "shared_memory_per_block_optin", 99 << 10)


class Line(NamedTuple):
    """A parameter, or (groups, kept) lines of it: `each` rows share one, they begin `step` values apart."""

    values: Tensor | None
    each: int | None = None
    step: int | None = None


NO_LINE = Line(None)


def run(
    kernel: object, programs: int, x: Tensor, tile: tiles.Tile, plan: Plan, *arguments: Any, **constants: Any
) -> None:
    """Launch with the constants of the tile and of the layout."""
    constants |= {"TILE": tile.constants(plan.kept, plan.inner), "warps": tile.warps}
    launch(kernel, programs, x.device, *arguments, registers=tile.registers, **constants)


def _dense(x: Tensor, start: int, stop: int) -> tuple[Tensor, Plan]:
    """x if the kernels can address its rows, else a contiguous copy; and its plan in the order of memory."""
    plan = dense_rows(x, start, stop)
    return (x, plan) if plan is not None else (x.contiguous(), row_plan(x.shape, start, stop))


@overload
def _like(x: Tensor, other: Tensor) -> Tensor: ...
@overload
def _like(x: Tensor, other: None) -> None: ...
def _like(x: Tensor, other: Tensor | None) -> Tensor | None:
    """`other` in the dtype and layout of x."""
    if other is None or (other.dtype == x.dtype and other.stride() == x.stride()):
        return other
    return torch.empty_like(x).copy_(other)


def _in_layout_of(x: Tensor, result: Tensor, dense: Tensor) -> Tensor:
    """The result in x's layout, where the kernel read a `dense` copy of x."""
    return result if x is dense else torch.empty_like(x).copy_(result)


def _flat(v: Tensor | None) -> Tensor | None:
    return None if v is None else v.contiguous()


def run_forward(
    x: Tensor,
    residual: Tensor | None,
    gate: Line,
    weight: Line,
    bias: Line,
    y: Tensor,
    total: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    plan: Plan,
    eps: float,
    rms: bool,
    one: float,
    cast_before: bool = False,
    view: View | None = None,
) -> None:
    """Launch the forward pass of dense rows, or of those of a view."""
    size = x.element_size()
    parameters = max((p.values.element_size() for p in (weight, bias) if p.values is not None), default=0)
    pressed = residual is not None or max(parameters, size) > 2 or _device(x.device)[0] < 9
    lines = weight.each is not None
    tile = tiles.forward(plan.kept, plan.inner, size, pressed or lines, lines)
    kernel = row_forward_kernels.forward_tile if tile.whole else row_forward_kernels.forward_long
    of_lines = *gate[1:], *weight[1:], *bias[1:]
    steps = (view or NO_VIEW).arguments(2) if tile.whole else ()
    run(
        kernel,
        tile.needed(plan.outer, plan.inner),
        *(x, tile, plan),
        *(x, residual, gate.values, weight.values, bias.values, y, total, mean, rstd, *plan),
        *(*of_lines, *steps),
        EPS=eps,
        RMS=rms,
        CHECKED=x.dtype in (torch.float32, torch.bfloat16),
        CAST=cast_before and size == 2,
        ONE=float(one),
    )


def _refuse_masked(valid: Tensor | None) -> None:
    """`Triton` computes those in plain torch; nobody else has a reason to call the operator."""
    if valid is not None:
        raise InputError("masked rows have no kernel on CUDA; call leannorm.functional.layer_norm")


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _refuse_masked(valid)
    shape = row_statistics_shape(x.shape, start, stop)
    mean, rstd = (empty(shape, compute_dtype(x), x.device) for _ in range(2))
    none = empty((0,), x.dtype, x.device)
    if x.numel() == 0:
        total = none if residual is None else torch.empty_like(x)
        return torch.empty_like(x), total, mean.zero_(), rstd.fill_(eps).rsqrt_()
    y = empty_like(x) if residual is None else None
    view = None if y is None else view_of(start, stop, x, y)
    dense, plan = (x, row_plan(x.shape, start, stop)) if view else _dense(x, start, stop)
    y = empty_like(dense) if y is None or dense is not x else y
    total = none if residual is None else empty_like(dense)
    run_forward(
        dense,
        _like(dense, residual),
        NO_LINE,
        Line(_flat(weight)),
        Line(_flat(bias)),
        y,
        None if residual is None else total,
        mean,
        rstd,
        plan,
        eps,
        rms,
        weight_offset,
        cast_before,
        view,
    )
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
    weight_offset: float = 0.0,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _refuse_masked(valid)

    def affine(wanted: bool) -> Tensor:
        shape = x.shape[start:stop] if wanted else (0,)
        return empty(shape, row_gradient_dtype(x, weight), x.device)

    dweight, dbias = affine(want_affine), affine(want_affine and not rms)
    if x.numel() == 0:
        return torch.empty_like(x), dweight.zero_(), dbias.zero_()
    dx = empty_like(x)
    view = None if dtotal is not None else view_of(start, stop, dy, x, dx)
    dense, plan = (x, row_plan(x.shape, start, stop)) if view else _dense(x, start, stop)
    dx = dx if dense is x else empty_like(dense)
    run_backward(
        dy if view else _like(dense, dy),
        _like(dense, dtotal),
        dense,
        mean.contiguous(),
        rstd.contiguous(),
        Line(_flat(weight)),
        dx,
        dweight if want_affine else None,
        dbias if want_affine and not rms else None,
        plan,
        rms,
        weight_offset,
        view,
    )
    return _in_layout_of(x, dx, dense), dweight, dbias


def run_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Line,
    dx: Tensor,
    dweight: Tensor | None,
    dbias: Tensor | None,
    plan: Plan,
    rms: bool,
    one: float,
    view: View | None = None,
) -> None:
    """Launch the backward pass. Where weight has lines, dweight and dbias have a sum for each; dbias is None
    where every row has a line of its own, as its sum would be dy."""
    tensors = (2 if dtotal is None else 3) + (weight.each == 1)
    how = tiles.backward(plan.kept, plan.inner, x.element_size(), tensors, _device(x.device)[1])
    of_sums, one = (dweight, dbias), float(one)
    if how is None:
        _backward_long(dy, dtotal, x, mean, rstd, weight, dx, *of_sums, plan, rms, one)
    else:
        steps = view or NO_VIEW
        _backward_tile(dy, dtotal, x, mean, rstd, weight, dx, *of_sums, plan, rms, one, how, steps)


def _grouped(weight: Line, plan: Plan) -> tuple[int, int]:
    """Groups of rows that share a line and follow each other, and the rows of each."""
    if weight.each is None or weight.each == 1:
        return 1, plan.outer
    return plan.outer // weight.each, weight.each


def _backward_tile(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Line,
    dx: Tensor,
    dweight: Tensor | None,
    dbias: Tensor | None,
    plan: Plan,
    rms: bool,
    one: float,
    how: tiles.Backward,
    view: View,
) -> None:
    _, kept, inner = plan
    groups, rows = _grouped(weight, plan)
    count = how.tile.needed(rows, inner)
    halves = 2 if how.halves else 1
    parts = min(count, max(processors(x.device) * how.programs // halves // groups, 1))
    in_lines = weight.each is not None and weight.each > 1
    by_row = dweight is None or weight.each == 1  # no sums over rows
    shares = Shares(dweight, dbias, 1 if by_row else parts, kept, mean.dtype, groups)
    lines = (None if in_lines else weight.each), weight.step, (parts if in_lines else None)
    run(
        row_backward_kernels.backward_tile,
        groups * parts * halves,
        *(x, how.tile, plan),
        *(dy, dtotal, x, mean, rstd, weight.values, dx, shares.dweight, shares.dbias, rows, kept, inner),
        *(count, *lines, *view.arguments(3)),
        RMS=rms,
        ONE=one,
        HOW=how,
    )
    shares.add_up()


def _backward_long(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Line,
    dx: Tensor,
    dweight: Tensor | None,
    dbias: Tensor | None,
    plan: Plan,
    rms: bool,
    one: float,
) -> None:
    outer, kept, inner = plan
    tile = tiles.along(inner, x.element_size())
    at_once = dweight if weight.each == 1 else None
    arguments = (dy, dtotal, x, mean, rstd, weight.values, dx, at_once, *plan, *weight[1:])
    kernel = row_backward_kernels.backward_long
    run(kernel, tile.needed(outer, inner), x, tile, plan, *arguments, RMS=rms, ONE=one)
    if dweight is None or weight.each == 1:
        return
    groups, rows = _grouped(weight, plan)
    tile = tiles.shares(inner, x.element_size())
    count, blocks = tile.needed(rows, inner), -(-kept // tile.block)
    parts = min(count, max(4 * processors(x.device) // blocks // groups, 1))
    shares = Shares(dweight, dbias, parts, kept, mean.dtype, groups)
    of_shares = (dy, x, mean, rstd, shares.dweight, shares.dbias, rows, kept, inner, count, parts, groups)
    run(row_backward_kernels.backward_shares, parts * groups * blocks, x, tile, plan, *of_shares)
    shares.add_up()
