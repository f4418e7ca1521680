"""From shapes to launches: how the per-channel kernels divide a tensor into tiles and programs. Pure
integers.

Kernels are compiled for channels, positions and dtype (the tile), never for the number of
samples: that decides how many programs there are, and whether they run in one launch or in three.

**One launch or several.** Of a tensor of S bytes, several launches move 3 S forward and 5 S backward, with
every multiprocessor at work. One launch moves 2 S and 3 S, as what a program reads twice comes from the L2
cache the second time, but it has a program only for each set: too few for the device where channels are few.
A program waits for memory once for each tile, assumed to take 0.8 µs. On an H200 the times of 128×C×H×W
(benchmarks/results/gpu-nvidia-h200.json, a line through those below 60 MB), extrapolated to tensors without
bytes, are 25 µs of the four launches forward and 22 µs of the three backward: 6 to 7 µs for each, or 8 such
rounds. So n programs on p multiprocessors, which read `tiles` tiles twice, wait

    2 tiles        rounds in one launch
    2 n / p tiles  rounds at least in several, which have n / p tiles for each multiprocessor
    16             rounds for the two launches more

(`rounds` of a `Choice`). A program that has a multiprocessor for itself loads two tiles at a time, or three
that are half as large (`alone_stages`), so its rounds are fewer. No GPU has timed this rule yet:
`benchmarks.gpu` has a row for each of both ways, and `--tune` tries other `rounds`.

**channels_last with few channels** takes several launches. A program reads at least 16 bytes of each row (8
channels of 16 bits), already half of the sector that memory moves. That is 8 programs for 128×64×56², whose
one launch would wait 368 rounds longer on 132 multiprocessors, and 32 for 128×256×14², 18 rounds longer. More
programs for the same channels would have to wait for each other within a launch. Triton has no such barrier.
One made of atomics hangs if not all programs are resident, and in the interpreter, which runs one after the
other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd, prod
from typing import Any, NamedTuple

_LINE = 128  # bytes of a cache line: that many neighbouring channels are read, in channels_last
_SECTOR = 32  # bytes of it that memory moves at least
_LOAD = 16  # bytes that a thread reads at once
_PLANES = 4  # (sample, channel) planes that a thread has values of
_SET_WARPS = 8  # for programs that read a whole set, of which two share a multiprocessor
_ALONE_WARPS = 16  # for those that have one for themselves
_CACHE = 25 << 20  # half of an H100's L2 cache, for values that are read a second time
_MERGED = 1024  # partial results that a program of the merging kernels has at a time
# limits of registers per thread, so that this many programs are resident; without one the compiler chooses
# its own, and may spill. For programs that read a whole set, two (SET; one of twice the warps), or one
# (PRESSED) if they have more than two tensors of a group, or load values one by one
SET_REGISTERS, PRESSED_REGISTERS = 65536 // (32 * _SET_WARPS * 2), 255


class Choice(NamedTuple):
    """Choices that differ between devices; `benchmarks.gpu --tune` measures them (`tuned.py`).

    `in_flight`: bytes of each tensor that a thread loads before it uses them. `warps`: of small programs,
    many of which are resident at once. Programs per multiprocessor: for kernels that write partial results
    (moments, sums), as many as their registers allow at once, since a remainder would run alone; for the
    others, many. Stages: how many tiles are being loaded, of which all but one wait in shared memory;
    `sets_stages` for programs that read a whole set, `alone_stages` if each has a multiprocessor for itself.
    `rounds`: of loads, which one launch may take longer than several do (see above); 0: always several.
    `run_stages`: of programs that go through many rows with one line of parameters; 0: each row has its own.
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
    alone_stages: int = 3
    rounds: int = 16
    run_stages: int = 3

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
    """A tile's shape; `vector` divides the contiguous extent; `wide`: offsets in a tile need 64 bits.

    Of programs that read a whole set also `span`, the samples that a tile has planes of, `side`, the groups
    that lie side by side in it (0: one group, or channels), and whether each has a multiprocessor for itself.
    Kernels get it as a constant.
    """

    columns: bool
    vector: int
    wide: bool
    channels: int
    elements: int
    warps: int
    span: int = 1
    side: int = 0
    alone: bool = False

    def stages(self, choice: Choice) -> int:
        """How many tiles are being loaded, where a program reads a whole set: one more, if they are half as
        large."""
        if not self.alone or choice.alone_stages == 1:
            return choice.alone_stages if self.alone else choice.sets_stages
        return choice.alone_stages + (self.warps < _ALONE_WARPS)

    def blocks(self, geometry: Geometry) -> int:
        if self.side:
            return -(-geometry.groups // self.side)
        return -(-geometry.channels // self.channels)

    def programs(self, geometry: Geometry) -> int:
        """Of programs that read a whole set each."""
        one_group = geometry.grouped and not self.side
        return geometry.segments * (geometry.groups if one_group else self.blocks(geometry))

    def tiles(self, geometry: Geometry) -> int:
        """Tiles of a segment for each block of channels."""
        if self.columns:
            return -(-geometry.samples * geometry.inner // self.elements)
        pieces = -(-geometry.inner // (self.elements // self.span))
        return -(-geometry.samples // self.span) * pieces


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


def _at_once(geometry: Geometry, itemsize: int, in_flight: int) -> int:
    """Bytes that a thread loads before it uses them: half, where smaller loads need more addresses and
    masks."""
    along = geometry.channels if geometry.columns else geometry.inner
    return in_flight // 2 if along * itemsize % _LOAD else in_flight


def tiling(
    geometry: Geometry, itemsize: int, choice: Choice | None = None, together: int | None = None
) -> Tiling:
    """The tiles of programs that share a set (all values of one statistic), or read a group of `together`
    channels each."""
    choice = choice or DEFAULT
    warps = choice.warps if together is None else _SET_WARPS
    in_flight = _at_once(geometry, itemsize, choice.in_flight)
    values = in_flight // itemsize * 32 * warps
    together = together or geometry.channels
    if geometry.columns:
        width = _LINE // itemsize
        channels = min(_least_padding(together, (width, max(width // 2, 1))), power_of_two(together))
        elements = values // channels
        if geometry.samples == 1:  # if there are several, their number must not decide what is compiled
            elements = min(elements, power_of_two(geometry.inner))
        wide = elements * geometry.channels > 2**31 - 1
        contiguous = gcd(together, channels)  # every block begins at a multiple of `vector`
    else:
        contiguous = geometry.inner
        longest = min(values, power_of_two(contiguous))
        shorter = [longest >> i for i in range(4) if longest >> i >= 64]
        elements = _least_padding(contiguous, shorter) if shorter else longest
        # a thread also has the constants of each plane that it has values of
        of_load = min(gcd(contiguous, 16), _LOAD // itemsize)
        planes = 32 * warps * in_flight // choice.in_flight * of_load // elements
        channels = min(power_of_two(together), values // elements, _PLANES * max(planes, 1))
        wide = channels * geometry.inner > 2**31 - 1
    threads = channels * elements * itemsize // in_flight
    warps = max(min(warps, threads // 32), 1)
    return Tiling(geometry.columns, gcd(contiguous, 16), wide, channels, elements, warps)


def _widest(geometry: Geometry, candidates: Sequence[int], processors: int) -> int:
    """The most channels of a program that leave nearly as many programs as multiprocessors; the fewest of
    them, if none does. The number of samples decides nothing here."""
    enough = [c for c in candidates if -(-geometry.channels // c) * 4 >= 3 * processors]
    return max(enough, default=min(candidates))


def set_tiling(
    geometry: Geometry,
    itemsize: int,
    processors: int,
    cache: int = _CACHE,
    pressed: bool = False,
) -> Tiling:
    """The tiles of programs that read a whole set each: some channels of a segment, or one group or more.

    Of `channels_last` a program reads 128 bytes of each row, or as few as 16, so that there are about as many
    programs as multiprocessors; of groups that fill no cache line as many side by side as the L2 cache holds
    until they are read again. If programs are few, or read more than 16 bytes of a row, each has a
    multiprocessor for itself: more warps, or if it is `pressed` more registers of each thread, and smaller
    tiles.
    """
    size = geometry.channels // geometry.groups
    columns, inner, channels = geometry.columns, geometry.inner, geometry.channels
    sided = geometry.grouped and columns and size * itemsize < _LINE // 2
    if geometry.grouped and not sided:
        return tiling(geometry, itemsize, together=size)
    in_flight = _at_once(geometry, itemsize, DEFAULT.in_flight)
    side, span, shared = 0, 1, geometry.samples > 1  # otherwise each sample makes programs of its own
    if sided:
        widths = [n // itemsize for n in (_LINE, _LINE // 2, _SECTOR) if n // itemsize >= size]
        fitting = [n for n in widths if n * inner * processors * itemsize <= cache] or widths[-1:]
        width = max(fitting, key=lambda n: n // size * size / n)  # with the least lanes that idle
        side = min(width // size, geometry.groups)
        block, few = min(width, power_of_two(channels)), True
    elif columns:
        widths = [max(n // itemsize, 1) for n in (_LINE, _LINE // 2, _SECTOR, _LOAD)]
        width = _widest(geometry, widths, processors) if shared else widths[-1]
        block = min(_least_padding(channels, (width, max(width // 2, 1))), power_of_two(channels))
        few = shared and (-(-channels // block) <= processors or block > widths[-1])
    else:
        most = min(max(512 // power_of_two(inner), 1), power_of_two(channels))
        fewer = [most >> i for i in range(most.bit_length())]
        block = _widest(geometry, fewer, processors) if shared else most
        few = shared and -(-channels // block) <= processors
    warps = _ALONE_WARPS if few and not pressed else _SET_WARPS
    contiguous = gcd(channels, side * size if side else block) if columns else inner
    if side and gcd(contiguous, 16) * itemsize < _LOAD:
        in_flight = DEFAULT.in_flight // 2
    values = in_flight // itemsize * 32 * warps
    if columns:
        elements = values // block
        if not shared:
            elements = min(elements, power_of_two(inner))
        reach = elements * channels
    else:
        piece = min(values // block, power_of_two(inner))
        span = values // block // piece if shared else 1
        elements = span * piece
        reach = (channels * (span - 1) + block) * inner
    threads = block * elements * itemsize // in_flight
    warps = max(min(warps, threads // 32), 1)
    wide = reach > 2**31 - 1
    return Tiling(columns, gcd(contiguous, 16), wide, block, elements, warps, span, side, few)


def one_launch(
    geometry: Geometry, tiling: Tiling, itemsize: int, processors: int, cache: int, choice: Choice
) -> bool:
    """Whether one program should read all of its set, twice (see above)."""
    tiles, channels = tiling.tiles(geometry), tiling.channels
    if geometry.grouped:
        channels = geometry.channels // geometry.groups * max(tiling.side, 1)
        tiles *= -(-channels // tiling.channels)
    programs = tiling.programs(geometry)
    resident = min(programs, (1 if tiling.alone else 4) * processors)
    read_again = resident * geometry.samples * geometry.inner * channels * itemsize
    if 2 * tiles > choice.rounds and read_again > cache:
        return False
    return more_rounds(tiling, tiles, programs, itemsize, processors, choice) <= choice.rounds > 0


def more_rounds(
    tiling: Tiling, tiles: int, programs: int, itemsize: int, processors: int, choice: Choice
) -> int:
    """How many rounds of loads one launch waits longer than several."""
    pipelined = tiling.alone and tiling.vector * itemsize >= 4  # what the device copies past registers
    at_a_time = max(tiling.stages(choice) - 1, 1) if pipelined else 1
    return 2 * tiles * max(processors - programs, 0) // (processors * at_a_time)


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
    channels: int

    @property
    def constants(self) -> dict[str, int]:
        return {"BP": self.block_parts, "BK": self.channels, "warps": 8}

    def programs(self, geometry: Geometry) -> int:
        blocks = -(-geometry.channels // self.channels)
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

    def of_sets(self) -> tuple[int, dict[str, Any]]:
        """How many programs read a whole set each, and the constants of their kernels."""
        sets = self.sets
        assert sets is not None
        how = {"TILE": sets, "warps": sets.warps, "STAGES": sets.stages(self.choice)}
        return sets.programs(self.geometry), how | {"GROUPED": self.geometry.grouped and not sets.side}


@lru_cache(4096)
def planned(
    shape: tuple[int, ...],
    groups: int,
    contiguous: bool,
    itemsize: int,
    processors: int,
    choice: Choice | None = None,
    cache: int = _CACHE,
    pressed: bool = False,
) -> Launches:
    """The launches for an input of this shape, which is not empty; `cache`: bytes of it for what is read
    twice."""
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
    sets = set_tiling(seen, itemsize, processors, cache, pressed)
    fits = one_launch(seen, sets, itemsize, processors, cache, choice)
    return Launches(seen, tiles, moments, sums, mapping, sets if fits else None, choice)
