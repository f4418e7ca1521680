"""Shapes to launches: how the per-channel kernels cut a tensor into tiles and programs. Pure integers.

What is compiled anew depends on channels, positions and dtype (block shapes, the divisor V), never on the
number of samples: that decides only how many programs there are, and which of the two ways is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd, prod
from typing import NamedTuple

_IN_FLIGHT = 32  # bytes of each tensor that a thread reads before it uses them: two loads of 16
_LINE = 128  # bytes of a cache line: what is read of neighbouring channels, where those lie together
_LOAD = 16  # bytes that a thread reads at once
_PLANES = 4  # of which a thread holds values
_WARPS = 4  # small programs: registers are handed out to many at a time
_SET_WARPS = 8  # where there are few programs
_FEW_TILES = 8  # as many one program reads twice in less time than two more launches take
_CACHE = 24 << 20  # bytes of the L2 cache that what is read a second time may fill
# programs for each processor: of those that leave partial results, as many as run at a time by the registers
# that they need, since a rest of them would run alone; of those that do not, many
_MOMENTS = 5
_SUMS = 4
_MAPPING = 16
# registers of a thread, so that those are there at a time; told no limit, the compiler looks for one, and may
# spill to keep it. Of programs that read a set each: two, or one where a group's hold more than two tensors
# or each value is read by itself
MOMENTS_REGISTERS, SUMS_REGISTERS = (
    65536 // (32 * _WARPS * programs) // 8 * 8 for programs in (_MOMENTS, _SUMS)
)
SET_REGISTERS, PRESSED_REGISTERS = 65536 // (32 * _SET_WARPS * 2), 255
_MERGED = 1024  # partial results that a program of the merging kernels works on at a time


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
    warps: int

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
            "warps": self.warps,
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


def tiling(geometry: Geometry, itemsize: int, whole_set: bool = False) -> Tiling:
    """The tiles of kernels that share a set, or whose programs read a `whole_set` each."""
    warps = _SET_WARPS if whole_set else _WARPS
    columns = geometry.columns
    scattered = (geometry.channels if columns else geometry.inner) * itemsize % _LOAD
    in_flight = _IN_FLIGHT // 2 if scattered else _IN_FLIGHT  # smaller loads take more addresses, conditions
    values = in_flight // itemsize * 32 * warps
    together = geometry.channels // geometry.groups if whole_set and geometry.grouped else geometry.channels
    narrow = whole_set and not geometry.grouped  # few channels for each program: more programs
    if columns:
        width = (_LOAD if narrow else _LINE) // itemsize
        channels = min(_least_padding(together, (width, max(width // 2, 1))), power_of_two(together))
        elements = values // channels
        if geometry.samples == 1:  # of several, their number must not decide what is compiled
            elements = min(elements, power_of_two(geometry.inner))
        wide = elements * geometry.channels > 2**31 - 1
        contiguous = gcd(together, channels)  # every block begins at a multiple of V
    else:
        contiguous = geometry.inner
        longest = min(values, power_of_two(contiguous))
        shorter = [longest >> i for i in range(4) if longest >> i >= 64]
        elements = _least_padding(contiguous, shorter) if shorter and not narrow else longest
        # a thread holds every constant of each plane that it has values of
        planes = (
            32 * warps * in_flight // _IN_FLIGHT * min(gcd(contiguous, 16), _LOAD // itemsize) // elements
        )
        channels = min(power_of_two(together), values // elements, _PLANES * max(planes, 1))
        if narrow:
            channels = min(channels, max(512 // elements, 1))
        wide = channels * geometry.inner > 2**31 - 1
    threads = channels * elements * itemsize // in_flight
    warps = max(min(warps, threads // 32), 1)
    return Tiling(columns, gcd(contiguous, 16), wide, channels, elements, warps)


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


class Merging(NamedTuple):
    """A kernel that merges partial results works on BP parts of BK channels at a time."""

    block_parts: int
    block_channels: int

    @property
    def constants(self) -> dict[str, int]:
        return {"BP": self.block_parts, "BK": self.block_channels, "warps": 8}

    def programs(self, geometry: Geometry) -> int:
        blocks = -(-geometry.channels // self.block_channels)
        return geometry.segments * (geometry.groups if geometry.grouped else blocks)


def merging(geometry: Geometry, parts: Parts) -> Merging:
    rows = 16 if parts.parts <= 16 else _MERGED // 4  # two kernels, whatever the batch
    together = power_of_two(geometry.channels // geometry.groups)
    return Merging(rows, min(max(4, together), _MERGED // rows))


class Launches(NamedTuple):
    """All that is launched for tensors of one shape: in one launch (`sets`), or else in several."""

    geometry: Geometry
    tiling: Tiling
    moments: Parts
    sums: Parts
    mapping: Parts
    sets: Tiling | None

    def programs(self, parts: Parts) -> int:
        return self.geometry.segments * self.tiling.blocks(self.geometry) * parts.parts

    def set_programs(self) -> int:
        assert self.sets is not None
        blocks = self.geometry.groups if self.geometry.grouped else self.sets.blocks(self.geometry)
        return self.geometry.segments * blocks


@lru_cache(4096)
def planned(
    shape: tuple[int, ...], groups: int, contiguous: bool, itemsize: int, processors: int
) -> Launches:
    """The launches for an input of this shape, which has elements."""
    if groups and shape[1] % groups:
        raise RuntimeError(f"{shape[1]} channels cannot be divided into {groups} groups")
    seen = geometry(shape, groups, contiguous)
    tiles = tiling(seen, itemsize)
    moments, sums, mapping = (
        parts(seen, tiles, programs * processors * _WARPS // tiles.warps)
        for programs in (_MOMENTS, _SUMS, _MAPPING)
    )
    sets = tiling(seen, itemsize, whole_set=True)
    fits = one_launch(seen, sets, itemsize, processors)
    return Launches(seen, tiles, moments, sums, mapping, sets if fits else None)
