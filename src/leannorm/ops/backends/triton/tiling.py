"""From shapes to launches: how the per-channel kernels divide a tensor into tiles and programs. Pure
integers.

Kernels are compiled for channels, positions and dtype (block shapes, the divisor V), never for the number of
samples: that decides how many programs there are, and whether they run in one launch or in three.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd, prod
from typing import NamedTuple

_LINE = 128  # bytes of a cache line: that many neighbouring channels are read, in channels_last
_LOAD = 16  # bytes that a thread reads at once
_PLANES = 4  # (sample, channel) planes that a thread has values of
_SET_WARPS = 8  # for programs that read a whole set, which are few
_FEW_TILES = 8  # tiles that one program reads twice in less time than two more launches take
_FEW_NARROW = 2  # if it reads less than half of each cache line (channels_last, small groups)
_CACHE = 24 << 20  # bytes of the L2 cache for values that are read a second time
_MERGED = 1024  # partial results that a program of the merging kernels has at a time
# limits of registers per thread, so that this many programs are resident; without one the compiler chooses
# its own, and may spill. For programs that read a whole set, two (SET), or one (PRESSED) if they have more
# than two tensors of a group, or load values one by one
SET_REGISTERS, PRESSED_REGISTERS = 65536 // (32 * _SET_WARPS * 2), 255


class Choice(NamedTuple):
    """Choices that differ between devices; `benchmarks.gpu --tune` measures them (`tuned.py`).

    `in_flight`: bytes of each tensor that a thread loads before it uses them. `warps`: of small programs,
    many of which are resident at once. Programs per multiprocessor: for kernels that write partial results
    (moments, sums), as many as their registers allow at once, since a remainder would run alone; for the
    others, many. Stages: how many tiles are being loaded, of which all but one wait in shared memory;
    `sets_stages` for programs that read a whole set.
    """

    in_flight: int = 32
    warps: int = 4
    moments: int = 5
    sums: int = 4
    mapping: int = 16
    moments_stages: int = 1
    sums_stages: int = 1
    mapping_stages: int = 3
    sets_stages: int = 1

    def registers(self, programs: int) -> int:
        """The limit per thread, if that many programs are to be resident."""
        return min(65536 // (32 * self.warps * programs) // 8 * 8, 255)


DEFAULT = Choice()


class Geometry(NamedTuple):
    """A tensor (N, C, *) as segments (the batch, some of it, or one sample), of samples, channels, values."""

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
        """Whether several channels share their statistics."""
        return self.groups != self.channels


class Tiling(NamedTuple):
    """A tile's shape [BC, BE]; V divides the contiguous extent; WIDE: offsets in a tile need 64 bits."""

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
    """`groups=0`: statistics of the batch; -B: of every B samples; otherwise of each group of each sample."""
    n, c, inner = shape[0], shape[1], prod(shape[2:])
    columns = inner == 1 or not contiguous
    if groups <= 0:
        samples = -groups or n
        return Geometry(n // samples, samples, c, inner, c, columns)
    return Geometry(n, 1, c, inner, groups, columns)


def power_of_two(n: int) -> int:
    """The smallest one that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def _least_padding(extent: int, candidates: Sequence[int]) -> int:
    """The candidate (largest first) whose multiples cover the extent with the least padding."""
    return min(candidates, key=lambda block: -(-extent // block) * block)


def tiling(
    geometry: Geometry, itemsize: int, whole_set: bool = False, choice: Choice | None = None
) -> Tiling:
    """The tiles of programs that share a set (all values of one statistic), or read a `whole_set` each."""
    choice = choice or DEFAULT
    warps = _SET_WARPS if whole_set else choice.warps
    columns = geometry.columns
    scattered = (geometry.channels if columns else geometry.inner) * itemsize % _LOAD
    # smaller loads need more addresses and masks
    in_flight = choice.in_flight // 2 if scattered else choice.in_flight
    values = in_flight // itemsize * 32 * warps
    together = geometry.channels // geometry.groups if whole_set and geometry.grouped else geometry.channels
    narrow = whole_set and not geometry.grouped  # few channels per program make more programs
    if columns:
        width = (_LOAD if narrow else _LINE) // itemsize
        channels = min(_least_padding(together, (width, max(width // 2, 1))), power_of_two(together))
        elements = values // channels
        if geometry.samples == 1:  # if there are several, their number must not decide what is compiled
            elements = min(elements, power_of_two(geometry.inner))
        wide = elements * geometry.channels > 2**31 - 1
        contiguous = gcd(together, channels)  # every block begins at a multiple of V
    else:
        contiguous = geometry.inner
        longest = min(values, power_of_two(contiguous))
        shorter = [longest >> i for i in range(4) if longest >> i >= 64]
        elements = _least_padding(contiguous, shorter) if shorter and not narrow else longest
        # a thread also has the constants of each plane that it has values of
        of_load = min(gcd(contiguous, 16), _LOAD // itemsize)
        planes = 32 * warps * in_flight // choice.in_flight * of_load // elements
        channels = min(power_of_two(together), values // elements, _PLANES * max(planes, 1))
        if narrow:
            channels = min(channels, max(512 // elements, 1))
        wide = channels * geometry.inner > 2**31 - 1
    threads = channels * elements * itemsize // in_flight
    warps = max(min(warps, threads // 32), 1)
    return Tiling(columns, gcd(contiguous, 16), wide, channels, elements, warps)


def one_launch(geometry: Geometry, tiling: Tiling, itemsize: int, processors: int) -> bool:
    """Whether one program should read all of its set, twice: few tiles, or many sets that fit the L2
    cache."""
    tiles = tiling.tiles(geometry)
    if geometry.grouped:
        tiles *= -(-geometry.channels // geometry.groups // tiling.block_channels)
        programs = geometry.segments * geometry.groups
    else:
        programs = geometry.segments * tiling.blocks(geometry)
    if geometry.grouped and geometry.columns and geometry.channels // geometry.groups * itemsize < _LINE // 2:
        return tiles <= _FEW_NARROW
    at_a_time = min(programs, 4 * processors) * tiles * tiling.block_channels * tiling.block_elements
    return tiles <= _FEW_TILES or (programs >= processors and at_a_time * itemsize <= _CACHE)


class Parts(NamedTuple):
    """The tiles of a segment and a block of channels are divided among `parts` programs, `tiles` each."""

    tiles: int
    parts: int


def parts(geometry: Geometry, tiling: Tiling, programs: int) -> Parts:
    """The parts that make about this many programs in all."""
    tiles = tiling.tiles(geometry)
    wanted = max(programs // (geometry.segments * tiling.blocks(geometry)), 1)
    each = -(-tiles // min(wanted, tiles))
    return Parts(each, -(-tiles // each))


class Merging(NamedTuple):
    """A kernel that merges partial results has BP parts of BK channels at a time."""

    block_parts: int
    block_channels: int

    @property
    def constants(self) -> dict[str, int]:
        return {"BP": self.block_parts, "BK": self.block_channels, "warps": 8}

    def programs(self, geometry: Geometry) -> int:
        blocks = -(-geometry.channels // self.block_channels)
        return geometry.segments * (geometry.groups if geometry.grouped else blocks)


def merging(geometry: Geometry, parts: Parts) -> Merging:
    rows = 16 if parts.parts <= 16 else _MERGED // 4  # two kernels, for any batch size
    together = power_of_two(geometry.channels // geometry.groups)
    return Merging(rows, min(max(4, together), _MERGED // rows))


class Launches(NamedTuple):
    """All launches for tensors of one shape: one (`sets`), or several."""

    geometry: Geometry
    tiling: Tiling
    moments: Parts
    sums: Parts
    mapping: Parts
    sets: Tiling | None
    choice: Choice

    def programs(self, parts: Parts) -> int:
        return self.geometry.segments * self.tiling.blocks(self.geometry) * parts.parts

    def set_programs(self) -> int:
        assert self.sets is not None
        blocks = self.geometry.groups if self.geometry.grouped else self.sets.blocks(self.geometry)
        return self.geometry.segments * blocks


@lru_cache(4096)
def planned(
    shape: tuple[int, ...],
    groups: int,
    contiguous: bool,
    itemsize: int,
    processors: int,
    choice: Choice | None = None,
) -> Launches:
    """The launches for an input of this shape, which is not empty."""
    choice = choice or DEFAULT
    if groups > 0 and shape[1] % groups:
        raise RuntimeError(f"{shape[1]} channels cannot be divided into {groups} groups")
    if groups < 0 and shape[0] % -groups:
        raise RuntimeError(f"{shape[0]} samples cannot be divided into groups of {-groups}")
    seen = geometry(shape, groups, contiguous)
    tiles = tiling(seen, itemsize, choice=choice)
    moments, sums, mapping = (
        parts(seen, tiles, programs * processors * choice.warps // tiles.warps)
        for programs in (choice.moments, choice.sums, choice.mapping)
    )
    sets = tiling(seen, itemsize, whole_set=True)
    fits = one_launch(seen, sets, itemsize, processors)
    return Launches(seen, tiles, moments, sums, mapping, sets if fits else None, choice)
