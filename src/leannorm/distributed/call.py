"""What a rank says about the call it makes: enough to notice that another rank makes a different one."""

from __future__ import annotations

import zlib
from typing import NamedTuple

from leannorm.ops.sums import HEADER as HEADER

UNIT = 512  # messages are whole multiples of this many float64 values, 4 KiB


def message_size(channels: int) -> int:
    """How many float64 values a layer's messages have where no other layer's are longer."""
    return -(-(HEADER + 4 * channels) // UNIT) * UNIT


class Call(NamedTuple):
    """One use of a layer in one direction. Ranks that meet in a collective must be in equal calls."""

    layer: str  # its path in the model, or "#n" for the nth one constructed
    what: str  # "training forward", "backward", ...
    channels: int
    timeout: float  # seconds; 0 is the process group's own
    debug: bool
    eps: float = 0.0
    momentum: float | None = None
    tracks: bool = False  # running statistics

    def __str__(self) -> str:
        return f"{readable(self.layer)} ({self.what}, {self.channels} channels)"

    def settings(self) -> str:
        """What all ranks' layers must be constructed with, for their statistics and outputs to be one's."""
        momentum = None if self.momentum is None else float(self.momentum)  # 1 is 1.0
        moving = f", momentum={momentum}" if self.tracks else ""
        return f"eps={float(self.eps)}{moving}, track_running_stats={self.tracks}"

    def token(self, size: int = 0) -> tuple[int, int]:
        """Two 16-bit hashes, sent with their squares; `size` is the one asked for, if any."""
        said = self.layer, self.what, self.channels, size, self.settings()
        token = zlib.crc32("|".join(map(str, said)).encode())
        return token & 0xFFFF, token >> 16


def agree(header: list[float]) -> bool:
    """Did all the ranks that took part send the same tokens? Their headers are summed here.

    Sums of the tokens and of their squares are exact for two million ranks, and by Cauchy and Schwarz
    ranks * sum(t*t) = sum(t)**2 only where all t are equal.
    """
    active, t, tt, u, uu = (int(v) for v in header[:5])
    return active * tt == t * t and active * uu == u * u


def readable(layer: str) -> str:
    """The layer's name in a sentence."""
    number = layer.removeprefix("#")
    return f"layer {layer!r}" if number == layer else f"SyncBatchNorm number {number} by construction"
