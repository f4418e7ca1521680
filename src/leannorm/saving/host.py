"""`held="host"`: what is kept waits in the memory of the host, and is copied back before it is read.

Copies run next to the computation, on one stream of the device, in the order in which they were started. So
a buffer can be used again without an event: the copy that fills it comes after the one that read it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import count
from threading import Lock
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from leannorm._torch import left_to_python
from leannorm.ops import modes
from leannorm.planning.moves import AHEAD
from leannorm.saving import reasons


class Buffers:
    """Memory of the host, used again from pass to pass, since to pin memory takes longer than to copy it."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self._back = deque[Tensor]()  # buffers that finalizers give back; these may run within `take`
        self._lock, self.all = Lock(), 0

    def take(self, nbytes: int) -> Tensor:
        """A buffer of at least this many bytes; in powers of two, as torch allocates pinned memory."""
        size = 1 << (nbytes - 1).bit_length()
        with self._lock:
            while self._back:
                buffer = self._back.popleft()
                self._free.setdefault(buffer.nbytes, []).append(buffer)
            same = self._free.get(size)
            if same:
                return same.pop()
            self.all -= sum(one.nbytes for free in self._free.values() for one in free)
            self._free.clear()  # the sizes of the passes have changed
            buffer = self.allocate(size)
            self.all += size
        return buffer

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def give_back(self, buffer: Tensor) -> None:
        self._back.append(buffer)


class Link:
    """The copies between a device and the host. `buffers`: where they go."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        self._stream = self._module.Stream(device=device)
        self.buffers = Buffers()

    def now(self) -> Any:
        """The stream on which this thread computes."""
        return self._module.current_stream(self._device)

    def copy(self, of: Tensor, to: Tensor) -> Any:
        """Start a copy after all work that is on this thread's stream now. Returns its end, an event."""
        self._stream.wait_stream(self.now())
        with self._module.stream(self._stream):
            to.copy_(of, non_blocking=True)
            return self._stream.record_event()

    def wait(self, event: Any, stream: Any) -> None:
        """Let a stream wait for the end of a copy. The host does not wait."""
        stream.wait_event(event)

    def is_done(self, event: Any) -> bool:
        return bool(event.query())


@lru_cache
def link_of(device: torch.device) -> Link | None:
    """The link of this device; None for the host itself, and for devices without streams."""
    if device.type in ("cpu", "meta"):
        return None
    module = torch.get_device_module(device)
    return Link(device) if module.is_available() and hasattr(module, "Stream") else None


class Moved:
    """A value that is moved to the host: on its way out (`leaves`), there, or on its way back.

    `here`: its memory on the device while it is on its way. `_end`: an event, the end of that copy. `_stream`
    waits for it before the memory is used for something else.
    """

    def __init__(self, moves: Moves, number: int, tensor: Tensor, link: Link) -> None:
        self.here: Tensor | None = None
        self.moves, self.number, self.leaves, self._link = moves, number, True, link
        self._shape = tensor.size(), tensor.stride()
        self._empty = tensor.new_empty(0)
        self.nbytes = tensor.untyped_storage().nbytes()
        self._buffer, self._stream = link.buffers.take(self.nbytes), link.now()
        flat = self._empty.new_empty(0, dtype=torch.uint8)
        flat.set_(tensor.untyped_storage(), 0, (self.nbytes,), (1,))
        self._end = link.copy(flat, self._buffer[: self.nbytes])
        self.here = tensor

    def __call__(self) -> Tensor:
        """The value on its device, as the log asks for it."""
        return self.moves.bring(self)

    @property
    def has_left(self) -> bool:
        return self._link.is_done(self._end)

    def settle(self) -> None:
        """End the way out. What this thread's stream does from now on, such as an edit, comes after it."""
        if self.leaves:
            for stream in dict.fromkeys((self._stream, self._link.now())):
                self._link.wait(self._end, stream)
            self.leaves, self.here = False, None

    def fetch(self) -> None:
        """Begin the way back."""
        flat = self._empty.new_empty(self.nbytes, dtype=torch.uint8)
        self._stream = self._link.now()
        self._end = self._link.copy(self._buffer[: self.nbytes], flat)
        self.here = flat

    def take(self) -> Tensor:
        """The value, for this thread's stream. The host has its copy for another backward pass."""
        assert self.here is not None
        now = self._link.now()
        if now != self._stream or not self.leaves:
            self._link.wait(self._end, now)
        if now != self._stream:
            self.here.record_stream(now)
        value = self._empty.new_empty(0).set_(self.here.untyped_storage(), 0, *self._shape)
        if not self.leaves:
            self.here = None
        return value

    def __del__(self) -> None:
        if self.here is not None:
            self._link.wait(self._end, self._stream)
        if hasattr(self, "_buffer"):
            self._link.buffers.give_back(self._buffer)


_MOST_ORDERS = 64
_ORDERS: dict[tuple[int, ...], tuple[int, ...]] = {}
"""By the bytes of a step's moved values: the order in which its last backward pass has read them."""


class Moves:
    """The values that one pass moves."""

    def __init__(self, told: Counter[str]) -> None:
        """`told`: gets the reasons why a value is not moved."""
        self._told, self._all = told, list[ref[Moved]]()
        self._leaving, self._coming = list[ref[Moved]](), list[ref[Moved]]()
        self._window = 0  # bytes that may be on their way at once
        self._task = -1
        self._read: dict[int, None] = {}  # numbers, in the order of this backward pass
        self.nbytes_then = 0  # `nbytes` when the last backward pass began

    @property
    def nbytes(self) -> int:
        """Bytes of the moved values that are still needed."""
        return sum(one.nbytes for one in _alive(self._all))

    @left_to_python
    def hold(self, tensor: Tensor) -> Moved | None:
        """Move a value; None if it stays."""
        if self._task >= 0 and next(_alive(self._all), None) is None:
            self._all.clear()  # a backward pass has read all: another step begins
            self._window, self._task = 0, -1
        try:
            link = link_of(tensor.device) if type(tensor) is Tensor else None
            if link is None or modes.capturing(tensor):
                self._told[reasons.NOT_MOVED] = 1
                return None
            with _disable_current_modes():
                moved = Moved(self, len(self._all), tensor, link)
                self._window = max(self._window, AHEAD * moved.nbytes)
                self._all.append(ref(moved))
                self._leaving.append(ref(moved))
                self._let_go()
        except Exception as error:
            self._told[reasons.not_moved(tensor, error)] += 1
            return None
        return moved

    def _let_go(self) -> None:
        """Let go of what has left, and wait for the first ones if too much is on its way.

        What has not left when the pass ends stays: code after the pass may write it unseen, while it is
        copied. It is read first, and from its own memory.
        """
        leaving = deque(one for one in _alive(self._leaving) if one.leaves)
        nbytes = sum(one.nbytes for one in leaving)
        while leaving and (nbytes > self._window or leaving[0].has_left):
            nbytes -= leaving[0].nbytes
            leaving.popleft().settle()
        self._leaving = list(map(ref, leaving))

    def end(self) -> None:
        """Let go of the rest, which a plan has chosen since it has time to leave before the pass ends."""
        for one in _alive(self._leaving):
            one.settle()

    def bring(self, moved: Moved) -> Tensor:
        """The value, for a reader that comes next on this thread's stream."""
        task = torch._C._current_graph_task_id()
        with _disable_current_modes(), torch.no_grad():
            if task >= 0 and task != self._task:
                self._begin(task)
            if moved.here is None:
                moved.fetch()
            tensor = moved.take()
            if task >= 0:
                self._follow(moved)
        return tensor

    def _begin(self, task: int) -> None:
        alive = {one.number: one.nbytes for one in _alive(self._all)}
        self._task, self._read, self.nbytes_then = task, {}, sum(alive.values())
        self._sizes = tuple(alive.get(number, 0) for number in range(len(self._all)))
        self._order: Sequence[int] = _ORDERS.get(self._sizes, range(len(self._all))[::-1])
        self._places = dict(zip(self._order, count(1)))

    def _follow(self, moved: Moved) -> None:
        """Begin the way back of what was read next in the last backward pass."""
        self._read[moved.number] = None
        if len(self._read) == len(self._sizes) - self._sizes.count(0):
            if len(_ORDERS) >= _MOST_ORDERS:
                _ORDERS.pop(next(iter(_ORDERS)))
            _ORDERS[self._sizes] = tuple(self._read)
        coming = [one for one in _alive(self._coming) if one.here is not None]
        nbytes = sum(one.nbytes for one in coming)
        following = self._order[self._places.get(moved.number, 0) :]
        for one in _alive(self._all[number] for number in following):
            if one.here is None and nbytes and nbytes + one.nbytes > self._window:
                break
            if one.here is None and one.number not in self._read:
                try:
                    one.fetch()
                except RuntimeError:  # no memory for it now: it comes when it is read
                    break
                coming.append(one)
                nbytes += one.nbytes
        self._coming = list(map(ref, coming))


def _alive(all_: Iterable[ref[Moved]]) -> Iterator[Moved]:
    return (one for one in (one() for one in all_) if one is not None)
