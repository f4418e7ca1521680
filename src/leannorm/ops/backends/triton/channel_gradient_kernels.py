"""Backward in two passes over dy and the input, for statistics of more values than one program should read.

As `channel_kernels.py`: partial sums, one small launch that merges them, then the input's gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl

from leannorm.ops.backends.triton.channel_kernels import SIZES, summed
from leannorm.ops.backends.triton.rounding import rounded_for, zeros
from leannorm.ops.backends.triton.tiles import (
    at_data,
    block_of_channels,
    channels_of_set,
    constants,
    data_of,
    gradient_before_activation,
    per_channel,
    read,
    run_of_tiles,
    tile,
)


@triton.jit(do_not_specialize=SIZES)
def grad_sums_kernel(
    dy, x, residual, out, dz, mask, mean, rstd, weight, bias, sum_dz, sum_dz_xhat,
    C, inner, samples, tiles, parts, G,
    ACT: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums of dz and dz * xhat of every channel in each part: `[segments, parts, C]`.

    Reads dy and x (with an activation the residual or the output too) once. Writes 16 bytes for each channel
    and part, and dz once if it is given. At positions that a mask leaves out dz is 0.
    """
    dtype: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    c0, part, segment, t0, t1 = run_of_tiles(C, inner, samples, tiles, parts, TILE)
    c, exists, place = block_of_channels(segment, c0, C, G, TILE.channels)
    high, low, scale, w, b = constants(mean, rstd, weight, bias, c, exists, place, dtype)
    total = zeros(TILE.channels, TILE.elements, dtype)
    product = zeros(TILE.channels, TILE.elements, dtype)
    for t in tl.range(t0, t1, num_stages=STAGES):
        start, offsets, inside = tile(t, segment, c0, C, C, inner, samples, TILE)
        loaded, data, _ = data_of(mask, x, inside, t, segment, inner, samples, TILE)
        xhat = ((read(x, start, offsets, loaded) - high) - low) * scale
        g = gradient_before_activation(dy, xhat, w, b, residual, out, start, offsets, loaded, ACT)
        if dz is not None:
            tl.store(dz + start + offsets, at_data(mask, data, g).to(dz.dtype.element_ty), mask=inside)
        g = tl.where(data, g, 0.0)
        total += g
        product = tl.fma(g, tl.where(data, xhat, 0.0), product)
    c = c0 + tl.arange(0, TILE.channels)
    place = (segment * parts + part) * C + c
    tl.store(sum_dz + place, summed(total), mask=c < C)
    tl.store(sum_dz_xhat + place, summed(product), mask=c < C)


@triton.jit(do_not_specialize=SIZES)
def merge_sums_kernel(
    part_dz, part_dz_xhat, count, weight, sum_dz, sum_dz_xhat, p, q, C, inner, samples, parts, G,
    GROUPED: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """The sums `[segments, C]` from their parts, and p and q (the weighted means of every set) if given.

    Reads 16 bytes for each channel and part. A program merges BK channels, or one group of them. With a mask
    `count` is the number of values behind a segment's statistics.
    """
    pid = tl.program_id(0)
    group_size = C // G
    segment, c_first, c_last = channels_of_set(pid, C, G, GROUPED, BK)
    part_dz += segment * parts * C
    part_dz_xhat += segment * parts * C
    k = tl.arange(0, BK)
    weighted_dz = tl.zeros((BK,), tl.float64)
    weighted_dz_xhat = tl.zeros((BK,), tl.float64)
    for c0 in range(c_first, c_last, BK):
        c = c0 + k
        exists = c < c_last
        total = tl.zeros((BP, BK), tl.float64)
        product = tl.zeros((BP, BK), tl.float64)
        for p0 in range(0, parts, BP):
            row = p0 + tl.arange(0, BP)[:, None].to(tl.int64)
            inside = (row < parts) & exists[None, :]
            total += tl.load(part_dz + row * C + c[None, :], mask=inside, other=0.0)
            product += tl.load(part_dz_xhat + row * C + c[None, :], mask=inside, other=0.0)
        s_dz = tl.sum(total, 0)
        s_dz_xhat = tl.sum(product, 0)
        tl.store(sum_dz + segment * C + c, rounded_for(sum_dz, s_dz), mask=exists)
        tl.store(sum_dz_xhat + segment * C + c, rounded_for(sum_dz_xhat, s_dz_xhat), mask=exists)
        if p is not None:
            w = per_channel(weight, c, exists, 1.0, tl.float64)
            weighted_dz += w * s_dz
            weighted_dz_xhat += w * s_dz_xhat
    if p is not None:
        n = (samples.to(tl.int64) * inner * group_size).to(tl.float64)
        if count is not None:
            n = tl.maximum(tl.load(count + segment), 1)
        if GROUPED:
            place = segment * G + pid % G
            tl.store(p + place, tl.sum(weighted_dz, 0) / n)
            tl.store(q + place, tl.sum(weighted_dz_xhat, 0) / n)
        else:
            place = segment * C + c_first + k
            tl.store(p + place, weighted_dz / n, mask=c_first + k < c_last)
            tl.store(q + place, weighted_dz_xhat / n, mask=c_first + k < c_last)


@triton.jit(do_not_specialize=SIZES)
def input_grad_kernel(
    dy, x, residual, out, dx, dz, mask, mean, rstd, weight, bias, p, q, C, inner, samples, tiles, parts, G,
    ACT: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx = rstd * (weight * dz - p - xhat * q), and dz if it is given.

    Reads dy and x (with an activation the residual or the output too) once, writes dx (and dz) once.
    dx may be x. At positions that a mask leaves out dx and dz are 0.
    """
    dtype: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    c0, _part, segment, t0, t1 = run_of_tiles(C, inner, samples, tiles, parts, TILE)
    c, exists, place = block_of_channels(segment, c0, C, G, TILE.channels)
    high, low, scale, w, b = constants(mean, rstd, weight, bias, c, exists, place, dtype)
    mean_dz = per_channel(p, place, exists, 0.0, dtype)
    mean_dz_xhat = per_channel(q, place, exists, 0.0, dtype)
    for step in tl.range(t0, t1, num_stages=STAGES):
        t = t0 + t1 - 1 - step
        start, offsets, inside = tile(t, segment, c0, C, C, inner, samples, TILE)
        loaded, data, _ = data_of(mask, x, inside, t, segment, inner, samples, TILE)
        xhat = ((read(x, start, offsets, loaded) - high) - low) * scale
        g = gradient_before_activation(dy, xhat, w, b, residual, out, start, offsets, loaded, ACT)
        if dz is not None:
            tl.store(dz + start + offsets, at_data(mask, data, g).to(dz.dtype.element_ty), mask=inside)
        gradient = tl.fma(g, w, -mean_dz)
        if q is not None:  # None for constant statistics; xhat may be NaN, so 0 * xhat is not 0
            gradient = tl.fma(-xhat, mean_dz_xhat, gradient)
        gradient = at_data(mask, data, gradient * scale)
        tl.store(dx + start + offsets, gradient.to(dx.dtype.element_ty), mask=inside)
