"""Forward in two passes over the input, for statistics of more values than one program should read.

Every program writes partial statistics of its tiles (no atomics: the order of addition is fixed by the
shape), one small launch merges them, and the second pass normalizes. It goes through the tiles in reverse,
because those that were read last are still in the L2 cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from leannorm.ops.backends.triton.rounding import zeros
from leannorm.ops.backends.triton.tiles import (
    at_data,
    block_of_channels,
    channels_of_set,
    constants,
    data_of,
    first_with_data,
    normalized,
    read,
    run_of_tiles,
    tile,
    tile_count,
    values_before,
)

SIZES = ("C", "inner", "samples", "tiles", "parts", "G")


@triton.jit
def summed(values):
    """The sum of each channel's lanes, a tree of few levels, as float64."""
    return tl.sum(values, 1).to(tl.float64)


@triton.jit
def not_negative(square):
    """0 if rounding has made a sum of squares negative; NaN stays NaN."""
    return tl.where(square < 0, 0.0, square)


@triton.jit
def finite(shift):
    """0 instead of NaN and infinities, the differences from which would all be NaN or infinite."""
    return tl.where(tl.abs(shift) < float("inf"), shift, 0.0)


@triton.jit
def beyond_float32(m2):
    """Whether any of these sums of squares is infinite or NaN."""
    return tl.min((m2 < float("inf")).to(tl.int32), 0) == 0


@triton.jit
def squares_again(x, mask, shift, segment, first, last, c_end, t0, t1, C, inner, samples, TILE: tl.constexpr):
    """The sum of squared deviations from `shift` of each of a tile's channels, of values up to 1e38.

    They are scaled by a power of two, which is right only if the plain sum overflows float32.
    """
    square = zeros(TILE.channels, TILE.elements, tl.float32)
    for c0 in range(first, last, TILE.channels):
        for t in range(t0, t1):
            start, offsets, inside = tile(t, segment, c0, c_end, C, inner, samples, TILE)
            loaded, data, _ = data_of(mask, x, inside, t, segment, inner, samples, TILE)
            deviation = read(x, start, offsets, loaded) * 2.0**-78 - shift * 2.0**-78
            deviation = tl.where(data, deviation, 0.0)
            square = tl.fma(deviation, deviation, square)
    return summed(square) * 2.0**156


@triton.jit(do_not_specialize=SIZES)
def moments_kernel(
    x, mask, mean, m2, count, C, inner, samples, tiles, parts,
    TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Mean and M2 of every channel in each of `parts` runs of `tiles` tiles: `[segments, parts, C]`.

    Reads x once and writes 16 bytes for each channel and part. Sums are of deviations from the mean of the
    run's first tile, which is within a few standard deviations of the mean, however large that is. With a
    mask it is the first tile that has data, and the number of each part's valid positions is `count`.
    """
    dtype: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    c0, part, segment, t0, t1 = run_of_tiles(C, inner, samples, tiles, parts, TILE)
    begin = values_before(t0, inner, samples, TILE)

    first = t0
    if mask is None:
        in_first = values_before(t0 + 1, inner, samples, TILE) - begin
    else:
        first, found = first_with_data(mask, t0, t1, segment, inner, samples, TILE)
        in_first = tl.maximum(found, 1)
        seen = zeros(1, TILE.elements, tl.int32)
    start, offsets, inside = tile(first, segment, c0, C, C, inner, samples, TILE)
    loaded, data, _ = data_of(mask, x, inside, first, segment, inner, samples, TILE)
    begun = at_data(mask, data, read(x, start, offsets, loaded))
    shift = finite(tl.sum(begun, 1) / in_first.to(dtype))
    total = zeros(TILE.channels, TILE.elements, dtype)
    square = zeros(TILE.channels, TILE.elements, dtype)
    for t in tl.range(t0, t1, num_stages=STAGES):
        start, offsets, inside = tile(t, segment, c0, C, C, inner, samples, TILE)
        loaded, data, valid = data_of(mask, x, inside, t, segment, inner, samples, TILE)
        if mask is not None:
            seen += valid.to(tl.int32)
        deviation = read(x, start, offsets, loaded) - shift[:, None]
        deviation = tl.where(data, deviation, 0.0)
        total += deviation
        square = tl.fma(deviation, deviation, square)

    if mask is None:
        values = (values_before(t1, inner, samples, TILE) - begin).to(tl.float64)
    else:
        values = tl.sum(tl.sum(seen, 1), 0).to(tl.float64)
        tl.store(count + segment * parts + part, values, mask=c0 == 0)
        values = tl.maximum(values, 1)
    rest = summed(total) / values
    squares = summed(square)
    if dtype == tl.float32:  # noqa: SIM102  (a constexpr test: the branch is compiled or not)
        if beyond_float32(squares):
            again = squares_again(
                x, mask, shift[:, None], segment, c0, c0 + 1, C, t0, t1, C, inner, samples, TILE
            )
            squares = tl.where(squares < float("inf"), squares, again)
    c = c0 + tl.arange(0, TILE.channels)
    place = (segment * parts + part) * C + c
    tl.store(mean + place, shift.to(tl.float64) + rest, mask=c < C)
    tl.store(m2 + place, not_negative(squares - rest * rest * values), mask=c < C)


@triton.jit
def data_of_parts(part_count, parts, BP: tl.constexpr):
    """How many valid positions the parts have, and which part is the first that has any (0, if none)."""
    seen = tl.zeros((BP,), tl.float64)
    first = tl.full((BP,), 0, tl.int64) + parts
    for p0 in range(0, parts, BP):
        p = p0 + tl.arange(0, BP).to(tl.int64)
        values = tl.load(part_count + p, mask=p < parts, other=0.0)
        seen += values
        first = tl.minimum(first, tl.where(values > 0, p, parts))
    found = tl.min(first, 0)
    return tl.sum(seen, 0), tl.where(found < parts, found, 0)


@triton.jit(do_not_specialize=SIZES)
def merge_moments_kernel(
    part_mean, part_m2, part_count, mean, m2, rstd, count, C, inner, samples, tiles, parts, G,
    TILE: tl.constexpr, EPS: tl.constexpr, GROUPED: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Mean, M2 and rstd of every set from its parts (and its channels, if GROUPED), all in float64.

    Reads 16 bytes for each channel and part. A program merges BK channels, or one group of them. With a mask
    `part_count` is the number of values of each part, and their sum is written to `count`.
    """
    pid = tl.program_id(0)
    group_size = C // G
    segment, c_first, c_last = channels_of_set(pid, C, G, GROUPED, BK)
    n = (samples.to(tl.int64) * inner * group_size).to(tl.float64)
    filled = part_mean + segment * parts * C  # the first part that has data
    if part_count is not None:
        part_count += segment * parts
        n, part = data_of_parts(part_count, parts, BP)
        filled += part * C
        n *= group_size
        if count is not None:
            tl.store(count + segment, n, mask=c_first == 0)
        n = tl.maximum(n, 1)
    part_mean += segment * parts * C
    part_m2 += segment * parts * C
    tiles_of_all = tile_count(inner, samples, TILE)
    k = tl.arange(0, BK)
    if GROUPED:
        shift = finite(tl.load(filled + c_first))
    else:
        shift = finite(tl.load(filled + c_first + k, mask=c_first + k < c_last, other=0.0))[None, :]
    total = tl.zeros((BP, BK), tl.float64)
    square = tl.zeros((BP, BK), tl.float64)
    for c0 in range(c_first, c_last, BK):
        for p0 in range(0, parts, BP):
            p = p0 + tl.arange(0, BP)[:, None].to(tl.int64)
            c = c0 + k[None, :]
            inside = (p < parts) & (c < c_last)
            if part_count is None:
                end = values_before(tl.minimum((p + 1) * tiles, tiles_of_all), inner, samples, TILE)
                values = (end - values_before(p * tiles, inner, samples, TILE)).to(tl.float64)
            else:
                values = tl.load(part_count + p, mask=p < parts, other=0.0)
            values = tl.where(inside, values, 0.0)
            deviation = tl.load(part_mean + p * C + c, mask=inside, other=0.0) - shift
            total += values * deviation
            square += tl.load(part_m2 + p * C + c, mask=inside, other=0.0)
            square += tl.where(inside, values * deviation * deviation, 0.0)

    if GROUPED:
        rest = tl.sum(tl.sum(total, 1), 0) / n
        set_m2 = not_negative(tl.sum(tl.sum(square, 1), 0) - rest * rest * n)
        place = segment * G + pid % G
        tl.store(mean + place, shift + rest)
        tl.store(m2 + place, set_m2)
        if rstd is not None:
            tl.store(rstd + place, 1 / tl.sqrt(set_m2 / n + EPS))
    else:
        rest = tl.sum(total, 0)[None, :] / n
        set_m2 = not_negative(tl.sum(square, 0)[None, :] - rest * rest * n)
        place = segment * C + c_first + k[None, :]
        inside = c_first + k[None, :] < c_last
        tl.store(mean + place, shift + rest, mask=inside)
        tl.store(m2 + place, set_m2, mask=inside)
        if rstd is not None:
            tl.store(rstd + place, 1 / tl.sqrt(set_m2 / n + EPS), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def normalize_kernel(
    x, residual, y, mask, mean, rstd, weight, bias, C, inner, samples, tiles, parts, G,
    ACT: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, EPS: tl.constexpr = None,
):  # fmt: skip
    """y = act((x - mean) * rstd * weight + bias + residual): reads x (and residual) once, writes y once.

    With an EPS `rstd` is the variance, and both statistics may have any dtype: those of evaluation. At
    positions that a mask leaves out y is 0.
    """
    dtype: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    c0, _part, segment, t0, t1 = run_of_tiles(C, inner, samples, tiles, parts, TILE)
    c, exists, place = block_of_channels(segment, c0, C, G, TILE.channels)
    high, low, scale, w, b = constants(mean, rstd, weight, bias, c, exists, place, dtype)
    if EPS is not None:  # rounded as the constants that `constants_kernel` computes in a launch of its own
        variance = tl.load(rstd + place, mask=exists, other=1.0).to(tl.float64)
        scale = (1 / tl.sqrt(variance + EPS)).to(dtype)
    for step in tl.range(t0, t1, num_stages=STAGES):
        t = t0 + t1 - 1 - step
        start, offsets, inside = tile(t, segment, c0, C, C, inner, samples, TILE)
        loaded, data, _ = data_of(mask, x, inside, t, segment, inner, samples, TILE)
        z = normalized(x, high, low, scale, w, b, residual, start, offsets, loaded, ACT)
        z = at_data(mask, data, z)
        tl.store(y + start + offsets, z.to(y.dtype.element_ty), mask=inside)
