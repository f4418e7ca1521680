"""The per-row backward kernels: what one program does with its tiles of rows.

Bytes are counted per element of the input, s being the size of its dtype; statistics, weight and bias are
read from the caches. Arithmetic has the statistics' dtype: float32, float64 for float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from leannorm.ops.backends.triton.rounding import rounded_for
from leannorm.ops.backends.triton.row_addresses import (
    block_of_row,
    divided,
    live,
    of_live,
    parameter,
    rows_of,
    values,
    walk,
)


@triton.jit
def _gradient(dy, x, mean, rstd, offset, inside, dtype: tl.constexpr):
    """dy and the normalized input, 0 outside."""
    d = tl.load(dy + offset, inside, 0.0, eviction_policy="evict_first").to(dtype)
    value = tl.load(x + offset, inside, 0.0, eviction_policy="evict_first").to(dtype)
    return d, (value - mean[:, None]) * rstd[:, None]


@triton.jit
def _put_gradient(dx, dtotal, offset, g, xhat, rstd, by_xhat, by_one, inside, read, RMS: tl.constexpr):
    value = g - xhat * by_xhat[:, None]
    if not RMS:
        value -= by_one[:, None]
    value *= rstd[:, None]
    if dtotal is not None:
        value += tl.load(dtotal + offset, read, 0.0, eviction_policy="evict_first").to(value.dtype)
    tl.store(dx + offset, value.to(dx.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["rows", "kept", "inner", "tiles"])
def backward_tile(
    dy, dtotal, x, mean, rstd, valid, weight, dx, dweight, dbias, rows, kept, inner, tiles,
    RMS: tl.constexpr, TILE: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """Rows that fit on chip: each program goes through tiles and adds up its share of dweight and dbias.

    Moves 3 s bytes an element (4 s with dtotal), and writes `kept` values of dweight and dbias for each
    program, in one launch; `sum_shares` adds those up in a second one where there are several. HOW is a
    `row_tiles.Backward`. The next tile is loaded while one is computed (`stages`). With `fold` a tile's rows
    are added up in every iteration, where each thread (or a few neighbours) holds them; else each row of the
    tile has its own sums until the end. With `halves` two programs share a row, as registers do not hold all
    of it: both sum over the whole row, of which one half comes from the cache, and each writes half of dx.
    """
    dtype: tl.constexpr = mean.dtype.element_ty
    ROWS: tl.constexpr = TILE.rows
    BLOCK: tl.constexpr = TILE.block
    kept, inner = divided(kept, inner, TILE)
    program, programs = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, BLOCK)
    k = lane
    if HOW.halves:
        half = program % 2
        k = half * BLOCK + lane
        program, programs = program // 2, programs // 2
    kept_rows: tl.constexpr = 1 if HOW.fold else ROWS
    if weight is not None:
        w = parameter(weight, k, kept, dtype)
    if dweight is not None:
        sum_dweight = tl.zeros([kept_rows, BLOCK], dtype)
        sum_dbias = tl.zeros([kept_rows, BLOCK], dtype)
    for at in tl.range(program, tiles, programs, num_stages=HOW.stages):
        start, across, row, exists = rows_of(at, rows, kept, inner, TILE)
        there = live(valid, row, exists)
        offset, inside = values(k, exists, across, kept, inner, TILE)
        read = of_live(inside, valid, there)
        centre = tl.load(mean + row, there, 0.0)
        factor = tl.load(rstd + row, there, 0.0)
        if HOW.halves:
            other = (1 - half) * BLOCK + lane
            where, of_other = values(other, there, across, kept, inner, TILE)
            other_g, other_xhat = _gradient(dy + start, x + start, centre, factor, where, of_other, dtype)
            if weight is not None:
                other_g *= parameter(weight, other, kept, dtype)
            by_xhat = tl.sum(other_g * other_xhat, 1)
            by_one = tl.sum(other_g, 1)
        d, xhat = _gradient(dy + start, x + start, centre, factor, offset, read, dtype)
        g = d
        if weight is not None:
            g = d * w
        if HOW.halves:
            by_xhat += tl.sum(g * xhat, 1)
            by_one += tl.sum(g, 1)
        else:
            by_xhat = tl.sum(g * xhat, 1)
            by_one = tl.sum(g, 1)
        mean_xhat = by_xhat / kept
        mean_one = mean_xhat
        if not RMS:
            mean_one = by_one / kept
        through = None if dtotal is None else dtotal + start
        _put_gradient(dx + start, through, offset, g, xhat, factor, mean_xhat, mean_one, inside, read, RMS)
        if dweight is not None:
            if HOW.fold:
                sum_dweight += tl.sum(d * xhat, 0, keep_dims=True)
                sum_dbias += tl.sum(d, 0, keep_dims=True)
            else:
                sum_dweight += d * xhat
                sum_dbias += d
    if dweight is not None:
        share = program.to(tl.int64) * kept + k
        tl.store(dweight + share, rounded_for(dweight, tl.sum(sum_dweight, 0)), k < kept)
        if dbias is not None:
            tl.store(dbias + share, rounded_for(dbias, tl.sum(sum_dbias, 0)), k < kept)


@triton.jit(do_not_specialize=["rows", "kept", "inner"])
def backward_long(
    dy, dtotal, x, mean, rstd, valid, weight, dx, rows, kept, inner,
    RMS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The input's gradient of rows longer than a tile.

    Moves 3 s bytes an element (4 s with dtotal) from and to memory, 2 s more from the cache, in one launch.
    """
    dtype: tl.constexpr = mean.dtype.element_ty
    ROWS: tl.constexpr = TILE.rows
    BLOCK: tl.constexpr = TILE.block
    kept, inner = divided(kept, inner, TILE)
    start, across, row, exists = rows_of(tl.program_id(0), rows, kept, inner, TILE)
    there = live(valid, row, exists)
    centre = tl.load(mean + row, there, 0.0)
    factor = tl.load(rstd + row, there, 0.0)
    lane, end = walk(kept, TILE)
    sum_xhat = tl.zeros([ROWS, BLOCK], dtype)
    sum_one = tl.zeros([ROWS, BLOCK], dtype)
    for begin in tl.range(0, end, BLOCK, num_stages=2):
        k = begin + lane
        offset, inside = values(k, there, across, kept, inner, TILE)
        g, xhat = _gradient(dy + start, x + start, centre, factor, offset, inside, dtype)
        if weight is not None:
            g *= parameter(weight, k, kept, dtype)
        sum_xhat += g * xhat
        sum_one += g
    by_xhat = tl.sum(sum_xhat, 1) / kept
    by_one = tl.sum(sum_one, 1) / kept
    for begin in tl.range(0, end, BLOCK, num_stages=2):
        k = begin + lane
        offset, inside = values(k, exists, across, kept, inner, TILE)
        read = of_live(inside, valid, there)
        g, xhat = _gradient(dy + start, x + start, centre, factor, offset, read, dtype)
        if weight is not None:
            g *= parameter(weight, k, kept, dtype)
        through = None if dtotal is None else dtotal + start
        _put_gradient(dx + start, through, offset, g, xhat, factor, by_xhat, by_one, inside, read, RMS)


@triton.jit(do_not_specialize=["rows", "kept", "inner", "tiles", "programs"])
def backward_shares(
    dy, x, mean, rstd, valid, dweight, dbias, rows, kept, inner, tiles, programs,
    TILE: tl.constexpr,
):  # fmt: skip
    """Each program's share of dweight and dbias, for BLOCK values of rows longer than a tile.

    Moves 2 s bytes an element, in one launch; `sum_shares` adds the shares up.
    """
    dtype: tl.constexpr = mean.dtype.element_ty
    ROWS: tl.constexpr = TILE.rows
    BLOCK: tl.constexpr = TILE.block
    kept, inner = divided(kept, inner, TILE)
    program = tl.program_id(0) % programs
    k = block_of_row(tl.program_id(0) // programs, kept, TILE)
    sum_dweight = tl.zeros([ROWS, BLOCK], dtype)
    sum_dbias = tl.zeros([ROWS, BLOCK], dtype)
    for at in tl.range(program, tiles, programs, num_stages=2):
        start, across, row, exists = rows_of(at, rows, kept, inner, TILE)
        there = live(valid, row, exists)
        offset, inside = values(k, there, across, kept, inner, TILE)
        centre = tl.load(mean + row, there, 0.0)
        factor = tl.load(rstd + row, there, 0.0)
        d, xhat = _gradient(dy + start, x + start, centre, factor, offset, inside, dtype)
        sum_dweight += d * xhat
        sum_dbias += d
    share = program.to(tl.int64) * kept + k
    tl.store(dweight + share, rounded_for(dweight, tl.sum(sum_dweight, 0)), k < kept)
    if dbias is not None:
        tl.store(dbias + share, rounded_for(dbias, tl.sum(sum_dbias, 0)), k < kept)
