"""Stand-ins for the copies between a device and the host (saving/host.py), on tensors of the CPU.

They do what a device may do: a copy runs as late as nothing waits for it, or earlier, and until then its
destination has other bytes. What a device would not forgive is a fault: memory that is freed or written while
a copy reads it, or that is freed while a copy writes it.
"""

import random
from collections import deque
from threading import RLock

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from leannorm.saving.host import Buffers, Link


class Pageable(Buffers):
    """Buffers that are not pinned; `places`: their addresses, which nothing else gets."""

    def __init__(self):
        super().__init__()
        self.places = {}

    def allocate(self, nbytes):
        buffer = torch.full((nbytes,), 0xAB, dtype=torch.uint8)
        self.places[buffer.data_ptr()] = buffer
        return buffer


def bytes_of(memory):
    storage = torch.UntypedStorage._new_with_weak_ptr(memory.cdata)
    return None if storage is None else torch.empty(0, dtype=torch.uint8).set_(storage)


class Late(Link):
    """`chance`: that a copy runs although nothing waits for it, each time that somebody asks."""

    def __init__(self, chance=0.0):
        self.buffers, self.chance, self.random = Pageable(), chance, random.Random(0)
        self.pending, self.started, self.ended = deque(), 0, 0
        self.faults, self.out, self.back, self.torn = [], 0, 0, set()
        self.stream, self.lock = "main", RLock()  # copies run one after the other, whoever waits

    def now(self):
        return self.stream

    def copy(self, of, to):
        with self.lock:
            self.started += 1
            leaves = to.data_ptr() in self.buffers.places
            if leaves:
                self.out += of.nbytes
            else:
                self.back += of.nbytes
                to.fill_(0xCD)
            memories = StorageWeakRef(of.untyped_storage()), StorageWeakRef(to.untyped_storage())
            self.pending.append((self.started, *memories, of.nbytes, of.clone() if leaves else None))
            return self.started

    def _run(self):
        self.ended, of, to, nbytes, was = self.pending.popleft()
        of, to = bytes_of(of), bytes_of(to)
        if of is None or to is None:
            self.faults.append("freed while a copy was under way")
            return
        if was is None and of.data_ptr() in self.torn:
            self.faults.append("read, although it was written while it was copied")
        self.torn.discard(to.data_ptr())
        if was is not None and not torch.equal(of[:nbytes], was):
            self.torn.add(to.data_ptr())
        to[:nbytes].copy_(of[:nbytes])

    def wait(self, event, stream):
        with self.lock:
            while self.ended < event:
                self._run()

    def is_done(self, event):
        with self.lock:
            if self.pending and self.random.random() < self.chance:
                self._run()
            return self.ended >= event


class Timed(Late):
    """A link with a clock: a copy takes its bytes over `bandwidth`, and who waits for it lets time pass."""

    def __init__(self, bandwidth):
        super().__init__()
        self.bandwidth, self.clock, self.waited = bandwidth, 0.0, 0.0
        self.ends = [0.0]

    def copy(self, of, to):
        self.ends.append(max(self.ends[-1], self.clock) + of.nbytes / self.bandwidth)
        return super().copy(of, to)

    def wait(self, event, stream):
        self.waited += max(self.ends[event] - self.clock, 0.0)
        self.clock = max(self.clock, self.ends[event])
        super().wait(event, stream)

    def is_done(self, event):
        return self.ends[event] <= self.clock


def nothing_is_left(link):
    """Whether all buffers are back."""
    back = [*link.buffers._back, *(one for free in link.buffers._free.values() for one in free)]
    return sum(one.nbytes for one in back) == link.buffers.all


def equal(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


def deep(layers=8):
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(64, 64), nn.Tanh())))
