"""Forward and backward in one launch each, if one program can read all values of its statistics (a set).

A program computes some channels of the batch (or of a sample), one group of a sample (GROUPED), or several
that lie side by side in its tiles (`side`). It goes through its tiles twice: the first time from memory, the
second time, in reverse, from the caches. `tiling.py` says where that is worth it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from leannorm.ops.backends.triton.channel_kernels import (
    beyond_float32,
    finite,
    not_negative,
    squares_again,
    summed,
)
from leannorm.ops.backends.triton.rounding import rounded_for, zeros
from leannorm.ops.backends.triton.tiles import (
    at_data,
    channels_of_set,
    data_of,
    first_with_data,
    gradient_before_activation,
    in_two,
    normalized,
    over_groups,
    per_channel,
    read,
    tile,
    tile_count,
    values_before,
)

SIZES = ("C", "inner", "samples", "G")


@triton.jit
def place_of_set(segment, first, last, C, G, GROUPED: tl.constexpr, TILE: tl.constexpr):
    """Where the statistics of a program's channels are (`[1, 1]` of one group), and which of them exist."""
    if GROUPED:
        place = segment * G + first // (C // G) + tl.zeros((1, 1), tl.int64)
        exists = place >= 0
    else:
        c = first + tl.arange(0, TILE.channels)[:, None]
        place = segment * G + (c // (C // G) if TILE.side else c)
        exists = c < last
    return place, exists


@triton.jit(do_not_specialize=SIZES)
def set_forward_kernel(
    x, residual, y, mask, mean, m2, rstd, n, weight, bias, C, inner, samples, G,
    ACT: tl.constexpr, EPS: tl.constexpr, GROUPED: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Statistics and output: reads x (and residual) once from memory, writes y once. x is read again from the
    cache, its first tile once more.

    With a mask the values of each statistic are counted in `n`, and y is 0 at positions that it leaves out.
    """
    dtype: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    segment, first, last = channels_of_set(tl.program_id(0), C, G, GROUPED, TILE.channels, TILE.side)
    size = C // G
    count = tile_count(inner, samples, TILE)
    zero = segment * 0

    t = zero
    if mask is None:
        in_first = values_before(zero + 1, inner, samples, TILE).to(dtype)
    else:
        t, found = first_with_data(mask, zero, count, segment, inner, samples, TILE)
        in_first = tl.maximum(found, 1).to(dtype)
        seen = zeros(1, TILE.elements, tl.int32)
    start, offsets, inside = tile(t, segment, first, last, C, inner, samples, TILE)
    loaded, data, _ = data_of(mask, x, inside, t, segment, inner, samples, TILE)
    begun = tl.sum(at_data(mask, data, read(x, start, offsets, loaded)), 1)
    shift = over_groups(begun, size, TILE) / in_first
    if TILE.side:
        shift = shift / size.to(dtype)
    elif GROUPED:
        shift = tl.sum(shift, 0)[None, :] / tl.minimum(last - first, TILE.channels).to(dtype)
    shift = finite(shift)
    total = zeros(TILE.channels, TILE.elements, dtype)
    square = zeros(TILE.channels, TILE.elements, dtype)
    for c0 in range(first, last, TILE.channels):
        for t in tl.range(zero, count, num_stages=STAGES):
            start, offsets, inside = tile(t, segment, c0, last, C, inner, samples, TILE)
            loaded, data, valid = data_of(mask, x, inside, t, segment, inner, samples, TILE)
            if mask is not None:
                seen += (valid & (c0 == first)).to(tl.int32)
            deviation = tl.where(data, read(x, start, offsets, loaded) - shift, 0.0)
            total += deviation
            square = tl.fma(deviation, deviation, square)

    if mask is None:
        values = (samples.to(tl.int64) * inner).to(tl.float64)
    else:
        values = tl.sum(tl.sum(seen, 1), 0).to(tl.float64)
    rest = over_groups(summed(total), size, TILE)
    squares = summed(square)
    if dtype == tl.float32:  # noqa: SIM102  (a constexpr test: the branch is compiled or not)
        if beyond_float32(squares):
            again = squares_again(
                x, mask, shift, segment, first, last, last, zero, count, C, inner, samples, TILE
            )
            squares = tl.where(squares < float("inf"), squares, again)
    set_m2 = over_groups(squares, size, TILE)
    place, exists = place_of_set(segment, first, last, C, G, GROUPED, TILE)
    if GROUPED or TILE.side:
        values = values * size
    if GROUPED:
        rest = tl.sum(rest, 0)[None, :]
        set_m2 = tl.sum(set_m2, 0)[None, :]
    if mask is not None:
        tl.store(n + segment, values, mask=first == 0)
        values = tl.maximum(values, 1)
    rest = rest / values
    set_mean = shift.to(tl.float64) + rest
    set_m2 = not_negative(set_m2 - rest * rest * values)
    set_rstd = 1 / tl.sqrt(set_m2 / values + EPS)
    writes = exists
    if TILE.side:  # the first channel of each group
        writes = exists & (tl.arange(0, TILE.channels)[:, None] % size == 0)
    tl.store(mean + place, set_mean, mask=writes)
    tl.store(m2 + place, set_m2, mask=writes)
    tl.store(rstd + place, set_rstd, mask=writes)

    high, low = in_two(set_mean, dtype)
    scale = set_rstd.to(dtype)
    for c0 in range(first, last, TILE.channels):
        c = c0 + tl.arange(0, TILE.channels)[:, None]
        w = per_channel(weight, c, c < last, 1.0, dtype)
        b = per_channel(bias, c, c < last, 0.0, dtype)
        for step in tl.range(zero, count, num_stages=STAGES):
            t = count - 1 - step
            start, offsets, inside = tile(t, segment, c0, last, C, inner, samples, TILE)
            loaded, data, _ = data_of(mask, x, inside, t, segment, inner, samples, TILE)
            z = normalized(x, high, low, scale, w, b, residual, start, offsets, loaded, ACT)
            z = at_data(mask, data, z)
            tl.store(y + start + offsets, z.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def set_backward_kernel(
    dy, x, residual, out, dx, dz, mask, mean, rstd, n, weight, bias, sum_dz, sum_dz_xhat,
    C, inner, samples, G,
    ACT: tl.constexpr, GROUPED: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx (and dz), and the sums of dz and dz * xhat of every channel of every segment.

    Reads dy and x (with an activation the residual or the output too) once from memory and once from cache,
    writes dx (and dz) once. dx may be x. With a mask each statistic is of `n` values, and dx and dz are 0 at
    positions that it leaves out.
    """
    dtype: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    segment, first, last = channels_of_set(tl.program_id(0), C, G, GROUPED, TILE.channels, TILE.side)
    size = C // G
    count = tile_count(inner, samples, TILE)
    zero = segment * 0
    place, exists = place_of_set(segment, first, last, C, G, GROUPED, TILE)
    high, low = in_two(tl.load(mean + place, mask=exists, other=0.0), dtype)
    scale = per_channel(rstd, place, exists, 0.0, dtype)

    weighted_dz = zeros(TILE.channels, None, tl.float64)
    weighted_dz_xhat = zeros(TILE.channels, None, tl.float64)
    for c0 in range(first, last, TILE.channels):
        c = c0 + tl.arange(0, TILE.channels)[:, None]
        w = per_channel(weight, c, c < last, 1.0, dtype)
        b = per_channel(bias, c, c < last, 0.0, dtype)
        total = zeros(TILE.channels, TILE.elements, dtype)
        product = zeros(TILE.channels, TILE.elements, dtype)
        for t in tl.range(zero, count, num_stages=STAGES):
            start, offsets, inside = tile(t, segment, c0, last, C, inner, samples, TILE)
            loaded, data, _ = data_of(mask, x, inside, t, segment, inner, samples, TILE)
            xhat = ((read(x, start, offsets, loaded) - high) - low) * scale
            g = gradient_before_activation(dy, xhat, w, b, residual, out, start, offsets, loaded, ACT)
            g = tl.where(data, g, 0.0)
            total += g
            product = tl.fma(g, tl.where(data, xhat, 0.0), product)
        s_dz = summed(total)
        s_dz_xhat = summed(product)
        c = c0 + tl.arange(0, TILE.channels)
        tl.store(sum_dz + segment * C + c, rounded_for(sum_dz, s_dz), mask=c < last)
        tl.store(sum_dz_xhat + segment * C + c, rounded_for(sum_dz_xhat, s_dz_xhat), mask=c < last)
        w = per_channel(weight, c, c < last, 1.0, tl.float64)
        weighted_dz += w * s_dz
        weighted_dz_xhat += w * s_dz_xhat

    values = (samples.to(tl.int64) * inner).to(tl.float64)
    if GROUPED or TILE.side:
        values = values * size
    if n is not None:
        values = tl.maximum(tl.load(n + segment), 1)
    if GROUPED:
        mean_dz = (tl.sum(weighted_dz, 0) / values).to(dtype)
        mean_dz_xhat = (tl.sum(weighted_dz_xhat, 0) / values).to(dtype)
    else:
        mean_dz = (over_groups(weighted_dz, size, TILE) / values).to(dtype)
        mean_dz_xhat = (over_groups(weighted_dz_xhat, size, TILE) / values).to(dtype)
    for c0 in range(first, last, TILE.channels):
        c = c0 + tl.arange(0, TILE.channels)[:, None]
        w = per_channel(weight, c, c < last, 1.0, dtype)
        b = per_channel(bias, c, c < last, 0.0, dtype)
        for step in tl.range(zero, count, num_stages=STAGES):
            t = count - 1 - step
            start, offsets, inside = tile(t, segment, c0, last, C, inner, samples, TILE)
            loaded, data, _ = data_of(mask, x, inside, t, segment, inner, samples, TILE)
            xhat = ((read(x, start, offsets, loaded) - high) - low) * scale
            g = gradient_before_activation(dy, xhat, w, b, residual, out, start, offsets, loaded, ACT)
            g = at_data(mask, data, g)
            if dz is not None:
                tl.store(dz + start + offsets, g.to(dz.dtype.element_ty), mask=inside)
            gradient = tl.fma(-xhat, mean_dz_xhat, tl.fma(g, w, -mean_dz)) * scale
            gradient = at_data(mask, data, gradient)
            tl.store(dx + start + offsets, gradient.to(dx.dtype.element_ty), mask=inside)
