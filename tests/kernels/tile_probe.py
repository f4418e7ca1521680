"""Kernels that tell where tiles lie; an interpreted kernel needs a module of its own to be read."""

import triton
import triton.language as tl

from leannorm.ops.backends.triton.row_addresses import block_of_row, rows_of, values
from leannorm.ops.backends.triton.tiles import tile, values_before


@triton.jit(do_not_specialize=("t", "C", "inner", "samples"))
def probe(found, t, C, inner, samples, TILE: tl.constexpr):  # noqa: N803
    t = tl.program_id(0).to(tl.int64) + t
    segment = tl.program_id(0).to(tl.int64)
    start, _, _ = tile(t, segment, TILE.channels, C, C, inner, samples, TILE)
    tl.store(found, start)
    tl.store(found + 1, values_before(t, inner, samples, TILE))


@triton.jit(do_not_specialize=("at", "rows", "kept", "inner", "block"))
def row_probe(found, at, rows, kept, inner, block, TILE: tl.constexpr):  # noqa: N803
    """Where the values `k` of the rows of tile `at` lie that are in a row's `block`-th block."""
    start, across, _, exists = rows_of(tl.program_id(0) + at, rows, kept, inner, TILE)
    k = block_of_row(tl.program_id(0) + block, kept, TILE)
    offsets, inside = values(k, exists, across, kept, inner, TILE)
    cell = tl.arange(0, TILE.rows)[:, None] * TILE.block + tl.arange(0, TILE.block)[None, :]
    tl.store(found + cell, tl.where(inside, start + offsets, -1))
