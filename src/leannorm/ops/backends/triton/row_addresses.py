"""How the per-row kernels see a tensor: as tiles of rows by their values.

A tensor is (outer, kept, inner) in memory, and every (outer, inner) is a row of `kept` values. A tile is
ROWS rows by BLOCK of their values. With inner = 1 rows are lines of memory (LINES) and a tile's rows follow
each other; else they lie side by side, and a tile's rows are neighbours within one outer index. Either way
the axis along which memory is contiguous is the one that a warp reads along.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_of(at, rows, kept, inner, LINES: tl.constexpr, ROWS: tl.constexpr):
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
def values(k, exists, across, kept, inner, LINES: tl.constexpr, WIDE: tl.constexpr):
    """How far the k-th values of a tile's rows lie from its start (64 bits where WIDE), and which exist."""
    along = k[None, :]
    if not LINES:
        along = along.to(tl.int64) * inner if WIDE else along * inner
    return across + along, exists[:, None] & (k < kept)[None, :]


@triton.jit
def walk(kept, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """The indices of a row's first block, and the row's end; in 64 bits where WIDE."""
    if WIDE:
        return tl.arange(0, BLOCK).to(tl.int64), kept.to(tl.int64)
    else:
        return tl.arange(0, BLOCK), kept


@triton.jit
def divided(kept, inner, LINES: tl.constexpr, V: tl.constexpr):
    """The same numbers, written so that the compiler knows that V divides the contiguous extent."""
    if LINES:
        kept = kept // V * V
    else:
        inner = inner // V * V
    return kept, inner


@triton.jit
def parameter(p, k, kept, dtype: tl.constexpr):
    return tl.load(p + k[None, :], k[None, :] < kept, 0.0, eviction_policy="evict_last").to(dtype)
