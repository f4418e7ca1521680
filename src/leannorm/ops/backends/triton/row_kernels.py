"""The per-row kernels: what one program does with one tile of rows.

A tensor is (outer, kept, inner) in memory, and every (outer, inner) is a row of `kept` values. A tile is
ROWS rows by BLOCK of their values. With inner = 1 rows are lines of memory (LINES) and a tile's rows follow
each other; else they lie side by side, and a tile's rows are neighbours within one outer index. Either way
the axis along which memory is contiguous is the one that a warp reads along.

Bytes are counted per element of the input, s being the size of its dtype; statistics, weight and bias are
read from the caches. Arithmetic has the statistics' dtype: float32, float64 for float64.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rows(at, rows, kept, inner, LINES: tl.constexpr, ROWS: tl.constexpr):
    """Tile `at`: where it starts, how far apart its rows are, their numbers, and which of them exist."""
    lane = tl.arange(0, ROWS)
    if LINES:
        first = at * tl.full((), ROWS, tl.int64)
        return first * kept, (lane * kept)[:, None], first + lane, lane < rows - first
    else:
        blocks = tl.cdiv(inner, ROWS)
        outer = (at // blocks) * tl.full((), 1, tl.int64)
        column = (at % blocks) * ROWS
        row = outer * inner + column + lane
        return outer * kept * inner + column, lane[:, None], row, lane < inner - column


@triton.jit
def _along(k, inner, LINES: tl.constexpr, WIDE: tl.constexpr):
    """How far from its row's first value the k-th lies: a 64-bit number where that is WIDE."""
    if LINES:
        return k[None, :]
    elif WIDE:
        return k[None, :].to(tl.int64) * inner
    else:
        return k[None, :] * inner


@triton.jit
def _walk(kept, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """The first values of a row, and its end, where a walk along it passes no 32-bit number unawares."""
    if WIDE:
        return tl.arange(0, BLOCK).to(tl.int64), kept.to(tl.int64)
    else:
        return tl.arange(0, BLOCK), kept


@triton.jit
def _divided(kept, inner, LINES: tl.constexpr, V: tl.constexpr):
    """The same numbers, but so that the compiler sees what divides the contiguous one."""
    if LINES:
        kept = kept // V * V
    else:
        inner = inner // V * V
    return kept, inner


@triton.jit
def _input(x, residual, offset, inside, dtype: tl.constexpr):
    """x, or x + residual rounded to x's dtype: what is normalized; zeros outside."""
    value = tl.load(x + offset, inside, 0.0, eviction_policy="evict_first")
    if residual is not None:
        other = tl.load(residual + offset, inside, 0.0, eviction_policy="evict_first")
        value = (value.to(dtype) + other.to(dtype)).to(value.dtype)
    return value


@triton.jit
def _parameter(p, k, kept, dtype: tl.constexpr):
    return tl.load(p + k[None, :], k[None, :] < kept, 0.0, eviction_policy="evict_last").to(dtype)


@triton.jit
def _beyond_float32(square, exists, CHECKED: tl.constexpr):
    """Has a row's sum of squares left the range in which float32 keeps its digits? (A sum of 0 may have.)"""
    if CHECKED:
        within = (square >= 2.0**-80) & (square <= 2.0**100)  # not so a NaN, which infinities leave
        return tl.min((within | ~exists).to(tl.int32), 0) == 0
    else:
        return False


@triton.jit
def _scale(largest):
    """A power of two that brings deviations of this size to where their squares are float32."""
    return tl.where(largest > 2.0**40, 2.0**-78, tl.where(largest < 2.0**-40, 2.0**60, 1.0))


@triton.jit
def _rstd(square, scale, kept, EPS: tl.constexpr):
    """1 / sqrt(variance + eps), from squares of `scale` times the deviations; of 0 the scale says nothing."""
    variance = square / kept
    eps = scale * EPS * scale
    plain = tl.rsqrt(tl.zeros_like(variance) + EPS)
    return tl.where((variance == 0) | (eps > 2.0**60), plain, scale * tl.rsqrt(variance + eps))


@triton.jit
def _put(y, offset, centred, rstd, weight, bias, k, kept, inside):
    value = centred * rstd[:, None]
    if weight is not None:
        value *= _parameter(weight, k, kept, value.dtype)
    if bias is not None:
        value += _parameter(bias, k, kept, value.dtype)
    tl.store(y + offset, value.to(y.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["rows", "kept", "inner"])
def forward_tile(
    x, residual, weight, bias, y, total, mean, rstd, rows, kept, inner,
    EPS: tl.constexpr, RMS: tl.constexpr, CHECKED: tl.constexpr,
    LINES: tl.constexpr, V: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows that fit on chip: read once, written once.

    Moves 2 s bytes an element (4 s with a residual: x, residual, total, y) in one launch.
    """
    dtype: tl.constexpr = mean.dtype.element_ty
    kept, inner = _divided(kept, inner, LINES, V)
    start, across, row, exists = _rows(tl.program_id(0), rows, kept, inner, LINES, ROWS)
    k = tl.arange(0, BLOCK)
    inside = exists[:, None] & (k < kept)[None, :]
    offset = across + _along(k, inner, LINES, WIDE)
    value = _input(x + start, None if residual is None else residual + start, offset, inside, dtype)
    if residual is not None:
        tl.store(total + start + offset, value, inside)
    centred = value.to(dtype)
    centre = tl.zeros([ROWS], dtype)
    rest = centre
    if not RMS:
        centre = tl.sum(centred, 1) / kept
        centred = tl.where(inside, centred - centre[:, None], 0.0)
        # what the deviations add up to, 0 in exact arithmetic, mends the mean's rounding
        rest = tl.sum(centred, 1) / kept
    square = tl.sum(centred * centred, 1)
    square -= rest * rest * kept
    square = tl.where(square < 0, 0.0, square)  # not a maximum, which would lose a NaN
    tl.store(mean + row, centre + rest, exists)
    if _beyond_float32(square, exists, CHECKED):  # read again: ordinary rows then need no registers for this
        value = _input(x + start, None if residual is None else residual + start, offset, inside, dtype)
        centred = tl.where(inside, value.to(dtype) - centre[:, None] - rest[:, None], 0.0)
        scale = _scale(tl.max(tl.abs(centred), 1))
        square = tl.sum((centred * scale[:, None]) * (centred * scale[:, None]), 1)
        factor = _rstd(square, scale, kept, EPS)
        tl.store(rstd + row, factor, exists)
        _put(y + start, offset, centred, factor, weight, bias, k, kept, inside)
    else:
        factor = tl.rsqrt(square / kept + EPS)
        tl.store(rstd + row, factor, exists)
        if not RMS:
            centred -= rest[:, None]
        _put(y + start, offset, centred, factor, weight, bias, k, kept, inside)


@triton.jit(do_not_specialize=["rows", "kept", "inner"])
def forward_long(
    x, residual, weight, bias, y, total, mean, rstd, rows, kept, inner,
    EPS: tl.constexpr, RMS: tl.constexpr, CHECKED: tl.constexpr,
    LINES: tl.constexpr, V: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows longer than a tile: read twice, the second time from the cache where it holds what is under way.

    Moves 2 s bytes an element (4 s with a residual) from and to memory, s (2 s) more from the cache, in one
    launch. Every lane keeps its own mean and sum of squares (Welford), of values from which the first
    block's mean was taken away; they are merged once, at the end.
    """
    dtype: tl.constexpr = mean.dtype.element_ty
    kept, inner = _divided(kept, inner, LINES, V)
    start, across, row, exists = _rows(tl.program_id(0), rows, kept, inner, LINES, ROWS)
    x += start
    if residual is not None:
        residual += start
    lane, end = _walk(kept, BLOCK, WIDE)
    centre = tl.zeros([ROWS], dtype)
    if not RMS:
        inside = exists[:, None] & (lane < kept)[None, :]
        first = _input(x, residual, across + _along(lane, inner, LINES, WIDE), inside, dtype).to(dtype)
        centre = tl.sum(first, 1) / tl.minimum(kept, BLOCK)
    lane_mean = tl.zeros([ROWS, BLOCK], dtype)
    lane_square = tl.zeros([ROWS, BLOCK], dtype)
    seen = 0.0
    for begin in tl.range(0, end, BLOCK, num_stages=2):
        k = begin + lane
        inside = exists[:, None] & (k < kept)[None, :]
        value = _input(x, residual, across + _along(k, inner, LINES, WIDE), inside, dtype).to(dtype)
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
    if _beyond_float32(square, exists, CHECKED):
        largest = tl.zeros([ROWS, BLOCK], dtype)
        for begin in tl.range(0, end, BLOCK, num_stages=2):
            k = begin + lane
            inside = exists[:, None] & (k < kept)[None, :]
            value = _input(x, residual, across + _along(k, inner, LINES, WIDE), inside, dtype).to(dtype)
            deviation = tl.where(inside, value - centre[:, None] - rest[:, None], 0.0)
            largest = tl.maximum(largest, tl.abs(deviation))
        scale = _scale(tl.max(largest, 1))
        lane_square = tl.zeros([ROWS, BLOCK], dtype)
        for begin in tl.range(0, end, BLOCK, num_stages=2):
            k = begin + lane
            inside = exists[:, None] & (k < kept)[None, :]
            value = _input(x, residual, across + _along(k, inner, LINES, WIDE), inside, dtype).to(dtype)
            deviation = tl.where(inside, value - centre[:, None] - rest[:, None], 0.0) * scale[:, None]
            lane_square += deviation * deviation
        square = tl.sum(lane_square, 1)
    factor = _rstd(square, scale, kept, EPS)
    tl.store(mean + row, centre + rest, exists)
    tl.store(rstd + row, factor, exists)
    for begin in tl.range(0, end, BLOCK, num_stages=2):
        k = begin + lane
        inside = exists[:, None] & (k < kept)[None, :]
        offset = across + _along(k, inner, LINES, WIDE)
        value = _input(x, residual, offset, inside, dtype)
        if residual is not None:
            tl.store(total + start + offset, value, inside)
        centred = value.to(dtype) - centre[:, None] - rest[:, None]
        _put(y + start, offset, centred, factor, weight, bias, k, kept, inside)


@triton.jit
def _gradient(dy, x, mean, rstd, offset, inside, dtype: tl.constexpr):
    """dy and the normalized input, 0 outside."""
    d = tl.load(dy + offset, inside, 0.0, eviction_policy="evict_first").to(dtype)
    value = tl.load(x + offset, inside, 0.0, eviction_policy="evict_first").to(dtype)
    return d, (value - mean[:, None]) * rstd[:, None]


@triton.jit
def _put_gradient(dx, dtotal, offset, g, xhat, rstd, by_xhat, by_one, inside, RMS: tl.constexpr):
    value = g - xhat * by_xhat[:, None]
    if not RMS:
        value -= by_one[:, None]
    value *= rstd[:, None]
    if dtotal is not None:
        value += tl.load(dtotal + offset, inside, 0.0, eviction_policy="evict_first").to(value.dtype)
    tl.store(dx + offset, value.to(dx.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["rows", "kept", "inner", "tiles"])
def backward_tile(
    dy, dtotal, x, mean, rstd, weight, dx, dweight, dbias, rows, kept, inner, tiles,
    RMS: tl.constexpr, LINES: tl.constexpr, V: tl.constexpr, WIDE: tl.constexpr,
    FOLD: tl.constexpr, HALVES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows that fit on chip: each program goes through tiles and adds up its share of dweight and dbias.

    Moves 3 s bytes an element (4 s with dtotal), and writes `kept` values of dweight and dbias for each
    program, in one launch; `sum_shares` adds those up in a second one where there are several. The next
    tile is on its way while one is worked on (STAGES). FOLD adds up a tile's rows at once, where each
    thread (or a few neighbours) holds them; else each row of the tile keeps its sums to the end. With HALVES
    two programs share a row: both sum over all of it, one of them out of the cache, and each keeps a half,
    since the registers do not hold more.
    """
    dtype: tl.constexpr = mean.dtype.element_ty
    kept, inner = _divided(kept, inner, LINES, V)
    program, programs = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, BLOCK)
    k = lane
    if HALVES:
        half = program % 2
        k = half * BLOCK + lane
        program, programs = program // 2, programs // 2
    kept_rows: tl.constexpr = 1 if FOLD else ROWS
    if weight is not None:
        w = _parameter(weight, k, kept, dtype)
    if dweight is not None:
        sum_dweight = tl.zeros([kept_rows, BLOCK], dtype)
        sum_dbias = tl.zeros([kept_rows, BLOCK], dtype)
    for at in tl.range(program, tiles, programs, num_stages=STAGES):
        start, across, row, exists = _rows(at, rows, kept, inner, LINES, ROWS)
        inside = exists[:, None] & (k < kept)[None, :]
        offset = across + _along(k, inner, LINES, WIDE)
        centre = tl.load(mean + row, exists, 0.0)
        factor = tl.load(rstd + row, exists, 0.0)
        if HALVES:
            other = (1 - half) * BLOCK + lane
            there = exists[:, None] & (other < kept)[None, :]
            where = across + _along(other, inner, LINES, WIDE)
            other_g, other_xhat = _gradient(dy + start, x + start, centre, factor, where, there, dtype)
            if weight is not None:
                other_g *= _parameter(weight, other, kept, dtype)
            by_xhat = tl.sum(other_g * other_xhat, 1)
            by_one = tl.sum(other_g, 1)
        d, xhat = _gradient(dy + start, x + start, centre, factor, offset, inside, dtype)
        g = d
        if weight is not None:
            g = d * w
        if HALVES:
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
        _put_gradient(dx + start, through, offset, g, xhat, factor, mean_xhat, mean_one, inside, RMS)
        if dweight is not None:
            if FOLD:
                sum_dweight += tl.sum(d * xhat, 0, keep_dims=True)
                sum_dbias += tl.sum(d, 0, keep_dims=True)
            else:
                sum_dweight += d * xhat
                sum_dbias += d
    if dweight is not None:
        share = program.to(tl.int64) * kept + k
        tl.store(dweight + share, tl.sum(sum_dweight, 0), k < kept)
        if dbias is not None:
            tl.store(dbias + share, tl.sum(sum_dbias, 0), k < kept)


@triton.jit(do_not_specialize=["rows", "kept", "inner"])
def backward_long(
    dy, dtotal, x, mean, rstd, weight, dx, rows, kept, inner,
    RMS: tl.constexpr, LINES: tl.constexpr, V: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The input's gradient of rows longer than a tile.

    Moves 3 s bytes an element (4 s with dtotal) from and to memory, 2 s more from the cache, in one launch.
    """
    dtype: tl.constexpr = mean.dtype.element_ty
    kept, inner = _divided(kept, inner, LINES, V)
    start, across, row, exists = _rows(tl.program_id(0), rows, kept, inner, LINES, ROWS)
    centre = tl.load(mean + row, exists, 0.0)
    factor = tl.load(rstd + row, exists, 0.0)
    lane, end = _walk(kept, BLOCK, WIDE)
    sum_xhat = tl.zeros([ROWS, BLOCK], dtype)
    sum_one = tl.zeros([ROWS, BLOCK], dtype)
    for begin in tl.range(0, end, BLOCK, num_stages=2):
        k = begin + lane
        inside = exists[:, None] & (k < kept)[None, :]
        offset = across + _along(k, inner, LINES, WIDE)
        g, xhat = _gradient(dy + start, x + start, centre, factor, offset, inside, dtype)
        if weight is not None:
            g *= _parameter(weight, k, kept, dtype)
        sum_xhat += g * xhat
        sum_one += g
    by_xhat = tl.sum(sum_xhat, 1) / kept
    by_one = tl.sum(sum_one, 1) / kept
    for begin in tl.range(0, end, BLOCK, num_stages=2):
        k = begin + lane
        inside = exists[:, None] & (k < kept)[None, :]
        offset = across + _along(k, inner, LINES, WIDE)
        g, xhat = _gradient(dy + start, x + start, centre, factor, offset, inside, dtype)
        if weight is not None:
            g *= _parameter(weight, k, kept, dtype)
        through = None if dtotal is None else dtotal + start
        _put_gradient(dx + start, through, offset, g, xhat, factor, by_xhat, by_one, inside, RMS)


@triton.jit(do_not_specialize=["rows", "kept", "inner", "tiles", "programs"])
def backward_shares(
    dy, x, mean, rstd, dweight, dbias, rows, kept, inner, tiles, programs,
    LINES: tl.constexpr, V: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program's share of dweight and dbias, for BLOCK values of rows longer than a tile.

    Moves 2 s bytes an element, in one launch; `sum_shares` adds the shares up.
    """
    dtype: tl.constexpr = mean.dtype.element_ty
    kept, inner = _divided(kept, inner, LINES, V)
    program = tl.program_id(0) % programs
    k = (tl.program_id(0) // programs) * BLOCK + _walk(kept, BLOCK, WIDE)[0]
    sum_dweight = tl.zeros([ROWS, BLOCK], dtype)
    sum_dbias = tl.zeros([ROWS, BLOCK], dtype)
    for at in tl.range(program, tiles, programs, num_stages=2):
        start, across, row, exists = _rows(at, rows, kept, inner, LINES, ROWS)
        inside = exists[:, None] & (k < kept)[None, :]
        centre = tl.load(mean + row, exists, 0.0)
        factor = tl.load(rstd + row, exists, 0.0)
        offset = across + _along(k, inner, LINES, WIDE)
        d, xhat = _gradient(dy + start, x + start, centre, factor, offset, inside, dtype)
        sum_dweight += d * xhat
        sum_dbias += d
    share = program.to(tl.int64) * kept + k
    tl.store(dweight + share, tl.sum(sum_dweight, 0), k < kept)
    if dbias is not None:
        tl.store(dbias + share, tl.sum(sum_dbias, 0), k < kept)
