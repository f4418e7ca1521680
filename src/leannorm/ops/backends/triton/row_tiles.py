"""From rows to launches: how the per-row kernels divide a tensor into tiles and programs. Pure integers.

Nothing here depends on the number of rows, so that no new batch size compiles a kernel. The numbers follow
from the registers: with 32 values of 4 bytes a thread has registers left for what is computed from them; 64
with their sums are the most that fit. `tests/kernels/test_triton_compiles.py` checks them.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from leannorm.ops.backends.triton.tiling import power_of_two

_SECTORS = 64  # bytes of neighbouring rows that are read at once, if rows are interleaved
_REGISTERS = 65536  # per multiprocessor; all programs of the backward pass must be resident at once
_LONG = 4096  # values in a tile of a row that is longer than a tile


class TileConstants(NamedTuple):
    """What a kernel is compiled for: its tile, rows as lines or interleaved, a divisor, 64-bit offsets."""

    rows: int
    block: int
    lines: bool
    vector: int
    wide: bool


class Tile(NamedTuple):
    """`rows` rows by `block` of their values; `whole` if that is all of them.

    `registers` is the limit per thread; without one the compiler chooses its own, and may spill.
    """

    rows: int
    block: int
    warps: int
    whole: bool = True
    registers: int | None = None

    def needed(self, outer: int, inner: int) -> int:
        """How many tiles the rows make."""
        if inner == 1:
            return -(-outer // self.rows)
        return outer * -(-inner // self.rows)

    def constants(self, kept: int, inner: int) -> TileConstants:
        """For rows of `kept` values, of which `inner` are interleaved."""
        reach = kept * (self.rows if inner == 1 else inner)  # from a tile's start to its end
        wide = reach >= 2**31 - 2**16
        return TileConstants(self.rows, self.block, inner == 1, vector(kept, inner), wide)


class Backward(NamedTuple):
    """A launch whose programs go through many tiles, as the backward pass: a tile, programs per
    multiprocessor, and the kernel's constants."""

    tile: Tile
    programs: int
    fold: bool
    halves: bool = False
    stages: int = 2

    def deeper(self, kept: int, itemsize: int, tensors: int, shared: int) -> Backward:
        """With more tiles being loaded if rows of `kept` values leave lanes idle: two full tiles' bytes.

        Only if a multiprocessor has the shared memory for all programs.
        """
        for ahead in range(min(-(-2 * self.tile.block // kept), 4), 2, -1):
            more = self._replace(stages=1 + ahead)
            if self.programs * more.shared(itemsize, tensors) <= shared:
                return more
        return self

    def shared(self, itemsize: int, tensors: int) -> int:
        """About how many bytes of shared memory it needs: the tiles being loaded, and the reductions."""
        values = self.tile.rows * self.tile.block
        loads = tensors * itemsize + (2 * itemsize + 4 if self.halves else 0)
        return (self.stages - 1) * values * loads + 1024


def _beside(inner: int, itemsize: int) -> int:
    return min(power_of_two(inner), _SECTORS // itemsize)


def vector(kept: int, inner: int) -> int:
    """The largest power of two, up to 16, that divides the contiguous extent."""
    return gcd(kept if inner == 1 else inner, 16)


def _scattered(kept: int, inner: int, itemsize: int) -> bool:
    """Whether loads are narrower than 16 bytes, so that they need more addresses and masks."""
    return vector(kept, inner) * itemsize < 16


def along(inner: int, itemsize: int) -> Tile:
    """For rows longer than a tile."""
    rows = 1 if inner == 1 else _beside(inner, itemsize)
    if itemsize == 8:
        return Tile(rows, _LONG // 2 // rows, 8, whole=False)
    return Tile(rows, _LONG // rows, 8, whole=False, registers=128)


def forward(kept: int, inner: int, itemsize: int, pressed: bool, lines: bool = False) -> Tile:
    """A thread has 32 values (16 if they are wide or scattered), a program up to 32 warps.

    `pressed`: registers also contain a residual or wide parameters. Otherwise two of the largest programs can
    share a multiprocessor, and a limit of registers makes them do so. `lines`: of the parameters.
    """
    block = power_of_two(kept)
    of_lines = lines and (itemsize > 2 or block > 4096)  # measured on an H100, as all numbers for 16 bits
    narrow = itemsize == 8 or inner > 1 or of_lines or _scattered(kept, inner, itemsize)
    a_warp = 512 if narrow else 1024
    if inner == 1:
        rows, most = max(a_warp // block, 1), {2: 32, 4: 16, 8: 16}[itemsize] * a_warp
    else:
        rows, most = _beside(inner, itemsize), 16 * a_warp
        rows = max(rows, min(power_of_two(inner), a_warp // block))
    if rows * block > most:
        return along(inner, itemsize)
    warps = max(rows * block // a_warp, 1)
    return Tile(rows, block, warps, registers=64 if warps == 16 and inner == 1 and not pressed else None)


def run(kept: int, itemsize: int, tensors: int, stages: int, shared: int) -> Backward | None:
    """For rows that share a line of each parameter, forward: a thread has 16 values of a row and of each line
    (8 if they are wide or scattered), and `stages` tiles are being loaded. None for rows longer than a tile.
    """
    block = power_of_two(kept)
    a_warp = 256 if itemsize == 8 or _scattered(kept, 1, itemsize) else 512
    rows = max(4 * a_warp // block, 1)
    warps = rows * block // a_warp
    narrow, single = itemsize == 2, tensors == 1
    programs = (24 if narrow and single else 16 if narrow or single else 12) // warps
    if not programs:
        return None
    limit = _REGISTERS // (32 * warps * programs) // 8 * 8
    launch = Backward(Tile(rows, block, warps, registers=limit), programs, fold=False, stages=stages)
    return launch if programs * launch.shared(itemsize, tensors) <= shared else None


# Bytes of a value and length of a row, for tiles that need so many registers that fewer programs fit.
_CROWDED = {(2, 128): 2, (2, 256): 3, (4, 128): 2, (4, 256): 3}


def backward(kept: int, inner: int, itemsize: int, tensors: int, shared: int) -> Backward | None:
    """None for rows longer than a tile; `tensors` are read, through `shared` bytes of shared memory.

    A thread has 16 values of each tensor and 16 sums of each of two kinds, or 32 if rows are long; if rows
    are interleaved, 16 values and few sums.
    """
    block = power_of_two(kept)
    a_tile = 1024 if itemsize == 8 else 2048
    if inner == 1:
        if block <= a_tile:
            programs = _CROWDED.get((itemsize, block), 4)
            warps = 8 if (itemsize, block) == (2, 128) else 4
            launch = Backward(Tile(a_tile // block, block, warps), programs, fold=block * itemsize >= 2048)
        elif block == 2 * a_tile:
            launch = Backward(Tile(1, block, 8), 2, fold=True)
        elif itemsize < 8 and block == 4 * a_tile:
            launch = Backward(Tile(1, block, 8), 1, fold=True)
        elif itemsize < 8 and block == 8 * a_tile:
            launch = Backward(Tile(1, block // 2, 8), 1, fold=True, halves=True)
        else:
            return None
        two_ahead = launch._replace(stages=3)
        fits = two_ahead.shared(itemsize, tensors) <= shared and not (launch.halves and tensors > 2)
        if itemsize == 2 and fits:
            launch = two_ahead if launch.halves else two_ahead.deeper(kept, itemsize, tensors, shared)
        if itemsize == 4 and block == 2 * a_tile:
            launch = launch._replace(stages=3, programs=1)
    else:
        rows = _beside(inner, itemsize)
        fold = rows * block >= a_tile or power_of_two(inner) <= rows
        if not fold:
            rows = min(power_of_two(inner), a_tile // block)
        if rows * block > 65536 // itemsize // 4:
            return None
        warps = min(max(rows * block // 512, 4), 16)
        launch = Backward(Tile(rows, block, warps), 16 // warps if fold else 2, fold)
    if itemsize == 8:
        launch = launch._replace(programs=max(launch.programs // 2, 1))
    if _scattered(kept, inner, itemsize):
        tile = launch.tile._replace(warps=min(2 * launch.tile.warps, 16))
        launch = launch._replace(tile=tile, programs=max(launch.programs // 2, 1))
    if launch.shared(itemsize, tensors) > shared:
        return None
    # registers are allocated in units of eight
    limit = min(_REGISTERS // (32 * launch.tile.warps * launch.programs) // 8 * 8, 255)
    return launch._replace(tile=launch.tile._replace(registers=limit))


def shares(inner: int, itemsize: int) -> Tile:
    """For the sums over rows that are longer than a tile."""
    rows, values = 4 if inner == 1 else _beside(inner, itemsize), 1024 if itemsize == 8 else 2048
    return Tile(rows, values // rows, 4, whole=False)


def elementwise(kept: int) -> Tile:
    """For kernels that treat each value alone and sum over rows."""
    block = min(power_of_two(kept), 512)
    return Tile(2048 // block, block, 4, whole=False)


def gated(kept: int, itemsize: int) -> Tile:
    """For a gate of the input's shape, forward: a thread has 16 values of both, 8 or 4 if they are wide."""
    a_warp = _gated_by_warp(kept, itemsize)
    block = power_of_two(kept)
    rows = max(a_warp // block, 1)
    if rows * block > 16 * a_warp:
        return Tile(1, _LONG // (4 if itemsize == 8 else 2), 8, whole=False)
    return Tile(rows, block, max(rows * block // a_warp, 1))


def gated_backward(kept: int, itemsize: int) -> Backward:
    """The same for its backward pass, with five tensors and the sums."""
    a_warp = _gated_by_warp(kept, itemsize)
    block = power_of_two(kept)
    warps = max(block // a_warp, 4)
    if itemsize == 2 and (block, a_warp) == (8192, 512):
        warps = 8  # a thread has 32 values, which still takes half the time of three launches
    if warps > 8:
        return Backward(Tile(1, _LONG // (8 if itemsize == 8 else 4), 4, whole=False), 1, fold=False)
    programs = 8 // warps  # with what the activation and its slope need, a thread takes some 250 registers
    limit = min(_REGISTERS // (32 * warps * programs), 255)
    tile = Tile(max(warps * a_warp // block, 1), block, warps, registers=limit)
    return Backward(tile, programs, fold=False, stages=3 if itemsize == 2 else 2)


def _gated_by_warp(kept: int, itemsize: int) -> int:
    """The values of a warp: 16 per thread, fewer if they or their loads need more registers."""
    if itemsize == 8:
        return 128  # the slopes of activations need most
    return 256 if _scattered(kept, 1, itemsize) else 512
