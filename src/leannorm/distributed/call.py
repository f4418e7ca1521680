"""What a rank says about the call it makes: enough to notice that another rank makes a different one."""

from __future__ import annotations

import zlib
from typing import NamedTuple

HEADER = 7  # active, two tokens and their squares, the size asked for, the count

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

    def header(self, count: int, size: int = 0) -> list[float]:
        """What is sent in front of the payload. Summed over the ranks it still tells whether all agree.

        The tokens are 16-bit hashes: sums of them and of their squares are exact for two million ranks,
        and by Cauchy and Schwarz ranks * sum(t*t) = sum(t)**2 only where all t are equal.
        """
        said = self.layer, self.what, self.channels, size, self.settings()
        token = zlib.crc32("|".join(map(str, said)).encode())
        t, u = token & 0xFFFF, token >> 16
        return [1, t, t * t, u, u * u, size, count]


def agree(header: list[float]) -> bool:
    """Did all the ranks that took part send the same tokens?"""
    active, t, tt, u, uu = (int(v) for v in header[:5])
    return active * tt == t * t and active * uu == u * u


def readable(layer: str) -> str:
    """The layer's name in a sentence."""
    number = layer.removeprefix("#")
    return f"layer {layer!r}" if number == layer else f"SyncBatchNorm number {number} by construction"
