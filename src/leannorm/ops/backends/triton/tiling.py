"""Shapes to launches: how the per-channel kernels cut a tensor into tiles and programs. Pure integers.

What is compiled anew depends on channels, positions and dtype (block shapes, the divisor V), never on the
number of samples: that decides only how many programs there are, and which of the two ways is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd, prod
from typing import NamedTuple

from leannorm.ops.backends.triton.launch import WARPS

_IN_FLIGHT = 32  # bytes that a thread reads of all tensors together before it uses them
_LINE = 128  # bytes of a cache line: what neighbouring channels are read of, where those lie together
_SECTOR = 32  # bytes that memory delivers at least
_FEW_TILES = 8  # as many one program reads twice in less time than two more launches take
_CACHE = 24 << 20  # bytes of the L2 cache that what is read a second time may fill
_MERGED = 1024  # partial statistics that a program of the merging kernels works on at a time
_REDUCING = 4  # programs for each processor, where every one leaves partial statistics
_MAPPING = 16  # and where none does


class Geometry(NamedTuple):
    """A tensor (N, C, *) as segments (what shares statistics) of samples of channels of inner values."""

    segments: int
    samples: int
    channels: int
    inner: int
    groups: int
    columns: bool

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.channels, self.inner, self.samples

    @property
    def grouped(self) -> bool:
        """Do several channels share their statistics?"""
        return self.groups != self.channels


class Tiling(NamedTuple):
    """A tile's shape [BC, BE]; V divides the contiguous extent; WIDE: offsets in a tile pass 32 bits."""

    columns: bool
    vector: int
    wide: bool
    block_channels: int
    block_elements: int

    def blocks(self, geometry: Geometry) -> int:
        return -(-geometry.channels // self.block_channels)

    def tiles(self, geometry: Geometry) -> int:
        """Tiles of a segment for each block of channels."""
        if self.columns:
            return -(-geometry.samples * geometry.inner // self.block_elements)
        return geometry.samples * -(-geometry.inner // self.block_elements)

    @property
    def constants(self) -> dict[str, int | bool]:
        return {
            "COLUMNS": self.columns,
            "V": self.vector,
            "WIDE": self.wide,
            "BC": self.block_channels,
            "BE": self.block_elements,
        }


def geometry(shape: Sequence[int], groups: int, contiguous: bool) -> Geometry:
    """`groups=0`: statistics of the batch; else of each group of each sample."""
    n, c, inner = shape[0], shape[1], prod(shape[2:])
    columns = inner == 1 or not contiguous
    return Geometry(1, n, c, inner, c, columns) if groups == 0 else Geometry(n, 1, c, inner, groups, columns)


def power_of_two(n: int) -> int:
    """The smallest one that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def _least_padding(extent: int, candidates: Sequence[int]) -> int:
    """The candidate (largest first) whose multiples cover the extent with the least to spare."""
    return min(candidates, key=lambda block: -(-extent // block) * block)


def tiling(geometry: Geometry, itemsize: int, tensors: int, whole_set: bool = False) -> Tiling:
    """The tiles of a kernel that reads so many tensors; of one whose program reads a `whole_set`."""
    values = max(_IN_FLIGHT // itemsize // min(tensors, 2), 1) * 32 * WARPS
    columns = geometry.columns
    together = geometry.channels // geometry.groups if whole_set and geometry.grouped else geometry.channels
    if columns:
        line = _LINE // itemsize
        if whole_set and not geometry.grouped and geometry.segments == 1:
            line = _SECTOR // itemsize  # narrow blocks: more programs
        channels = _least_padding(together, [b for b in (line, line // 2, line // 4) if b])
        channels = min(channels, power_of_two(together))
        elements = values // channels
        wide = elements * geometry.channels > 2**31 - 1
        contiguous = geometry.channels
    else:
        longest = min(values, power_of_two(geometry.inner))
        elements = _least_padding(
            geometry.inner, [longest >> i for i in range(4) if longest >> i >= 64] or [longest]
        )
        channels = min(power_of_two(together), values // elements)
        if whole_set and not geometry.grouped and geometry.segments == 1:
            channels = min(channels, max(512 // elements, 1))
        wide = channels * geometry.inner > 2**31 - 1
        contiguous = geometry.inner
    return Tiling(columns, gcd(contiguous, 16), wide, channels, elements)


def one_launch(geometry: Geometry, tiling: Tiling, itemsize: int, processors: int) -> bool:
    """Should one program read all of its set, twice? Few tiles, or many sets that fit the L2 cache."""
    tiles = tiling.tiles(geometry)
    if geometry.grouped:
        tiles *= -(-geometry.channels // geometry.groups // tiling.block_channels)
        programs = geometry.segments * geometry.groups
    else:
        programs = geometry.segments * tiling.blocks(geometry)
    at_a_time = min(programs, 4 * processors) * tiles * tiling.block_channels * tiling.block_elements
    return tiles <= _FEW_TILES or (programs >= processors and at_a_time * itemsize <= _CACHE)


class Parts(NamedTuple):
    """A segment's tiles of a block of channels are shared by `parts` programs, `tiles` for each."""

    tiles: int
    parts: int


def parts(geometry: Geometry, tiling: Tiling, programs: int) -> Parts:
    """Parts for about so many programs in all."""
    tiles = tiling.tiles(geometry)
    wanted = max(programs // (geometry.segments * tiling.blocks(geometry)), 1)
    each = -(-tiles // min(wanted, tiles))
    return Parts(each, -(-tiles // each))


class Plan(NamedTuple):
    """All that is launched for tensors of one shape: in one launch (`sets`), or else in several."""

    geometry: Geometry
    tiling: Tiling
    constants: dict[str, int | bool]
    reducing: Parts
    mapping: Parts
    merging: dict[str, int]
    merging_programs: int
    sets: Tiling | None
    set_programs: int

    def programs(self, parts: Parts) -> int:
        return self.geometry.segments * self.tiling.blocks(self.geometry) * parts.parts


@lru_cache(4096)
def planned(
    shape: tuple[int, ...], groups: int, contiguous: bool, itemsize: int, tensors: int, processors: int
) -> Plan:
    """The launches for an input of this shape, of which there are some elements."""
    seen = geometry(shape, groups, contiguous)
    tiles = tiling(seen, itemsize, tensors)
    reducing = parts(seen, tiles, _REDUCING * processors)
    rows = min(power_of_two(reducing.parts), _MERGED // 4)
    together = seen.channels // seen.groups
    columns = min(max(4, power_of_two(together)), _MERGED // rows)
    sets = tiling(seen, itemsize, tensors, whole_set=True)
    return Plan(
        seen,
        tiles,
        tiles.constants,
        reducing,
        parts(seen, tiles, _MAPPING * processors),
        {"BK": columns, "BP": rows},
        seen.segments * (seen.groups if seen.grouped else -(-seen.channels // columns)),
        sets if one_launch(seen, sets, itemsize, processors) else None,
        seen.segments * (seen.groups if seen.grouped else sets.blocks(seen)),
    )
