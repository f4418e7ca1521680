"""The per-row forward kernels: what one program does with one tile of rows.

Bytes are counted per element of the input, s being the size of its dtype; statistics, weight and bias are
read from the caches. Arithmetic has the statistics' dtype: float32, float64 for float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from leannorm.ops.backends.triton.row_addresses import (
    divided,
    live,
    of_live,
    parameter,
    rows_of,
    values,
    walk,
)


@triton.jit
def _input(x, residual, offset, inside, dtype: tl.constexpr):
    """x, or x + residual rounded to x's dtype: what is normalized; zeros outside."""
    value = tl.load(x + offset, inside, 0.0, eviction_policy="evict_first")
    if residual is not None:
        other = tl.load(residual + offset, inside, 0.0, eviction_policy="evict_first")
        value = (value.to(dtype) + other.to(dtype)).to(value.dtype)
    return value


@triton.jit
def _beyond_float32(square, exists, CHECKED: tl.constexpr):
    """Is a row's sum of squares outside of the range where float32 is exact? (0 may be an underflow.)"""
    if CHECKED:
        within = (square >= 2.0**-80) & (square <= 2.0**100)  # False for NaN, which infinities lead to
        return tl.min((within | ~exists).to(tl.int32), 0) == 0
    else:
        return False


@triton.jit
def _scale(largest):
    """A power of two that brings deviations of this size to where their squares are float32."""
    return tl.where(largest > 2.0**40, 2.0**-78, tl.where(largest < 2.0**-40, 2.0**60, 1.0))


@triton.jit
def _rstd(square, scale, kept, EPS: tl.constexpr):
    """1 / sqrt(variance + eps), from squares of `scale` times the deviations; variance 0 has no scale."""
    variance = square / kept
    eps = scale * EPS * scale
    plain = tl.rsqrt(tl.zeros_like(variance) + EPS)
    return tl.where((variance == 0) | (eps > 2.0**60), plain, scale * tl.rsqrt(variance + eps))


@triton.jit
def _put(y, offset, centred, rstd, weight, bias, k, kept, inside, valid, read, CAST: tl.constexpr):
    value = centred * rstd[:, None]
    if CAST:
        value = value.to(y.dtype.element_ty).to(value.dtype)
    if weight is not None:
        value *= parameter(weight, k, kept, value.dtype)
    if bias is not None:
        value += parameter(bias, k, kept, value.dtype)
    if valid is not None:
        value = tl.where(read, value, 0.0)
    tl.store(y + offset, value.to(y.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["rows", "kept", "inner"])
def forward_tile(
    x, residual, weight, bias, y, total, mean, rstd, valid, rows, kept, inner,
    EPS: tl.constexpr, RMS: tl.constexpr, CHECKED: tl.constexpr, CAST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Rows that fit on chip: read once, written once.

    Moves 2 s bytes an element (4 s with a residual: x, residual, total, y) in one launch.
    """
    dtype: tl.constexpr = mean.dtype.element_ty
    ROWS: tl.constexpr = TILE.rows
    BLOCK: tl.constexpr = TILE.block
    kept, inner = divided(kept, inner, TILE)
    start, across, row, exists = rows_of(tl.program_id(0), rows, kept, inner, TILE)
    k = tl.arange(0, BLOCK)
    there = live(valid, row, exists)
    offset, inside = values(k, exists, across, kept, inner, TILE)
    read = of_live(inside, valid, there)
    value = _input(x + start, None if residual is None else residual + start, offset, read, dtype)
    if residual is not None:
        tl.store(total + start + offset, value, inside)
    centred = value.to(dtype)
    centre = tl.zeros([ROWS], dtype)
    rest = centre
    if not RMS:
        centre = tl.sum(centred, 1) / kept
        centred = tl.where(read, centred - centre[:, None], 0.0)
        # the deviations' mean, 0 in exact arithmetic, corrects the rounding of the mean
        rest = tl.sum(centred, 1) / kept
    square = tl.sum(centred * centred, 1)
    square -= rest * rest * kept
    square = tl.where(square < 0, 0.0, square)  # not a maximum, which would lose a NaN
    tl.store(mean + row, centre + rest, exists)
    if _beyond_float32(square, there, CHECKED):  # read again: ordinary rows need no registers for it
        value = _input(x + start, None if residual is None else residual + start, offset, read, dtype)
        centred = tl.where(read, value.to(dtype) - centre[:, None] - rest[:, None], 0.0)
        scale = _scale(tl.max(tl.abs(centred), 1))
        square = tl.sum((centred * scale[:, None]) * (centred * scale[:, None]), 1)
        factor = _rstd(square, scale, kept, EPS)
    else:
        factor = tl.rsqrt(square / kept + EPS)
        if not RMS:
            centred -= rest[:, None]
    # once, behind both: of two, compilers read the parameters before the branch, and have no registers left
    tl.store(rstd + row, factor, exists)
    _put(y + start, offset, centred, factor, weight, bias, k, kept, inside, valid, read, CAST)


@triton.jit(do_not_specialize=["rows", "kept", "inner"])
def forward_long(
    x, residual, weight, bias, y, total, mean, rstd, valid, rows, kept, inner,
    EPS: tl.constexpr, RMS: tl.constexpr, CHECKED: tl.constexpr, CAST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Rows longer than a tile: read twice, the second time from the cache if that holds all rows in flight.

    Moves 2 s bytes an element (4 s with a residual) from and to memory, s (2 s) more from the cache, in one
    launch. Every lane has its own mean and sum of squares (Welford), of values less the mean of the first
    block; they are merged once, at the end.
    """
    dtype: tl.constexpr = mean.dtype.element_ty
    ROWS: tl.constexpr = TILE.rows
    BLOCK: tl.constexpr = TILE.block
    kept, inner = divided(kept, inner, TILE)
    start, across, row, exists = rows_of(tl.program_id(0), rows, kept, inner, TILE)
    there = live(valid, row, exists)
    x += start
    if residual is not None:
        residual += start
    lane, end = walk(kept, TILE)
    centre = tl.zeros([ROWS], dtype)
    if not RMS:
        offset, inside = values(lane, there, across, kept, inner, TILE)
        first = _input(x, residual, offset, inside, dtype).to(dtype)
        centre = tl.sum(first, 1) / tl.minimum(kept, BLOCK)
    lane_mean = tl.zeros([ROWS, BLOCK], dtype)
    lane_square = tl.zeros([ROWS, BLOCK], dtype)
    seen = 0.0
    for begin in tl.range(0, end, BLOCK, num_stages=2):
        k = begin + lane
        offset, inside = values(k, there, across, kept, inner, TILE)
        value = _input(x, residual, offset, inside, dtype).to(dtype)
        if RMS:
            lane_square += value * value
        else:
            seen += 1.0
            from_mean = tl.where(inside, value - centre[:, None] - lane_mean, 0.0)
            step = from_mean * (1.0 / seen)
            lane_mean += step
            lane_square += from_mean * (from_mean - step)
    rest = tl.zeros([ROWS], dtype)
    square = tl.sum(lane_square, 1)
    if not RMS:
        count = ((kept - lane + BLOCK - 1) // BLOCK).to(dtype)[None, :]
        rest = tl.sum(lane_mean * count, 1) / kept
        between = lane_mean - rest[:, None]
        square += tl.sum(count * between * between, 1)
    scale = tl.zeros([ROWS], dtype) + 1.0
    if _beyond_float32(square, there, CHECKED):
        largest = tl.zeros([ROWS, BLOCK], dtype)
        for begin in tl.range(0, end, BLOCK, num_stages=2):
            k = begin + lane
            offset, inside = values(k, there, across, kept, inner, TILE)
            value = _input(x, residual, offset, inside, dtype).to(dtype)
            deviation = tl.where(inside, value - centre[:, None] - rest[:, None], 0.0)
            largest = tl.maximum(largest, tl.abs(deviation))
        scale = _scale(tl.max(largest, 1))
        lane_square = tl.zeros([ROWS, BLOCK], dtype)
        for begin in tl.range(0, end, BLOCK, num_stages=2):
            k = begin + lane
            offset, inside = values(k, there, across, kept, inner, TILE)
            value = _input(x, residual, offset, inside, dtype).to(dtype)
            deviation = tl.where(inside, value - centre[:, None] - rest[:, None], 0.0) * scale[:, None]
            lane_square += deviation * deviation
        square = tl.sum(lane_square, 1)
    factor = _rstd(square, scale, kept, EPS)
    tl.store(mean + row, centre + rest, exists)
    tl.store(rstd + row, factor, exists)
    for begin in tl.range(0, end, BLOCK, num_stages=2):
        k = begin + lane
        offset, inside = values(k, exists, across, kept, inner, TILE)
        read = of_live(inside, valid, there)
        value = _input(x, residual, offset, read, dtype)
        if residual is not None:
            tl.store(total + start + offset, value, inside)
        centred = value.to(dtype) - centre[:, None] - rest[:, None]
        _put(y + start, offset, centred, factor, weight, bias, k, kept, inside, valid, read, CAST)
