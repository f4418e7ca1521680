"""The per-row forward kernels: what one program does with one tile of rows.

Bytes are counted per element of the input, s being the size of its dtype; statistics, weight and bias are
read from the caches. Arithmetic has the statistics' dtype: float32, float64 for float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from leannorm.ops.backends.triton.rounding import zeros
from leannorm.ops.backends.triton.row_addresses import (
    begin_of,
    divided,
    line,
    line_of_group,
    live,
    of_live,
    rows_of,
    values,
    walk,
)


@triton.jit
def _input(x, residual, gate, offset, inside, row, exists, k, kept, dtype: tl.constexpr, TILE: tl.constexpr):
    """x, or x + gate * residual rounded to x's dtype, which is then normalized; zeros outside."""
    value = tl.load(x + offset, inside, 0.0, eviction_policy="evict_first")
    if residual is not None:
        other = tl.load(residual + offset, inside, 0.0, eviction_policy="evict_first").to(dtype)
        if gate[0] is not None:
            other = line(gate, row, exists, k, kept, dtype, TILE) * other
        value = (value.to(dtype) + other).to(value.dtype)
    return value


@triton.jit
def beyond_float32(square, exists, CHECKED: tl.constexpr):
    """Whether a row's sum of squares is outside of the range where float32 is exact (0 may be an
    underflow)."""
    if CHECKED:
        within = (square >= 2.0**-80) & (square <= 2.0**100)  # False for NaN, which infinities lead to
        return tl.min((within | ~exists).to(tl.int32), 0) == 0
    else:
        return False


@triton.jit
def scale_of(largest):
    """A power of two that scales deviations of this size so that float32 can represent their squares."""
    scale = tl.where(largest > 2.0**40, 2.0**-78, tl.where(largest < 2.0**-40, 2.0**60, 1.0))
    return scale.to(largest.dtype)  # plain numbers are always float32


@triton.jit
def rstd_of(square, scale, kept, EPS: tl.constexpr):
    """1 / sqrt(variance + eps), from squares of `scale` times the deviations; variance 0 has no scale."""
    variance = square / kept
    eps = scale * EPS * scale
    plain = tl.rsqrt(tl.zeros_like(variance) + EPS)
    return tl.where((variance == 0) | (eps > 2.0**60), plain, scale * tl.rsqrt(variance + eps))


@triton.jit
def _put(
    y, offset, centred, rstd, weight, bias, inside, read, valid, row, exists, k, kept,
    ONE: tl.constexpr, CAST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The normalized value, times ONE + weight, plus bias; 0 in rows that are not `valid`."""
    value = centred * rstd[:, None]
    if CAST:
        value = value.to(y.dtype.element_ty).to(value.dtype)
    if weight[0] is not None:
        factor = line(weight, row, exists, k, kept, value.dtype, TILE)
        value *= factor if ONE == 0.0 else ONE + factor
    if bias[0] is not None:
        value += line(bias, row, exists, k, kept, value.dtype, TILE)
    if valid is not None:
        value = tl.where(read, value, 0.0)
    tl.store(y + offset, value.to(y.dtype.element_ty), inside)


_INTEGERS = ["rows", "kept", "inner", "gate_each", "gate_step"]
_INTEGERS += ["weight_each", "weight_step", "bias_each", "bias_step"]
_STEPS = ["near", "mid", "x_far", "x_mid", "x_near", "y_far", "y_mid", "y_near"]


@triton.jit
def _normalize_rows(
    x, residual, gate, weight, bias, y, total, mean, rstd, valid, row, exists, there, k, kept,
    offset, read, y_start, put, inside,
    EPS: tl.constexpr, RMS: tl.constexpr, CHECKED: tl.constexpr, CAST: tl.constexpr,
    ONE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of whole rows: statistics and output. `offset` is where they are read, `put` where they go."""
    dtype: tl.constexpr = mean.dtype.element_ty
    value = _input(x, residual, gate, offset, read, row, exists, k, kept, dtype, TILE)
    if residual is not None:
        tl.store(total + y_start + put, value, inside)
    centred = value.to(dtype)
    centre = zeros(TILE.rows, None, dtype)
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
    if beyond_float32(square, there, CHECKED):  # read again, so that ordinary rows need no registers for it
        value = _input(x, residual, gate, offset, read, row, exists, k, kept, dtype, TILE)
        centred = tl.where(read, value.to(dtype) - centre[:, None] - rest[:, None], 0.0)
        scale = scale_of(tl.max(tl.abs(centred), 1))
        square = tl.sum((centred * scale[:, None]) * (centred * scale[:, None]), 1)
        factor = rstd_of(square, scale, kept, EPS)
    else:
        factor = tl.rsqrt(square / kept + EPS)
        if not RMS:
            centred -= rest[:, None]
    # once, after both: with a load in each branch, compilers read the parameters before the branch and run
    # out of registers
    if valid is not None:
        factor = tl.where(there, factor, 0.0)
    tl.store(rstd + row, factor, exists)
    _put(
        y + y_start, put, centred, factor, weight, bias, inside, read, valid, row, exists, k, kept,
        ONE, CAST, TILE,
    )  # fmt: skip


@triton.jit(do_not_specialize=_INTEGERS + _STEPS)
def forward_tile(
    x, residual, gate, weight, bias, y, total, mean, rstd, valid, rows, kept, inner,
    gate_each, gate_step, weight_each, weight_step, bias_each, bias_step,
    near, mid, x_far, x_mid, x_near, y_far, y_mid, y_near,
    EPS: tl.constexpr, RMS: tl.constexpr, CHECKED: tl.constexpr, CAST: tl.constexpr,
    ONE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Rows that fit on chip: read once, written once.

    Moves 2 s bytes per element (4 s with a residual: x, residual, total, y) in one launch.
    """
    kept, inner = divided(kept, inner, TILE)
    start, across, row, exists = rows_of(tl.program_id(0), rows, kept, inner, TILE)
    k = tl.arange(0, TILE.block)
    y_start, y_across = begin_of(row, start, across, near, mid, y_far, y_mid, y_near, TILE)
    put, inside = values(k, exists, y_across, kept, inner, TILE)
    start, across = begin_of(row, start, across, near, mid, x_far, x_mid, x_near, TILE)
    offset, inside = values(k, exists, across, kept, inner, TILE)
    there = live(valid, row, exists)
    read = of_live(inside, valid, there)
    x += start
    if residual is not None:
        residual += start
    of_gate, of_weight, of_bias = (
        (gate, gate_each, gate_step), (weight, weight_each, weight_step), (bias, bias_each, bias_step)
    )  # fmt: skip
    _normalize_rows(
        x, residual, of_gate, of_weight, of_bias, y, total, mean, rstd, valid, row, exists, there, k, kept,
        offset, read, y_start, put, inside, EPS, RMS, CHECKED, CAST, ONE, TILE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "kept", "tiles", "parts", "gate_step", "weight_step", "bias_step"])
def forward_run(
    x, residual, gate, weight, bias, y, total, mean, rstd, rows, kept, tiles, parts,
    gate_step, weight_step, bias_step,
    EPS: tl.constexpr, RMS: tl.constexpr, CHECKED: tl.constexpr, CAST: tl.constexpr,
    ONE: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows of a group, which share a line of weight, bias and gate: many tiles a program.

    Moves 2 s bytes per element (4 s with a residual) in one launch, and reads a group's lines once for each
    of its `parts` programs, not once for each row. The next tiles are loaded while one is computed.
    """
    dtype: tl.constexpr = mean.dtype.element_ty
    kept, inner = divided(kept, 1, TILE)
    group = (tl.program_id(0) // parts).to(tl.int64)
    k = tl.arange(0, TILE.block)
    x += group * rows * kept
    y += group * rows * kept
    if residual is not None:
        residual += group * rows * kept
        total += group * rows * kept
    mean += group * rows
    rstd += group * rows
    if gate is not None:
        gate = line_of_group(gate, group, gate_step, k, kept, dtype, TILE)
    if weight is not None:
        weight = line_of_group(weight, group, weight_step, k, kept, dtype, TILE)
    if bias is not None:
        bias = line_of_group(bias, group, bias_step, k, kept, dtype, TILE)
    for at in tl.range(tl.program_id(0) % parts, tiles, parts, num_stages=STAGES):
        start, across, row, exists = rows_of(at, rows, kept, inner, TILE)
        offset, inside = values(k, exists, across, kept, inner, TILE)
        _normalize_rows(
            x + start, None if residual is None else residual + start,
            (gate, None, None), (weight, None, None), (bias, None, None),
            y, total, mean, rstd, None, row, exists, exists, k, kept,
            offset, inside, start, offset, inside, EPS, RMS, CHECKED, CAST, ONE, TILE,
        )  # fmt: skip


@triton.jit(do_not_specialize=_INTEGERS)
def forward_long(
    x, residual, gate, weight, bias, y, total, mean, rstd, valid, rows, kept, inner,
    gate_each, gate_step, weight_each, weight_step, bias_each, bias_step,
    EPS: tl.constexpr, RMS: tl.constexpr, CHECKED: tl.constexpr, CAST: tl.constexpr,
    ONE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Rows longer than a tile: read twice, the second time from the cache if that holds all rows in flight.

    Moves 2 s bytes per element (4 s with a residual) from and to memory, s (2 s) more from the cache, in one
    launch. Every lane has its own mean and sum of squares (Welford), of the values minus the mean of the
    first block; they are merged once, at the end.
    """
    dtype: tl.constexpr = mean.dtype.element_ty
    kept, inner = divided(kept, inner, TILE)
    start, across, row, exists = rows_of(tl.program_id(0), rows, kept, inner, TILE)
    there = live(valid, row, exists)
    x += start
    if residual is not None:
        residual += start
    lane, end = walk(kept, TILE)
    of_gate = gate, gate_each, gate_step
    centre = zeros(TILE.rows, None, dtype)
    if not RMS:
        offset, inside = values(lane, there, across, kept, inner, TILE)
        first = _input(x, residual, of_gate, offset, inside, row, exists, lane, kept, dtype, TILE).to(dtype)
        centre = tl.sum(first, 1) / tl.minimum(kept, TILE.block)
    lane_mean = zeros(TILE.rows, TILE.block, dtype)
    lane_square = zeros(TILE.rows, TILE.block, dtype)
    seen = tl.full((), 0.0, dtype)  # a plain number is always float32
    for begin in tl.range(0, end, TILE.block, num_stages=2):
        k = begin + lane
        offset, inside = values(k, there, across, kept, inner, TILE)
        value = _input(x, residual, of_gate, offset, inside, row, exists, k, kept, dtype, TILE).to(dtype)
        if RMS:
            lane_square += value * value
        else:
            seen += 1.0
            from_mean = tl.where(inside, value - centre[:, None] - lane_mean, 0.0)
            step = from_mean * (1.0 / seen)
            lane_mean += step
            lane_square += from_mean * (from_mean - step)
    rest = zeros(TILE.rows, None, dtype)
    square = tl.sum(lane_square, 1)
    if not RMS:
        count = ((kept - lane + TILE.block - 1) // TILE.block).to(dtype)[None, :]
        rest = tl.sum(lane_mean * count, 1) / kept
        between = lane_mean - rest[:, None]
        square += tl.sum(count * between * between, 1)
    scale = zeros(TILE.rows, None, dtype) + 1.0
    if beyond_float32(square, there, CHECKED):
        largest = zeros(TILE.rows, TILE.block, dtype)
        for begin in tl.range(0, end, TILE.block, num_stages=2):
            k = begin + lane
            offset, inside = values(k, there, across, kept, inner, TILE)
            value = _input(x, residual, of_gate, offset, inside, row, exists, k, kept, dtype, TILE).to(dtype)
            deviation = tl.where(inside, value - centre[:, None] - rest[:, None], 0.0)
            largest = tl.maximum(largest, tl.abs(deviation))
        scale = scale_of(tl.max(largest, 1))
        lane_square = zeros(TILE.rows, TILE.block, dtype)
        for begin in tl.range(0, end, TILE.block, num_stages=2):
            k = begin + lane
            offset, inside = values(k, there, across, kept, inner, TILE)
            value = _input(x, residual, of_gate, offset, inside, row, exists, k, kept, dtype, TILE).to(dtype)
            deviation = tl.where(inside, value - centre[:, None] - rest[:, None], 0.0) * scale[:, None]
            lane_square += deviation * deviation
        square = tl.sum(lane_square, 1)
    factor = rstd_of(square, scale, kept, EPS)
    tl.store(mean + row, centre + rest, exists)
    if valid is not None:
        factor = tl.where(there, factor, 0.0)
    tl.store(rstd + row, factor, exists)
    for begin in tl.range(0, end, TILE.block, num_stages=2):
        k = begin + lane
        offset, inside = values(k, exists, across, kept, inner, TILE)
        read = of_live(inside, valid, there)
        value = _input(x, residual, of_gate, offset, read, row, exists, k, kept, dtype, TILE)
        if residual is not None:
            tl.store(total + start + offset, value, inside)
        centred = value.to(dtype) - centre[:, None] - rest[:, None]
        _put(
            y + start, offset, centred, factor, (weight, weight_each, weight_step),
            (bias, bias_each, bias_step), inside, read, valid, row, exists, k, kept, ONE, CAST, TILE,
        )  # fmt: skip
