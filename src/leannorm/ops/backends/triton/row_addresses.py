"""How the per-row kernels view a tensor: as tiles of rows by values.

A tensor is (outer, kept, inner) in memory, and every (outer, inner) is a row of `kept` values. A tile is
`TILE.rows` rows by `TILE.block` of their values (`row_tiles.TileConstants`). With inner = 1 rows are `lines`,
contiguous in memory, and a tile's rows follow each other; otherwise rows are interleaved, and a tile's rows
are neighbours within one outer index. Either way a warp reads along the axis that is contiguous in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_of(at, rows, kept, inner, TILE: tl.constexpr):
    """Tile `at`: where it starts, how far apart its rows are, their numbers, and which of them exist."""
    lane = tl.arange(0, TILE.rows)
    if TILE.lines:
        first = at * tl.full((), TILE.rows, tl.int64)
        across = lane.to(tl.int64) * kept if TILE.wide else lane * kept
        return first * kept, across[:, None], first + lane, lane < rows - first
    else:
        blocks = tl.cdiv(inner, TILE.rows)
        outer = (at // blocks) * tl.full((), 1, tl.int64)
        column = (at % blocks) * TILE.rows
        row = outer * inner + column + lane
        return outer * kept * inner + column, lane[:, None], row, lane < inner - column


@triton.jit
def values(k, exists, across, kept, inner, TILE: tl.constexpr):
    """How far the k-th values of a tile's rows are from its start (64 bits if wide), and which exist."""
    along = k[None, :]
    if not TILE.lines:
        along = along.to(tl.int64) * inner if TILE.wide else along * inner
    return across + along, exists[:, None] & (k < kept)[None, :]


@triton.jit
def live(valid, row, exists):
    """Which rows are read: those that exist and, with `valid`, are not padding."""
    if valid is not None:
        exists &= tl.load(valid + row, exists, 0) != 0
    return exists


@triton.jit
def of_live(inside, valid, there):
    """Which values of a tile are read: those of live rows."""
    if valid is not None:
        inside &= there[:, None]
    return inside


@triton.jit
def walk(kept, TILE: tl.constexpr):
    """The indices of a row's first block, and the row's end; in 64 bits if wide."""
    if TILE.wide:
        return tl.arange(0, TILE.block).to(tl.int64), kept.to(tl.int64)
    else:
        return tl.arange(0, TILE.block), kept


@triton.jit
def block_of_row(number, kept, TILE: tl.constexpr):
    """The indices of a row's block of this number."""
    lane, _end = walk(kept, TILE)
    return number.to(lane.dtype) * TILE.block + lane


@triton.jit
def divided(kept, inner, TILE: tl.constexpr):
    """The same numbers, written so that the compiler knows a divisor of the contiguous extent."""
    if TILE.lines:
        kept = kept // TILE.vector * TILE.vector
    else:
        inner = inner // TILE.vector * TILE.vector
    return kept, inner


@triton.jit
def parameter(p, k, kept, dtype: tl.constexpr):
    """The parameter's values; p itself if it has been read already."""
    if p.dtype.is_ptr():
        return tl.load(p + k[None, :], k[None, :] < kept, 0.0, eviction_policy="evict_last").to(dtype)
    else:
        return p


@triton.jit
def line_of_group(p, group, step, k, kept, dtype: tl.constexpr, TILE: tl.constexpr):
    """The line of p that all rows of a group share; p is one line for all groups if there is no step."""
    if step is None:
        return parameter(p, k, kept, dtype)
    else:
        return parameter(p + group * (step // TILE.vector * TILE.vector), k, kept, dtype)


@triton.jit
def line(of, row, exists, k, kept, dtype: tl.constexpr, TILE: tl.constexpr):
    """`of` is a parameter, or lines of it with the number of rows that share one and the step between them:
    then each row's own line."""
    p, each, step = of
    if each is None:
        value = parameter(p, k, kept, dtype)
    else:
        first = (row // each) * (step // TILE.vector * TILE.vector)
        inside = exists[:, None] & (k < kept)[None, :]
        value = tl.load(p + first[:, None] + k[None, :], inside, 0.0, eviction_policy="evict_last").to(dtype)
    return value


@triton.jit
def begin_of(row, start, across, near, mid, by_far, by_mid, by_near, TILE: tl.constexpr):
    """`start` and `across` of a tensor; with steps (far, mid, near) it is rows in a view of three axes."""
    if by_near is None:
        first = start
        beside = across
    else:
        at = row.to(tl.int32)  # a view has fewer rows than 2^31
        behind = at // near
        far = (behind // mid).to(tl.int64) * (by_far // TILE.vector)
        far += (behind % mid).to(tl.int64) * (by_mid // TILE.vector)
        far += (at % near).to(tl.int64) * (by_near // TILE.vector)
        first = tl.full((), 0, tl.int64)
        beside = (far * TILE.vector)[:, None]
    return first, beside
