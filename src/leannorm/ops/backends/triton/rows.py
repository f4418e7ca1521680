"""The per-row operators of `schema.py` on a GPU: memory layouts, then launches.

Launches of each call, and the bytes that memory must move, in sizes S of the input:

    forward      one launch, 2 S (4 S with a residual)
    backward     one launch, 3 S (4 S with the sum's gradient), and a second that adds up the programs'
                 shares of dweight and dbias; for rows longer than a tile three, 5 S (6 S)
"""

from __future__ import annotations

from functools import cache
from typing import Any, overload

import torch
from torch import Tensor

from leannorm.ops.backends.triton import row_backward_kernels, row_forward_kernels
from leannorm.ops.backends.triton import row_tiles as tiles
from leannorm.ops.backends.triton.launch import launch, processors
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


def _launch(
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


def _shifted(x: Tensor, weight: Tensor | None, offset: float) -> Tensor | None:
    """weight + offset in the dtype of the arithmetic: a launch of its own, of `kept` values, on no tape."""
    return weight if weight is None or offset == 0 else weight.to(compute_dtype(x)) + offset


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
    shape = row_statistics_shape(x.shape, start, stop)
    mean, rstd = (empty(shape, compute_dtype(x), x.device) for _ in range(2))
    none = empty((0,), x.dtype, x.device)
    if x.numel() == 0:
        total = none if residual is None else torch.empty_like(x)
        return torch.empty_like(x), total, mean.zero_(), rstd.fill_(eps).rsqrt_()
    dense, plan = _dense(x, start, stop)
    outer, kept, inner = plan
    y = empty_like(dense)
    total = none if residual is None else empty_like(dense)
    weight = _shifted(x, weight, weight_offset)
    parameters = max((p.element_size() for p in (weight, bias) if p is not None), default=0)
    pressed = residual is not None or max(parameters, x.element_size()) > 2 or _device(x.device)[0] < 9
    tile = tiles.forward(kept, inner, x.element_size(), pressed)
    _launch(
        row_forward_kernels.forward_tile if tile.whole else row_forward_kernels.forward_long,
        tile.needed(outer, inner),
        *(x, tile, plan),
        *(dense, _like(dense, residual), _flat(weight), _flat(bias), y, None if residual is None else total),
        *(mean, rstd, valid, *plan),
        EPS=eps,
        RMS=rms,
        CHECKED=x.dtype in (torch.float32, torch.bfloat16),
        CAST=cast_before and x.element_size() == 2,
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
    def affine(wanted: bool) -> Tensor:
        shape = x.shape[start:stop] if wanted else (0,)
        return empty(shape, row_gradient_dtype(x, weight), x.device)

    dweight, dbias = affine(want_affine), affine(want_affine and not rms)
    if x.numel() == 0:
        return torch.empty_like(x), dweight.zero_(), dbias.zero_()
    dense, plan = _dense(x, start, stop)
    dx = empty_like(dense)
    statistics = mean.contiguous(), rstd.contiguous(), valid
    weight = _flat(_shifted(x, weight, weight_offset))
    given = (_like(dense, dy), _like(dense, dtotal), dense, *statistics, weight)
    wanted = (dweight if want_affine else None, dbias if want_affine and not rms else None)
    tensors = 2 if dtotal is None else 3
    how = tiles.backward(plan.kept, plan.inner, x.element_size(), tensors, _device(x.device)[1])
    if how is None:
        _backward_long(*given, dx, *wanted, plan, rms)
    else:
        _backward_tile(*given, dx, *wanted, plan, rms, how)
    return _in_layout_of(x, dx, dense), dweight, dbias


def _backward_tile(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    valid: Tensor | None,
    weight: Tensor | None,
    dx: Tensor,
    dweight: Tensor | None,
    dbias: Tensor | None,
    plan: Plan,
    rms: bool,
    how: tiles.Backward,
) -> None:
    outer, kept, inner = plan
    count = how.tile.needed(outer, inner)
    parts = 2 if how.halves else 1
    programs = min(count, max(processors(x.device) * how.programs // parts, 1))
    shares = Shares(dweight, dbias, programs, kept, mean.dtype)
    _launch(
        row_backward_kernels.backward_tile,
        programs * parts,
        *(x, how.tile, plan),
        *(dy, dtotal, x, mean, rstd, valid, weight, dx, shares.dweight, shares.dbias, *plan, count),
        RMS=rms,
        HOW=how,
    )
    shares.add_up()


def _backward_long(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    valid: Tensor | None,
    weight: Tensor | None,
    dx: Tensor,
    dweight: Tensor | None,
    dbias: Tensor | None,
    plan: Plan,
    rms: bool,
) -> None:
    outer, kept, inner = plan
    tile = tiles.along(inner, x.element_size())
    arguments = (dy, dtotal, x, mean, rstd, valid, weight, dx, *plan)
    _launch(row_backward_kernels.backward_long, tile.needed(outer, inner), x, tile, plan, *arguments, RMS=rms)
    if dweight is None:
        return
    tile = tiles.shares(inner, x.element_size())
    count, blocks = tile.needed(outer, inner), -(-kept // tile.block)
    programs = min(count, max(4 * processors(x.device) // blocks, 1))
    shares = Shares(dweight, dbias, programs, kept, mean.dtype)
    of_shares = (dy, x, mean, rstd, valid, shares.dweight, shares.dbias, *plan, count, programs)
    _launch(row_backward_kernels.backward_shares, programs * blocks, x, tile, plan, *of_shares)
    shares.add_up()
