"""How the per-channel kernels view a tensor of either layout: as tiles of channels by values.

A *segment* is what shares its statistics: the whole batch, a group of its samples, or one sample for group
and instance norm. The values of a segment's channel are divided into tiles, for neighbouring channels at a
time. TILE (`tiling.Tiling`) says how:

    columns (channels last, or one value per channel): `elements` rows of memory, `channels` wide
    otherwise (contiguous): a piece of the planes of `span` samples, of each `channels`, elements / span long

Every tile has the shape [channels, elements]; Triton reads along the contiguous axis. Where planes are short
there are several samples, as a tile of one would leave most threads of a program without a value. `vector`
divides the contiguous axis' extent and the offset where every tile begins. `n // vector * vector` shows that
to the compiler, which then loads 16 bytes at once, if so many values have them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from leannorm.ops.backends.triton.activations import activate, derivative, derivative_from_output


@triton.jit
def tile_count(inner, samples, TILE: tl.constexpr):
    """How many tiles a segment has for each block of channels."""
    samples = samples.to(tl.int64)
    if TILE.columns:
        count = tl.cdiv(samples * inner, TILE.elements)
    else:
        count = tl.cdiv(samples, TILE.span) * tl.cdiv(inner, TILE.elements // TILE.span)
    return count


@triton.jit
def values_before(t, inner, samples, TILE: tl.constexpr):
    """How many values each channel has in the tiles 0 .. t-1 of a segment."""
    if TILE.columns:
        values = tl.minimum(t * TILE.elements, samples.to(tl.int64) * inner)
    else:
        pieces = tl.cdiv(inner, TILE.elements // TILE.span)
        sample = (t // pieces) * TILE.span
        in_piece = tl.minimum((t % pieces) * (TILE.elements // TILE.span), inner)
        if TILE.span == 1:
            values = sample * inner + in_piece
        else:
            values = tl.minimum(sample, samples) * inner + tl.minimum(samples - sample, TILE.span) * in_piece
    return values


@triton.jit
def first_of_tile(t, inner, TILE: tl.constexpr):
    """The sample and the position in its planes where tile `t` begins (contiguous)."""
    pieces = tl.cdiv(inner, TILE.elements // TILE.span)
    sample = t // pieces * TILE.span
    return sample, (t % pieces) * (TILE.elements // TILE.span)


@triton.jit
def tile(t, segment, c0, c_end, C, inner, samples, TILE: tl.constexpr):
    """Where tile `t` of the channels c0 .. c_end-1 begins, the offsets of its elements, and which exist.

    The beginning is a 64-bit number and the offsets are 32-bit ones, unless a tile is wide.
    """
    c = tl.arange(0, TILE.channels)[:, None]
    e = tl.arange(0, TILE.elements)[None, :]
    if TILE.columns:
        width = C // TILE.vector * TILE.vector
        c0 = c0 // TILE.vector * TILE.vector
        c_end = c_end // TILE.vector * TILE.vector
        rows = samples.to(tl.int64) * inner
        start = (segment * rows + t * TILE.elements) * width + c0
        left = tl.minimum(rows - t * TILE.elements, TILE.elements).to(tl.int32)
        if TILE.wide:
            offsets = e.to(tl.int64) * width + c
        else:
            offsets = e * width + c
    else:
        length = inner // TILE.vector * TILE.vector
        sample, first = first_of_tile(t, inner, TILE)
        start = ((segment * samples + sample) * C + c0) * length + first
        left = tl.minimum(length - first, TILE.elements // TILE.span).to(tl.int32)
        if TILE.wide:
            c_wide = c.to(tl.int64)
            e_wide = e.to(tl.int64)
        else:
            c_wide = c
            e_wide = e
        if TILE.span == 1:
            offsets = c_wide * length + e
        else:
            of_sample = e_wide // (TILE.elements // TILE.span)
            e = e % (TILE.elements // TILE.span)
            offsets = of_sample * C * length + c_wide * length + e
    inside = (e < left) & (c < c_end - c0)
    if TILE.span > 1:
        inside = inside & (of_sample < samples - sample)
    return start, offsets, inside


@triton.jit
def valid_positions(mask, t, segment, inner, samples, TILE: tl.constexpr):
    """Where `mask` (samples, inner) marks data in tile `t`, `[1, elements]`: the same for all channels."""
    if TILE.columns:
        # a row gets its second axis when it is loaded, so that no thread loads it twice
        e = tl.arange(0, TILE.elements)
        rows = samples.to(tl.int64) * inner
        start = segment * rows + t * TILE.elements
        left = tl.minimum(rows - t * TILE.elements, TILE.elements).to(tl.int32)
        valid = (tl.load(mask + start + e, mask=e < left, other=0) != 0)[None, :]
    else:
        e = tl.arange(0, TILE.elements)[None, :]
        length = inner // TILE.vector * TILE.vector
        sample, first = first_of_tile(t, inner, TILE)
        start = (segment * samples + sample) * length + first
        left = tl.minimum(length - first, TILE.elements // TILE.span).to(tl.int32)
        if TILE.span == 1:
            valid = tl.load(mask + start + e, mask=e < left, other=0) != 0
        else:
            of_sample = e // (TILE.elements // TILE.span)
            e = e % (TILE.elements // TILE.span)
            there = (e < left) & (of_sample < samples - sample)
            valid = tl.load(mask + start + of_sample.to(tl.int64) * length + e, mask=there, other=0) != 0
    return valid


@triton.jit
def data_of(mask, x, inside, t, segment, inner, samples, TILE: tl.constexpr):
    """Which of a tile's elements to load, which of these are data, and which positions are valid.

    Without a mask all that exist. Neighbours that are loaded at once are all loaded if one of them is data;
    the caller must replace those that are not.
    """
    if mask is None:
        loaded = inside
        data = inside
        valid = inside
    else:
        valid = valid_positions(mask, t, segment, inner, samples, TILE)
        data = inside & valid
        if TILE.columns:
            loaded = data
        else:
            BE: tl.constexpr = TILE.elements
            W: tl.constexpr = min(TILE.vector, 128 // x.dtype.element_ty.primitive_bitwidth, BE)
            one_of = tl.max(tl.reshape(valid.to(tl.int32), (BE // W, W)), 1)
            one_of = tl.reshape(tl.broadcast_to(one_of[:, None], (BE // W, W)), (1, BE))
            loaded = inside & tl.max_constancy(one_of != 0, [1, W])
    return loaded, data, valid


@triton.jit
def at_data(mask, data, values):
    """The values; with a mask 0 at all elements that are not data."""
    if mask is not None:
        values = tl.where(data, values, 0.0)
    return values


@triton.jit
def number_of(valid):
    """How many positions of a tile are valid."""
    return tl.sum(tl.sum(valid.to(tl.int32), 1), 0)


@triton.jit
def first_with_data(mask, t0, t1, segment, inner, samples, TILE: tl.constexpr):
    """The first of the tiles t0 .. t1-1 that has data (the last, if none has), and the number of valid
    positions."""
    t = t0
    found = number_of(valid_positions(mask, t, segment, inner, samples, TILE))
    while (found == 0) & (t + 1 < t1):
        t += 1
        found = number_of(valid_positions(mask, t, segment, inner, samples, TILE))
    return t, found


@triton.jit
def run_of_tiles(C, inner, samples, tiles, parts, TILE: tl.constexpr):
    """What a program works on: its first channel, its part of a segment, and the tiles t0 .. t1-1 of that."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(C, TILE.channels)
    c0 = (pid % blocks) * TILE.channels
    part = (pid // blocks) % parts
    segment = (pid // blocks // parts).to(tl.int64)
    t0 = part.to(tl.int64) * tiles
    t1 = tl.minimum(t0 + tiles, tile_count(inner, samples, TILE))
    return c0, part, segment, t0, t1


@triton.jit
def channels_of_set(pid, C, G, GROUPED: tl.constexpr, BC: tl.constexpr, SIDE: tl.constexpr = 0):
    """A program's segment, its first channel, and the channel after its last: of a group, of SIDE groups side
    by side, or of BC channels."""
    if SIDE:
        size = SIDE * (C // G)
        blocks = tl.cdiv(C, size)
        segment = pid // blocks
        first = (pid % blocks) * size
        last = tl.minimum(first + size, C)
    elif GROUPED:
        size = C // G
        segment = pid // G
        first = (pid % G) * size
        last = first + size
    else:
        blocks = tl.cdiv(C, BC)
        segment = pid // blocks
        first = (pid % blocks) * BC
        last = tl.minimum(first + BC, C)
    return segment.to(tl.int64), first, last


@triton.jit
def over_groups(values, size, TILE: tl.constexpr):
    """A column: each channel's value, or with groups side by side the sum over the channels of its group."""
    if TILE.side:
        group = tl.arange(0, TILE.channels) // size
        alike = group[:, None] == group[None, :]
        result = tl.sum(tl.where(alike, values[None, :], 0.0), 1)[:, None]
    else:
        result = values[:, None]
    return result


@triton.jit
def read(pointer, start, offsets, inside):
    """A tile's elements in the dtype of arithmetic, 0 for those that do not exist."""
    dtype: tl.constexpr = tl.float64 if pointer.dtype.element_ty == tl.float64 else tl.float32
    return tl.load(pointer + start + offsets, mask=inside, other=0.0).to(dtype)


@triton.jit
def per_channel(pointer, c, exists, otherwise: tl.constexpr, dtype: tl.constexpr):
    """A value per channel as a column; `otherwise` if there is no such parameter."""
    if pointer is None:
        value = tl.full(c.shape, otherwise, dtype)
    else:
        value = tl.load(pointer + c, mask=exists, other=0.0).to(dtype)
    return value


@triton.jit
def in_two(mean, dtype: tl.constexpr):
    """A float64 mean as the sum of two numbers of the dtype of arithmetic."""
    if dtype == tl.float64:
        high = mean
        low = tl.zeros(mean.shape, tl.float64)
    else:
        high = mean.to(tl.float32)
        low = (mean - high.to(tl.float64)).to(tl.float32)
    return high, low


@triton.jit
def block_of_channels(segment, c0, C, G, BC: tl.constexpr):
    """BC channels as a column: their numbers, which of them exist, and where their statistics are."""
    c = c0 + tl.arange(0, BC)[:, None]
    return c, c < C, segment * G + c // (C // G)


@triton.jit
def constants(mean, rstd, weight, bias, c, exists, place, dtype: tl.constexpr):
    """What normalizes every channel of a block: mean (in two parts), rstd, weight and bias."""
    high, low = in_two(tl.load(mean + place, mask=exists, other=0.0).to(tl.float64), dtype)
    scale = per_channel(rstd, place, exists, 0.0, dtype)
    w = per_channel(weight, c, exists, 1.0, dtype)
    b = per_channel(bias, c, exists, 0.0, dtype)
    return high, low, scale, w, b


@triton.jit
def before_activation(xhat, weight, bias, residual, start, offsets, inside):
    """xhat * weight + bias + residual, rounded in the backward pass as in the forward pass."""
    z = tl.fma(xhat, weight, bias)
    if residual is not None:
        z = z + read(residual, start, offsets, inside)
    return z


@triton.jit
def gradient_before_activation(
    dy, xhat, weight, bias, residual, out, start, offsets, inside, ACT: tl.constexpr
):
    """dz: dy times the derivative, from the output if it is given, otherwise from the recomputed z."""
    dz = read(dy, start, offsets, inside)
    if ACT != "identity":
        if out is not None:
            dz = dz * derivative_from_output(read(out, start, offsets, inside), ACT)
        else:
            z = before_activation(xhat, weight, bias, residual, start, offsets, inside)
            dz = dz * derivative(z, ACT)
    return dz


@triton.jit
def normalized(x, high, low, rstd, weight, bias, residual, start, offsets, inside, ACT: tl.constexpr):
    """act((x - mean) * rstd * weight + bias + residual) of one tile."""
    xhat = ((read(x, start, offsets, inside) - high) - low) * rstd
    return activate(before_activation(xhat, weight, bias, residual, start, offsets, inside), ACT)
