"""How long a step takes: from the opening of a pass to the end of its backward pass.

The backward pass reads last what was saved first; this read asks autograd's engine for a callback at the end.
On a GPU events are recorded at both ends, and read when a later pass opens, so that the host does not wait.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch

from leannorm.saving.evidence import is_parameter

clock = perf_counter
_opened = 0  # how many passes this process has opened


def opened() -> int:
    """Note that a pass opens now; returns its number."""
    global _opened
    _opened += 1
    return _opened


def passes() -> int:
    """How many passes this process has opened: the number of the last one."""
    return _opened


class Timer:
    """The time of one pass. `told(timer, seconds)` is called once it is known. It is never called if another
    pass opens before this one's backward pass has ended, since the time would be that of both."""

    def __init__(self, number: int, told: Callable[[Timer, float], None]) -> None:
        self._number, self._told, self._reached = number, told, False
        self._events = self._event(), None
        self.size = 0  # bytes of the first tensor
        self._start = clock()

    @staticmethod
    def _event() -> Any:
        if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def reach(self) -> None:
        """Note that what was saved first is read, or gone."""
        if self._reached:
            return
        self._reached = True
        with suppress(RuntimeError):  # raised outside of a backward pass
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        if _opened != self._number:
            return
        if self._events[0] is None:
            self._told(self, clock() - self._start)
        else:
            self._events = self._events[0], self._event()

    def ask(self) -> bool:
        """Whether there is nothing to wait for. A GPU's time is passed on here, once it is known."""
        start, end = self._events
        if end is None:
            return start is None or _opened != self._number
        if not end.query():
            return False
        self._events = None, None
        self._told(self, start.elapsed_time(end) / 1e3)
        return True


class Timed(NamedTuple):
    """What is packed for the first tensor: how to unpack it, and the timer to notify when it is read."""

    unpack: Callable[[], Any]
    timer: Timer


class TimedPack:
    """A pack hook that packs the first tensors as another hook does, and then lets that hook take over. It is
    for hooks that read no frames."""

    def __init__(self, pack: Callable[[Any], Any], unpack: Callable[[Any], Any], timer: Timer) -> None:
        self._pack, self._unpack, self._timer, self._is_first = pack, unpack, timer, True
        self.hooks: Any = None

    def __call__(self, tensor: Any) -> Any:
        packed, timer = self._pack(tensor), self._timer
        if not is_parameter(tensor):
            timer.size = tensor.nbytes
            self.hooks.replace(self._pack, self._unpack)
        if not self._is_first:
            return packed
        self._is_first = False
        return Timed(partial(self._unpack, packed), timer)
