"""Passes that are not recorded: only their first tensor is examined.

A pass is small, and not worth recording, if rebuilds would free less than `few_bytes()`, as the last recorded
pass of its line showed. Plain passes, which measure a step without `lean()`, are not recorded either
(`watched.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from functools import partial
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from leannorm._errors import InputError
from leannorm._torch import left_to_python
from leannorm.saving.evidence import edited, is_parameter
from leannorm.saving.shards import as_plain, nbytes_of
from leannorm.saving.timing import Timed, Timer

if TYPE_CHECKING:
    from leannorm.saving.aside import PassHooks
    from leannorm.saving.ledger import AllKept

_FEW = 4 << 20

NEVER_SMALL = object()
"""The place of passes that are recorded whatever they save, such as those that a report measures."""

Kept = tuple[Tensor, int]  # a tensor and its version

# passes that are left alone before one is recorded again: at first, and at most; it doubles each time
_AGAIN, _MOST = 64, 4096
_LARGER = 4
_MORE_NODES = 1.25  # a pass with this many times the autograd nodes is not the same one
_MAX_PLACES = 4096


class Seen(NamedTuple):
    """A recorded pass. `first`: bytes of its first tensor. `kept`: all that it saved, counted as kept."""

    first: int
    freed: int
    nodes: int
    kept: AllKept


class Alone:
    """The passes at one place that are left alone after one was recorded.

    `again`: how many in all. `left`: how many are still to come.
    """

    def __init__(self, seen: Seen, again: int = _AGAIN) -> None:
        self.seen, self.again, self.left = seen, again, again
        larger = min(max(few_bytes() / max(seen.freed, 1), 1.0), _LARGER)
        self.most = max(seen.first, 1) * larger
        """Bytes of the first tensor up to which rebuilds free little; a pass with more is recorded."""
        self.most_nodes = _MORE_NODES * seen.nodes
        """Autograd nodes up to which a pass is like the one that was recorded."""


LEFT_ALONE: dict[Hashable, Alone] = {}
"""The places whose passes are small."""


def few_bytes() -> int:
    """Bytes for which a pass is not worth recording: 4 MiB, since the hooks alone would take over a twentieth
    of its step; or what the environment variable LEANNORM_SMALL_BYTES says."""
    said = os.environ.get("LEANNORM_SMALL_BYTES")
    if said is None:
        return _FEW
    try:
        return int(said)
    except ValueError:
        raise InputError(f"LEANNORM_SMALL_BYTES must be a number of bytes, got {said!r}") from None


def place_of(frame: FrameType) -> Hashable:
    """The line of the program that opens a pass."""
    return frame.f_code, frame.f_lasti


def left_alone(place: Hashable) -> Alone | None:
    """What is known of the passes at this place, if the next one is left alone; else None."""
    known = LEFT_ALONE.get(place)
    if known is not None:
        known.left -= 1
    return known if known is not None and known.left >= 0 else None


def note(place: Hashable, seen: Seen | None) -> bool:
    """Note that a pass was recorded; with None, that the next one is to be. Returns whether the next ones are
    left alone."""
    before = LEFT_ALONE.pop(place, None)
    if seen is None or seen.freed > few_bytes():
        return False
    if len(LEFT_ALONE) >= _MAX_PLACES:
        LEFT_ALONE.clear()
    LEFT_ALONE[place] = Alone(seen) if before is None else Alone(seen, min(2 * before.again, _MOST))
    return True


nodes_made: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""How many autograd nodes this thread has made so far."""


class FirstTensor:
    """The pack hook of a pass that is left alone: it examines the first tensor, and removes itself. The C++
    nodes have another one (first.h) for passes that nobody times."""

    def __init__(
        self, look: Callable[[], bool], least: float, most: float, timer: Timer | None = None
    ) -> None:
        """`look()` replaces this hook if the first tensor does not have from `least` to `most` bytes; it
        returns False if it cannot. Torch itself must call the new hook, which reads from the frame above it
        which call saves."""
        self._least, self._most, self._look, self._timer = least, most, look, timer
        self._thread = get_ident()
        self._is_timed = timer is not None  # until the first tensor is packed
        self._nodes = nodes_made()
        self.hooks: PassHooks | None = None
        self.is_over = False  # whether this hook was removed or the pass closed
        self.kept: list[Kept] = []  # what was packed before the pass was recorded

    def close(self) -> tuple[int, bool, bool]:
        """End a pass that was left alone: how many autograd nodes it made, whether they saved a tensor, and
        whether this hook is removed."""
        assert self.hooks is not None
        self.hooks.__exit__(None, None, None)
        ended = nodes_made() - self._nodes, bool(self.kept), True
        self.forget()
        return ended

    def forget(self) -> None:
        """Release the tensors, and the pass, which refers to this. A thread may still have this hook."""
        self.kept, self.is_over, self.hooks = [], True, None
        del self._look

    @left_to_python
    def pack(self, tensor: Tensor) -> Any:
        """The tensor, detached, and its version."""
        if type(tensor) is Tensor and tensor.layout is torch.strided:
            return self._pack(tensor, tensor.nbytes)
        with as_plain(tensor):
            return self._pack(tensor, nbytes_of(tensor))

    def _pack(self, tensor: Tensor, nbytes: int) -> Kept | Timed:
        kept = kept_of(tensor)
        if self.is_over or get_ident() != self._thread:
            return kept
        is_data = not is_parameter(tensor)
        if is_data:
            self.kept.append(kept)
        if is_data or self._most < 0:
            self._decide(nbytes)
        timer, self._is_timed = self._timer if self._is_timed else None, False
        return kept if timer is None else Timed(partial(read, kept), timer)

    def _decide(self, nbytes: int) -> None:
        if self._timer is not None:
            self._timer.size = nbytes
        if self._least <= nbytes <= self._most:
            self.is_over = self.hooks is not None and self.hooks.remove()
        else:
            self.is_over = self._look()


def kept_of(tensor: Tensor) -> Kept:
    """What is packed for a tensor that is kept, for `read` to unpack."""
    return tensor if tensor.grad_fn is None else tensor.detach(), tensor._version


def read(kept: Kept) -> Tensor:
    """The tensor; raises autograd's error if it was edited in place."""
    tensor, version = kept
    with as_plain(tensor):
        if tensor._version == version:
            return tensor
        shape = tensor.numel() if tensor.is_nested else list(tensor.shape)
        raise edited(f"{tensor.type()} {shape}", tensor._version, version)


@left_to_python
def unpack(packed: Kept | Timed) -> Tensor:
    """The unpack hook of passes that are not recorded: it gets tensors, and a timed pass's first one."""
    if not isinstance(packed, Timed):
        return read(packed)
    packed.timer.reach()
    tensor: Tensor = packed.unpack()
    return tensor
