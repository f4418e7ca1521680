"""The kernels of norms with gates: of a residual, with a line per group of rows, or of the input's shape.

Bytes are counted per element of the input, s being the size of its dtype; statistics, lines and weights are
read from the caches. Arithmetic has the statistics' dtype: float32, float64 for float64. Each row is
contiguous; inputs may have any `step` between rows, outputs have none.
"""

from __future__ import annotations

import triton
import triton.language as tl

from leannorm.ops.backends.triton.activations import activate, derivative
from leannorm.ops.backends.triton.rounding import rounded_for, zeros
from leannorm.ops.backends.triton.row_addresses import (
    block_of_row,
    divided,
    line,
    parameter,
    rows_of,
    values,
    walk,
)
from leannorm.ops.backends.triton.row_forward_kernels import beyond_float32, rstd_of, scale_of


@triton.jit(do_not_specialize=["rows", "kept", "tiles", "parts", "groups", "step"])
def gate_backward(
    dtotal, residual, gate, dresidual, dgate, rows, kept, tiles, parts, groups, step,
    EACH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The gradients of a gated residual and of its gate, for a block of values of a row.

    `parts` programs go through the `tiles` of each group of `rows`, which share a line of the gate; with EACH
    every row has a line, whose gradient is written at once. Moves 3 s bytes per element in one launch;
    `sum_shares` adds the shares up.
    """
    dtype: tl.constexpr = tl.float64 if dtotal.dtype.element_ty == tl.float64 else tl.float32
    kept, inner = divided(kept, 1, TILE)
    program = tl.program_id(0) % (parts * groups)
    k = block_of_row(tl.program_id(0) // (parts * groups), kept, TILE)
    group = (program // parts).to(tl.int64)
    dtotal += group * rows * kept
    dresidual += group * rows * kept
    gate += group * (step // TILE.vector * TILE.vector)
    if residual is not None:
        residual += group * rows * kept
        sums = zeros(TILE.rows, TILE.block, dtype)
    for at in tl.range(program % parts, tiles, parts, num_stages=2):
        start, across, row, exists = rows_of(at, rows, kept, inner, TILE)
        offset, inside = values(k, exists, across, kept, inner, TILE)
        d = tl.load(dtotal + start + offset, inside, 0.0, eviction_policy="evict_first").to(dtype)
        if EACH:
            g = line((gate, 1, step), row, exists, k, kept, dtype, TILE)
        else:
            g = parameter(gate, k, kept, dtype)
        tl.store(dresidual + start + offset, (d * g).to(dresidual.dtype.element_ty), inside)
        if residual is not None:
            other = tl.load(residual + start + offset, inside, 0.0, eviction_policy="evict_first").to(dtype)
            if EACH:
                tl.store(dgate + start + offset, rounded_for(dgate, d * other), inside)
            else:
                sums += d * other
    if residual is not None and not EACH:
        share = program.to(tl.int64) * kept + k
        tl.store(dgate + share, rounded_for(dgate, tl.sum(sums, 0)), k < kept)


@triton.jit
def _steps(step, row, TILE: tl.constexpr):
    """Where rows begin that are `step` apart."""
    return (row * (step // TILE.vector * TILE.vector))[:, None]


@triton.jit
def _read(p, offset, inside, dtype: tl.constexpr):
    return tl.load(p + offset, inside, 0.0, eviction_policy="evict_first").to(dtype)


@triton.jit
def _normalized(x, gate, of_x, of_gate, inside, dtype: tl.constexpr, ACT: tl.constexpr, BEFORE: tl.constexpr):
    """What is normalized: x, or x * act(gate)."""
    value = _read(x, of_x, inside, dtype)
    if not BEFORE:
        value *= activate(_read(gate, of_gate, inside, dtype), ACT)
    return value


@triton.jit
def _put(
    y, offset, value, factor, gate, of_gate, weight, k, kept, inside,
    ACT: tl.constexpr, BEFORE: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """The normalized value, times weight, and times act(gate) where the norm comes before the gate."""
    value *= factor[:, None]
    if CAST:
        value = value.to(y.dtype.element_ty).to(value.dtype)
    value *= parameter(weight, k, kept, value.dtype)
    if BEFORE:
        if CAST:
            value = value.to(y.dtype.element_ty).to(value.dtype)
        value *= activate(_read(gate, of_gate, inside, value.dtype), ACT)
    tl.store(y + offset, value.to(y.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["rows", "kept", "x_step", "gate_step"])
def gated_forward(
    x, gate, weight, y, rstd, rows, kept, x_step, gate_step,
    EPS: tl.constexpr, ACT: tl.constexpr, BEFORE: tl.constexpr, CHECKED: tl.constexpr, CAST: tl.constexpr,
    WHOLE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """RMS norm with a gate of x's shape: applied after the norm, or (not BEFORE) before it.

    Moves 3 s bytes per element in one launch; rows longer than a tile (not WHOLE) are read again, from the
    cache.
    """
    dtype: tl.constexpr = rstd.dtype.element_ty
    kept, inner = divided(kept, 1, TILE)
    start, across, row, exists = rows_of(tl.program_id(0), rows, kept, inner, TILE)
    of_x, of_gate = _steps(x_step, row, TILE), _steps(gate_step, row, TILE)
    lane, end = walk(kept, TILE)
    y += start
    square = zeros(TILE.rows, None, dtype)
    if WHOLE:
        offset, inside = values(lane, exists, across, kept, inner, TILE)
        value = _normalized(x, gate, of_x + lane, of_gate + lane, inside, dtype, ACT, BEFORE)
        square = tl.sum(value * value, 1)
    else:
        squares = zeros(TILE.rows, TILE.block, dtype)
        for begin in tl.range(0, end, TILE.block, num_stages=2):
            k = begin + lane
            inside = exists[:, None] & (k < kept)[None, :]
            v = _normalized(x, gate, of_x + k, of_gate + k, inside, dtype, ACT, BEFORE)
            squares += v * v
        square = tl.sum(squares, 1)
    scale = zeros(TILE.rows, None, dtype) + 1.0
    if beyond_float32(square, exists, CHECKED):
        largest = zeros(TILE.rows, TILE.block, dtype)
        for begin in tl.range(0, end, TILE.block):
            k = begin + lane
            inside = exists[:, None] & (k < kept)[None, :]
            v = _normalized(x, gate, of_x + k, of_gate + k, inside, dtype, ACT, BEFORE)
            largest = tl.maximum(largest, tl.abs(v))
        scale = scale_of(tl.max(largest, 1))
        squares = zeros(TILE.rows, TILE.block, dtype)
        for begin in tl.range(0, end, TILE.block):
            k = begin + lane
            inside = exists[:, None] & (k < kept)[None, :]
            v = _normalized(x, gate, of_x + k, of_gate + k, inside, dtype, ACT, BEFORE) * scale[:, None]
            squares += v * v
        square = tl.sum(squares, 1)
    factor = rstd_of(square, scale, kept, EPS)
    tl.store(rstd + row, factor, exists)
    if WHOLE:
        offset, inside = values(lane, exists, across, kept, inner, TILE)
        _put(y, offset, value, factor, gate, of_gate + lane, weight, lane, kept, inside, ACT, BEFORE, CAST)
    else:
        for begin in tl.range(0, end, TILE.block, num_stages=2):
            k = begin + lane
            offset, inside = values(k, exists, across, kept, inner, TILE)
            v = _normalized(x, gate, of_x + k, of_gate + k, inside, dtype, ACT, BEFORE)
            _put(y, offset, v, factor, gate, of_gate + k, weight, k, kept, inside, ACT, BEFORE, CAST)


@triton.jit
def _gradient(d, value, opened, factor, BEFORE: tl.constexpr):
    """The gradient of the weighted norm, and what was normalized times rstd."""
    if BEFORE:
        g = d * opened
        u = value * factor[:, None]
    else:
        g = d
        u = value * opened * factor[:, None]
    return g, u


@triton.jit
def _put_gradients(
    dx, dgate, offset, d, g, u, value, opened, slope, w, mean, factor, inside, BEFORE: tl.constexpr
):
    e = (g * w - u * mean[:, None]) * factor[:, None]
    if BEFORE:
        of_x = e
        of_gate = d * (u * w) * slope
    else:
        of_x = e * opened
        of_gate = e * value * slope
    tl.store(dx + offset, of_x.to(dx.dtype.element_ty), inside)
    tl.store(dgate + offset, of_gate.to(dgate.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["rows", "kept", "tiles", "dy_step", "x_step", "gate_step"])
def gated_backward_tile(
    dy, x, gate, rstd, weight, dx, dgate, dweight, rows, kept, tiles, dy_step, x_step, gate_step,
    ACT: tl.constexpr, BEFORE: tl.constexpr, STAGES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Rows that fit on chip: each program loops over tiles and adds up its share of dweight.

    Moves 5 s bytes per element in one launch; `sum_shares` adds the shares up.
    """
    dtype: tl.constexpr = rstd.dtype.element_ty
    kept, inner = divided(kept, 1, TILE)
    k = tl.arange(0, TILE.block)
    w = parameter(weight, k, kept, dtype)
    if dweight is not None:
        sums = zeros(TILE.rows, TILE.block, dtype)
    for at in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        start, across, row, exists = rows_of(at, rows, kept, inner, TILE)
        offset, inside = values(k, exists, across, kept, inner, TILE)
        factor = tl.load(rstd + row, exists, 0.0)
        d = _read(dy, _steps(dy_step, row, TILE) + k, inside, dtype)
        value = _read(x, _steps(x_step, row, TILE) + k, inside, dtype)
        z = _read(gate, _steps(gate_step, row, TILE) + k, inside, dtype)
        opened = activate(z, ACT)
        g, u = _gradient(d, value, opened, factor, BEFORE)
        mean = tl.sum(g * w * u, 1) / kept
        slope = derivative(z, ACT)
        _put_gradients(
            dx + start, dgate + start, offset, d, g, u, value, opened, slope, w, mean, factor, inside, BEFORE
        )
        if dweight is not None:
            sums += g * u
    if dweight is not None:
        share = tl.program_id(0).to(tl.int64) * kept + k
        tl.store(dweight + share, rounded_for(dweight, tl.sum(sums, 0)), k < kept)


@triton.jit(do_not_specialize=["rows", "kept", "dy_step", "x_step", "gate_step"])
def gated_backward_long(
    dy, x, gate, rstd, weight, dx, dgate, rows, kept, dy_step, x_step, gate_step,
    ACT: tl.constexpr, BEFORE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The gradients of x and gate, for rows longer than a tile.

    Moves 5 s bytes per element from and to memory, 3 s more from the cache, in one launch.
    """
    dtype: tl.constexpr = rstd.dtype.element_ty
    kept, inner = divided(kept, 1, TILE)
    start, across, row, exists = rows_of(tl.program_id(0), rows, kept, inner, TILE)
    factor = tl.load(rstd + row, exists, 0.0)
    dy += _steps(dy_step, row, TILE)
    x += _steps(x_step, row, TILE)
    gate += _steps(gate_step, row, TILE)
    lane, end = walk(kept, TILE)
    sums = zeros(TILE.rows, TILE.block, dtype)
    for begin in tl.range(0, end, TILE.block, num_stages=2):
        k = begin + lane
        inside = exists[:, None] & (k < kept)[None, :]
        opened = activate(_read(gate, k[None, :], inside, dtype), ACT)
        d, value = _read(dy, k[None, :], inside, dtype), _read(x, k[None, :], inside, dtype)
        g, u = _gradient(d, value, opened, factor, BEFORE)
        sums += g * parameter(weight, k, kept, dtype) * u
    mean = tl.sum(sums, 1) / kept
    for begin in tl.range(0, end, TILE.block, num_stages=2):
        k = begin + lane
        offset, inside = values(k, exists, across, kept, inner, TILE)
        z = _read(gate, k[None, :], inside, dtype)
        opened = activate(z, ACT)
        d, value = _read(dy, k[None, :], inside, dtype), _read(x, k[None, :], inside, dtype)
        g, u = _gradient(d, value, opened, factor, BEFORE)
        w, slope = parameter(weight, k, kept, dtype), derivative(z, ACT)
        _put_gradients(
            dx + start, dgate + start, offset, d, g, u, value, opened, slope, w, mean, factor, inside, BEFORE
        )


@triton.jit(do_not_specialize=["rows", "kept", "tiles", "programs", "dy_step", "x_step", "gate_step"])
def gated_shares(
    dy, x, gate, rstd, dweight, rows, kept, tiles, programs, dy_step, x_step, gate_step,
    ACT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Each program's share of dweight, for a block of values of rows longer than a tile. Moves 3 s bytes."""
    dtype: tl.constexpr = rstd.dtype.element_ty
    kept, inner = divided(kept, 1, TILE)
    program = tl.program_id(0) % programs
    k = block_of_row(tl.program_id(0) // programs, kept, TILE)
    sums = zeros(TILE.rows, TILE.block, dtype)
    for at in tl.range(program, tiles, programs, num_stages=2):
        _start, _across, row, exists = rows_of(at, rows, kept, inner, TILE)
        inside = exists[:, None] & (k < kept)[None, :]
        factor = tl.load(rstd + row, exists, 0.0)
        opened = activate(_read(gate, _steps(gate_step, row, TILE) + k, inside, dtype), ACT)
        value = _read(x, _steps(x_step, row, TILE) + k, inside, dtype)
        sums += _read(dy, _steps(dy_step, row, TILE) + k, inside, dtype) * value * factor[:, None] * opened
    share = program.to(tl.int64) * kept + k
    tl.store(dweight + share, rounded_for(dweight, tl.sum(sums, 0)), k < kept)
