"""What it costs to move values to the host and back: the seconds for which the computation waits for copies.

Copies run next to the computation, one after the other. A value leaves as soon as it is saved, and the
computation waits if too much is on its way. In the backward pass the next values come back, as many as may be
on their way at once. `saving/host.py` does the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate, islice
from typing import NamedTuple

AHEAD = 2
"""So many times the bytes of the largest moved value may be on their way at once."""


class Away(NamedTuple):
    """A value to move. `ready`: the moment after which it may leave; `read`: the first that needs it back."""

    nbytes: int
    ready: int
    read: int


class Stay(NamedTuple):
    """The moments of a value on the device: until `left`, and from `back` on; one stay if it never leaves."""

    left: int
    back: int


class Moving:
    """The values that one step moves, at `link` bytes per second. `taken`: the seconds of all moments."""

    def __init__(self, taken: Sequence[float], forward: int, link: float, values: Sequence[Away]) -> None:
        self._values, self._forward, self._link = values, forward, link
        self._until = [0.0, *accumulate(taken)]  # the seconds before each moment
        self._free = 0.0  # when all copies so far are done
        self._window = 0  # bytes that may be on their way at once
        self.waited = 0.0  # seconds
        self._leaving = deque[tuple[int, float]]()  # values, and when they have left
        self._coming: dict[int, float] = {}  # when they are back
        self._left: dict[int, int] = {}
        self._back: dict[int, int] = {}
        for i in sorted(range(len(values)), key=lambda i: values[i].ready):
            self._leave(i)
        self._let_go(forward)
        order = sorted(range(len(values)), key=lambda i: values[i].read)
        for at, i in enumerate(order):
            self._read(i, islice(order, at + 1, None))

    def stays(self) -> list[Stay]:
        """When each value is on the device."""
        reads = [value.read for value in self._values]
        return [Stay(self._left.get(i, read), self._back.get(i, read)) for i, read in enumerate(reads)]

    def has_left(self, i: int) -> bool:
        """Whether the value leaves the device in the forward pass."""
        return self._left.get(i, self._forward) < self._forward

    def _copy(self, i: int, now: float) -> float:
        self._free = max(self._free, now) + self._values[i].nbytes / self._link
        return self._free

    def _wait(self, until: float, moment: int) -> float:
        """Wait before this moment of the step begins; returns the time."""
        now = self._until[moment] + self.waited
        self.waited += max(until - now, 0.0)
        return max(until, now)

    def _leave(self, i: int) -> None:
        nbytes, ready, _ = self._values[i]
        self._window = max(self._window, AHEAD * nbytes)
        self._leaving.append((i, self._copy(i, self._until[ready + 1] + self.waited)))
        self._let_go(ready + 1)

    def _let_go(self, moment: int) -> None:
        nbytes = sum(self._values[i].nbytes for i, _ in self._leaving)
        now = self._wait(0.0, moment)
        while self._leaving and (nbytes > self._window or self._leaving[0][1] <= now):
            i, end = self._leaving.popleft()
            now = self._wait(end, moment)
            self._left[i] = moment - 1
            nbytes -= self._values[i].nbytes

    def _read(self, i: int, following: Iterable[int]) -> None:
        moment = self._values[i].read
        now = self._wait(0.0, moment)
        if i in self._left:
            self._back.setdefault(i, moment)
            now = self._wait(self._coming.pop(i) if i in self._coming else self._copy(i, now), moment)
        nbytes = sum(self._values[one].nbytes for one in self._coming)
        for one in following:
            if one in self._back or one not in self._left:
                continue
            if nbytes and nbytes + self._values[one].nbytes > self._window:
                break
            self._coming[one], self._back[one] = self._copy(one, self._wait(0.0, moment)), moment
            nbytes += self._values[one].nbytes
