"""What ranks exchange about the calls they make, to detect a rank that makes a different call."""

from __future__ import annotations

import zlib
from typing import NamedTuple

from leannorm.ops.sums import HEADER as HEADER

UNIT = 512  # a message's size is a multiple of this many float64 values, 4 KiB


def message_size(channels: int) -> int:
    """The size of messages, in float64 values, for a layer with this many channels."""
    return -(-(HEADER + 4 * channels) // UNIT) * UNIT


class Call(NamedTuple):
    """One forward or backward call of a layer. All ranks in a collective must be in equal calls."""

    layer: str  # its path in the model, or "#n" for the nth one constructed
    what: str  # "training forward", "backward", ...
    channels: int
    timeout: float  # seconds; 0 means the process group's own timeout
    debug: bool
    eps: float = 0.0
    momentum: float | None = None
    tracks: bool = False  # running statistics

    def __str__(self) -> str:
        return f"{readable(self.layer)} ({self.what}, {self.channels} channels)"

    def settings(self) -> str:
        """The settings of the layer that must be equal on all ranks."""
        momentum = None if self.momentum is None else float(self.momentum)  # 1 equals 1.0
        moving = f", momentum={momentum}" if self.tracks else ""
        return f"eps={float(self.eps)}{moving}, track_running_stats={self.tracks}"

    def token(self, size: int = 0) -> tuple[int, int]:
        """Two 16-bit hashes of the call, sent with their squares; `size` is the requested one, if any."""
        compared = self.layer, self.what, self.channels, size, self.settings()
        token = zlib.crc32("|".join(map(str, compared)).encode())
        return token & 0xFFFF, token >> 16


def agree(header: list[float]) -> bool:
    """Whether all active ranks sent the same tokens; `header` is the sum of their headers.

    Sums of the tokens and of their squares are exact for two million ranks, and by the Cauchy-Schwarz
    inequality ranks * sum(t*t) = sum(t)**2 only where all t are equal.
    """
    active, t, tt, u, uu = map(int, header[:5])
    return active * tt == t * t and active * uu == u * u


def readable(layer: str) -> str:
    """The layer's name for error messages."""
    number = layer.removeprefix("#")
    return f"layer {layer!r}" if number == layer else f"SyncBatchNorm number {number} by construction"
