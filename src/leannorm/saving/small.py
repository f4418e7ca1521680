"""Passes that save little: what they save is held as it is, since rebuilding costs more than it brings.

A pass is small until it has saved more than `SMALL` bytes. Only where the pass before, at the same place of
the program, stayed small does one begin so; every other looks at all that it saves from its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import FrameType
from typing import Any

from torch import Tensor

from leannorm.saving.evidence import sequence_number

SMALL = 4 << 20
"""Bytes of a whole pass. Below, a look at each tensor takes a tenth of the step and more."""

Kept = tuple[Tensor, int]  # a tensor and its version

_STAYED_SMALL: dict[Hashable, None] = {}
_MOST = 4096


def place_of(frame: FrameType) -> Hashable:
    """The line of the program that opens a pass."""
    return frame.f_code, frame.f_lasti


def was_small(place: Hashable) -> bool:
    return place in _STAYED_SMALL


def note(place: Hashable, nbytes: int) -> None:
    """What the pass that has ended saved in all."""
    if nbytes > SMALL:
        _STAYED_SMALL.pop(place, None)
    else:
        if len(_STAYED_SMALL) >= _MOST:
            _STAYED_SMALL.clear()
        _STAYED_SMALL[place] = None


class SmallPass:
    """The pack hook of a pass that begins small, and what it has held."""

    def __init__(self, pack_from: Callable[[int], Callable[[Tensor], Any]]) -> None:
        """`pack_from(number)` is the hook for when the pass is small no more, from that node on."""
        self._pack_from = pack_from
        self._pack: Callable[[Tensor], Any] | None = None
        self.kept: list[Kept] = []
        self.nbytes = 0

    def pack(self, tensor: Tensor) -> Any:
        """The tensor without its graph, or what the other hook makes of it."""
        if self._pack is not None:
            return self._pack(tensor)
        base = tensor if tensor._base is None else tensor._base
        of_parameter = base.requires_grad and base.is_leaf
        if not of_parameter:
            self.nbytes += tensor.nbytes
        if self.nbytes > SMALL:
            self._pack = self._pack_from(sequence_number())
            return self._pack(tensor)
        kept = tensor if tensor.grad_fn is None else tensor.detach(), tensor._version
        if not of_parameter:
            self.kept.append(kept)
        return kept


def read(kept: Kept) -> Tensor:
    """The tensor; raises autograd's error if it was edited in place."""
    tensor, version = kept
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation:"
            f" [{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version"
            f" {version} instead: edit a copy of it, or edit it after backward()"
        )
    return tensor
