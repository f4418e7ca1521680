"""Passes that are left as they are: nothing is looked at but their first tensor.

So it is with a pass of which a rebuild would free less than `SMALL` bytes, as the last one that was looked at
here has shown; and with passes that are plain, since a step without `lean()` is measured (`watched.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from leannorm._torch import left_to_python
from leannorm.saving.evidence import is_parameter
from leannorm.saving.shards import as_plain, nbytes_of
from leannorm.saving.timing import Timer

if TYPE_CHECKING:
    from leannorm.saving.aside import PassHooks
    from leannorm.saving.ledger import Row

SMALL = 4 << 20
"""Bytes that are not worth looking at a pass. The hooks alone would take more than the twentieth of such a
step."""

NEVER_SMALL = object()
"""The place of passes that are looked at whatever they save, such as those that a report measures."""

Kept = tuple[Any, ...]  # a tensor and its version; of a pass that is timed, the timer of the first

_AGAIN = 64  # passes that are left alone, until one is looked at again
_LARGER = 4
_MORE_NODES = 1.25  # autograd's nodes of the pass: it is another one
_MAX_PLACES = 4096


class Seen(NamedTuple):
    """A pass that was looked at. `first`: bytes of the first tensor. `rows`: all that it saved, as kept."""

    first: int
    freed: int
    nodes: int
    rows: AllKept


class AllKept:
    """What another pass at the same place saved, all of it kept."""

    def __init__(self, rows: Callable[[], Iterable[Row]], kept: int) -> None:
        self._rows, self.kept, self.rebuilt = rows, kept, 0

    def rows(self) -> list[Row]:
        """The fields of a `Record` for each tensor."""
        return [(*row[:4], False, "") for row in self._rows()]


class Alone:
    """The passes at one place that are left alone since the last that was looked at."""

    def __init__(self, seen: Seen) -> None:
        self.seen, self._left = seen, _AGAIN
        larger = min(max(SMALL / max(seen.freed, 1), 1.0), _LARGER)
        self.most = max(seen.first, 1) * larger
        """Bytes of the first tensor, up to which little is freed: of a pass that is much larger, what was not
        worth a rebuild may be."""

    def is_left(self) -> bool:
        """Is the next pass left alone, too?"""
        self._left -= 1
        return self._left >= 0

    def is_other(self, nodes: int) -> bool:
        """Has the pass made many more nodes than the one that was looked at?"""
        return nodes > _MORE_NODES * self.seen.nodes


_LEFT_ALONE: dict[Hashable, Alone] = {}


def place_of(frame: FrameType) -> Hashable:
    """The line of the program that opens a pass."""
    return frame.f_code, frame.f_lasti


def left_alone(place: Hashable) -> Alone | None:
    """What is known of the passes at this place, if the next is left alone."""
    known = _LEFT_ALONE.get(place)
    return known if known is not None and known.is_left() else None


def note(place: Hashable, seen: Seen | None) -> None:
    """A pass was looked at; None: it is to be looked at again."""
    if seen is None or seen.freed > SMALL:
        _LEFT_ALONE.pop(place, None)
        return
    if len(_LEFT_ALONE) >= _MAX_PLACES:
        _LEFT_ALONE.clear()
    _LEFT_ALONE[place] = Alone(seen)


nodes_made: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Autograd's nodes that this thread has made so far."""


class FirstTensor:
    """The pack hook of a pass that is left alone: it looks at the first tensor, and goes."""

    def __init__(
        self, look: Callable[[], bool], least: float, most: float, timer: Timer | None = None
    ) -> None:
        """`look()` sets another hook in the place of this one, where the first tensor has not from `least` to
        `most` bytes: torch is to call that itself, as the frame above it tells which call saves. False if it
        could not be set."""
        self._least, self._most, self._look, self._timer = least, most, look, timer
        self._thread = get_ident()
        self._is_timed = timer is not None  # until the first tensor is packed
        self.hooks: PassHooks | None = None
        self.is_other = False  # is the pass looked at, since it is none of those that are left alone?
        self.is_over = False  # has this hook gone, or the pass been closed?
        self.kept: list[Kept] = []  # before it was looked at

    def forget(self) -> None:
        """Let go of the tensors, and of the pass, which holds this. A thread may still have this hook."""
        self.kept, self.is_over, self.hooks = [], True, None
        del self._look

    @left_to_python
    def pack(self, tensor: Tensor) -> Any:
        """The tensor, detached, and its version."""
        if type(tensor) is Tensor and tensor.layout is torch.strided:
            return self._pack(tensor, tensor.nbytes)
        with as_plain(tensor):
            return self._pack(tensor, nbytes_of(tensor))

    def _pack(self, tensor: Tensor, nbytes: int) -> Kept:
        kept = kept_of(tensor)
        if self.is_over or get_ident() != self._thread:
            return kept
        is_data = not is_parameter(tensor)
        if is_data:
            self.kept.append(kept)
        if is_data or self._most < 0:
            self._decide(nbytes)
        timer, self._is_timed = self._timer if self._is_timed else None, False
        return kept if timer is None else (*kept, timer)

    def _decide(self, nbytes: int) -> None:
        if self._timer is not None:
            self._timer.size = nbytes
        if self._least <= nbytes <= self._most:
            self.is_over = self.hooks is not None and self.hooks.remove()
        else:
            self.is_over = self.is_other = self._look()


def kept_of(tensor: Tensor) -> Kept:
    """What is packed of a tensor that is held, and that `read` unpacks."""
    return tensor if tensor.grad_fn is None else tensor.detach(), tensor._version


def read(kept: Kept) -> Tensor:
    """The tensor; raises autograd's error if it was edited in place."""
    tensor: Tensor = kept[0]
    version, *timer = kept[1:]
    if timer:
        timer[0].reach()
    with as_plain(tensor):
        if tensor._version == version:
            return tensor
        shape = tensor.numel() if tensor.is_nested else list(tensor.shape)
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation:"
            f" [{tensor.type()} {shape}] is at version {tensor._version}; expected version"
            f" {version} instead: edit a copy of it, or edit it after backward()"
        )
