"""The per-row backward kernels: what one program does with its tiles of rows.

Bytes are counted per element of the input, s being the size of its dtype; statistics, weight and bias are
read from the caches. Arithmetic has the statistics' dtype: float32, float64 for float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from leannorm.ops.backends.triton.rounding import rounded_for, zeros
from leannorm.ops.backends.triton.row_addresses import (
    begin_of,
    block_of_row,
    divided,
    line,
    live,
    of_live,
    rows_of,
    values,
    walk,
)


@triton.jit
def _gradient(dy, of_dy, x, of_x, mean, rstd, inside, dtype: tl.constexpr):
    """dy and the normalized input, 0 outside."""
    d = tl.load(dy + of_dy, inside, 0.0, eviction_policy="evict_first").to(dtype)
    value = tl.load(x + of_x, inside, 0.0, eviction_policy="evict_first").to(dtype)
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


@triton.jit
def _factor(weight, row, exists, k, kept, dtype: tl.constexpr, ONE: tl.constexpr, TILE: tl.constexpr):
    """ONE + weight."""
    value = line(weight, row, exists, k, kept, dtype, TILE)
    return value if ONE == 0.0 else ONE + value


@triton.jit
def _put_sum(dweight, offset, d, xhat, inside):
    """The products for a line per row, whose sum is over one row. That of dy would be dy."""
    tl.store(dweight + offset, rounded_for(dweight, d * xhat), inside)


_INTEGERS = ["rows", "kept", "inner", "each", "step"]
_STEPS = ["near", "mid", "dy_far", "dy_mid", "dy_near"]
_STEPS += ["x_far", "x_mid", "x_near", "dx_far", "dx_mid", "dx_near"]


@triton.jit(do_not_specialize=[*_INTEGERS, "tiles", "parts", *_STEPS])
def backward_tile(
    dy, dtotal, x, mean, rstd, valid, weight, dx, dweight, dbias, rows, kept, inner, tiles, each, step, parts,
    near, mid, dy_far, dy_mid, dy_near, x_far, x_mid, x_near, dx_far, dx_mid, dx_near,
    RMS: tl.constexpr, ONE: tl.constexpr, TILE: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """Rows that fit on chip: each program loops over tiles and adds up its share of dweight and dbias.

    Moves 3 s bytes per element (4 s with dtotal), and writes `kept` values of dweight and dbias for each
    program, in one launch; if there are several programs, `sum_shares` adds their values up in a second one.
    HOW is a `row_tiles.Backward`. The next tiles are loaded while one is computed (`stages`). With `fold` a
    tile's rows are added up in every iteration, if each thread (or a few neighbours) has them in registers;
    otherwise each row of the tile has its own sums until the end. With `halves` two programs share a row that
    does not fit into registers: both sum over the whole row, one half of which comes from the cache, and each
    writes half of dx. Rows that leave many lanes of a tile idle take as long to compute as to move, so a
    product and a sum are one instruction where possible.

    With `parts`, weight has a line for every `rows` rows (a group), and so have the sums: that many programs
    go through a group's `tiles`. With `each` (1) it has a line per row; the sums are then products, which are
    stored at once.
    """
    dtype: tl.constexpr = mean.dtype.element_ty
    kept, inner = divided(kept, inner, TILE)
    program, programs = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, TILE.block)
    k = lane
    if HOW.halves:
        half = program % 2
        k = half * TILE.block + lane
        program, programs = program // 2, programs // 2
    kept_rows: tl.constexpr = 1 if HOW.fold else TILE.rows
    share = program.to(tl.int64) * kept
    if parts is not None:
        group = (program // parts).to(tl.int64)
        program, programs = program % parts, parts
        dy += group * rows * kept
        x += group * rows * kept
        dx += group * rows * kept
        if dtotal is not None:
            dtotal += group * rows * kept
        mean += group * rows
        rstd += group * rows
        if valid is not None:
            valid += group * rows
        weight += group * (step // TILE.vector * TILE.vector)
    if weight is not None and each is None:
        w = _factor((weight, None, None), None, None, k, kept, dtype, ONE, TILE)
    if dweight is not None and each is None:
        sum_dweight = zeros(kept_rows, TILE.block, dtype)
        sum_dbias = zeros(kept_rows, TILE.block, dtype)
    for at in tl.range(program, tiles, programs, num_stages=HOW.stages):
        start, across, row, exists = rows_of(at, rows, kept, inner, TILE)
        d_start, d_across = begin_of(row, start, across, near, mid, dy_far, dy_mid, dy_near, TILE)
        x_start, x_across = begin_of(row, start, across, near, mid, x_far, x_mid, x_near, TILE)
        start, across = begin_of(row, start, across, near, mid, dx_far, dx_mid, dx_near, TILE)
        offset, inside = values(k, exists, across, kept, inner, TILE)
        of_dy, inside = values(k, exists, d_across, kept, inner, TILE)
        of_x, inside = values(k, exists, x_across, kept, inner, TILE)
        live_rows = live(valid, row, exists)
        read = of_live(inside, valid, live_rows)
        centre = tl.load(mean + row, live_rows, 0.0)
        factor = tl.load(rstd + row, live_rows, 0.0)
        if HOW.halves:
            other = (1 - half) * TILE.block + lane
            where, there = values(other, live_rows, across, kept, inner, TILE)
            other_g, other_xhat = _gradient(dy + start, where, x + start, where, centre, factor, there, dtype)
            if weight is not None:
                other_g *= _factor((weight, each, step), row, exists, other, kept, dtype, ONE, TILE)
            by_xhat = tl.sum(other_g * other_xhat, 1)
            by_one = tl.sum(other_g, 1)
        d, xhat = _gradient(dy + d_start, of_dy, x + x_start, of_x, centre, factor, read, dtype)
        g = d
        if weight is not None:
            if each is None:
                g = d * w
            else:
                g = d * _factor((weight, each, step), row, exists, k, kept, dtype, ONE, TILE)
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
            if each is not None:
                _put_sum(dweight + start, offset, d, xhat, inside)
            elif HOW.fold and TILE.rows > 1:
                sum_dweight += tl.sum(d * xhat, 0, keep_dims=True)
                sum_dbias += tl.sum(d, 0, keep_dims=True)
            else:
                sum_dweight = tl.fma(d, xhat, sum_dweight)
                sum_dbias += d
    if dweight is not None and each is None:
        tl.store(dweight + share + k, rounded_for(dweight, tl.sum(sum_dweight, 0)), k < kept)
        if dbias is not None:
            tl.store(dbias + share + k, rounded_for(dbias, tl.sum(sum_dbias, 0)), k < kept)


@triton.jit(do_not_specialize=_INTEGERS)
def backward_long(
    dy, dtotal, x, mean, rstd, valid, weight, dx, dweight, rows, kept, inner, each, step,
    RMS: tl.constexpr, ONE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The input's gradient for rows longer than a tile, and dweight if it has a line per row.

    Moves 3 s bytes per element (4 s with dtotal) from and to memory, 2 s more from the cache, in one launch.
    """
    dtype: tl.constexpr = mean.dtype.element_ty
    kept, inner = divided(kept, inner, TILE)
    start, across, row, exists = rows_of(tl.program_id(0), rows, kept, inner, TILE)
    there = live(valid, row, exists)
    centre = tl.load(mean + row, there, 0.0)
    factor = tl.load(rstd + row, there, 0.0)
    lane, end = walk(kept, TILE)
    sum_xhat = zeros(TILE.rows, TILE.block, dtype)
    sum_one = zeros(TILE.rows, TILE.block, dtype)
    for begin in tl.range(0, end, TILE.block, num_stages=2):
        k = begin + lane
        offset, inside = values(k, there, across, kept, inner, TILE)
        g, xhat = _gradient(dy + start, offset, x + start, offset, centre, factor, inside, dtype)
        if weight is not None:
            g *= _factor((weight, each, step), row, exists, k, kept, dtype, ONE, TILE)
        sum_xhat += g * xhat
        sum_one += g
    by_xhat = tl.sum(sum_xhat, 1) / kept
    by_one = tl.sum(sum_one, 1) / kept
    for begin in tl.range(0, end, TILE.block, num_stages=2):
        k = begin + lane
        offset, inside = values(k, exists, across, kept, inner, TILE)
        read = of_live(inside, valid, there)
        d, xhat = _gradient(dy + start, offset, x + start, offset, centre, factor, read, dtype)
        g = d
        if weight is not None:
            g = d * _factor((weight, each, step), row, exists, k, kept, dtype, ONE, TILE)
        if dweight is not None:
            _put_sum(dweight + start, offset, d, xhat, inside)
        through = None if dtotal is None else dtotal + start
        _put_gradient(dx + start, through, offset, g, xhat, factor, by_xhat, by_one, inside, read, RMS)


@triton.jit(do_not_specialize=["rows", "kept", "inner", "tiles", "parts", "groups"])
def backward_shares(
    dy, x, mean, rstd, valid, dweight, dbias, rows, kept, inner, tiles, parts, groups,
    TILE: tl.constexpr,
):  # fmt: skip
    """Each program's share of a group's dweight and dbias, for a block of values of rows longer than a tile.

    `parts` programs go through the `tiles` of each group of `rows`. Moves 2 s bytes per element,
    in one launch; `sum_shares` adds the shares up.
    """
    dtype: tl.constexpr = mean.dtype.element_ty
    kept, inner = divided(kept, inner, TILE)
    program = tl.program_id(0) % (parts * groups)
    k = block_of_row(tl.program_id(0) // (parts * groups), kept, TILE)
    share = program.to(tl.int64) * kept + k
    first = (program // parts).to(tl.int64) * rows
    dy += first * kept * inner
    x += first * kept * inner
    mean += first
    rstd += first
    if valid is not None:
        valid += first
    sum_dweight = zeros(TILE.rows, TILE.block, dtype)
    sum_dbias = zeros(TILE.rows, TILE.block, dtype)
    for at in tl.range(program % parts, tiles, parts, num_stages=2):
        start, across, row, exists = rows_of(at, rows, kept, inner, TILE)
        there = live(valid, row, exists)
        offset, inside = values(k, there, across, kept, inner, TILE)
        centre = tl.load(mean + row, there, 0.0)
        factor = tl.load(rstd + row, there, 0.0)
        d, xhat = _gradient(dy + start, offset, x + start, offset, centre, factor, inside, dtype)
        sum_dweight += d * xhat
        sum_dbias += d
    tl.store(dweight + share, rounded_for(dweight, tl.sum(sum_dweight, 0)), k < kept)
    if dbias is not None:
        tl.store(dbias + share, rounded_for(dbias, tl.sum(sum_dbias, 0)), k < kept)
