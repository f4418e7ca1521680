"""What proves that a tensor still holds what a node read: version counters, samples, leaves seen in time.

Autograd's version counter tells every edit but those through `.data`, which keep it. Those are told by a
sample of the elements, as long as they touch one of them: an optimizer's or an average's do.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from ctypes import string_at
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from leannorm.saving.device import asynchronous

RUNS, RUN = 4, 256
"""Of a sample: runs, and bytes of each; in float32, 256 elements. Read past torch, it takes a microsecond."""

_PLAIN = (Tensor, torch.nn.Parameter)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_EMPTY: dict[tuple[torch.device, torch.dtype], Tensor] = {}


def version_of(tensor: Tensor) -> Tensor | None:
    """A tensor without memory that shares `tensor`'s version counter; None for a fake one."""
    if type(tensor) not in _PLAIN:
        return None
    kind = tensor.device, tensor.dtype
    if kind not in _EMPTY:
        _EMPTY[kind] = torch.empty(0, device=kind[0], dtype=kind[1])
    counter = tensor.detach()
    counter.data = _EMPTY[kind]  # changes its memory and keeps its version counter
    return counter


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, of which a NaN equals itself."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()]) if tensor.is_floating_point() else tensor


class Sample(NamedTuple):
    """Some of a tensor's bytes, spread over its memory."""

    numel: int
    content: bytes

    @staticmethod
    def of(tensor: Tensor) -> Sample | None:
        """None for what is not on the CPU, or whose elements do not fill its memory."""
        if type(tensor) not in _PLAIN or tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return None
        if not _fills_its_memory(tensor) or tensor.untyped_storage().nbytes() == 0:
            return None
        return Sample(tensor.numel(), _bytes_of(tensor))

    def matches(self, tensor: Tensor) -> bool:
        """Are these bytes still what they were?"""
        if tensor.numel() != self.numel or tensor.untyped_storage().nbytes() == 0:
            return False
        return _bytes_of(tensor) == self.content


def _bytes_of(tensor: Tensor) -> bytes:
    start, nbytes = tensor.data_ptr(), tensor.numel() * tensor.itemsize
    if nbytes <= RUNS * RUN:
        return string_at(start, nbytes)
    step = (nbytes - RUN) // (RUNS - 1)
    return b"".join([string_at(start + i * step, RUN) for i in range(RUNS)])


def _fills_its_memory(tensor: Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return extent == tensor.numel()


class Leaves:
    """The leaves that steps read, and what they held when a pass began.

    A node that was made in the pass has read what a leaf holds, if the leaf has not changed since. Of a node
    that was made before (a cast that autocast or the user keeps) nothing is known.
    """

    _known: WeakIdKeyDictionary = WeakIdKeyDictionary()
    _lock = threading.Lock()  # passes may run in several threads

    def __init__(self) -> None:
        self._since = sequence_number()
        with self._lock:
            leaves = list(self._known)
        self._before = {id(leaf): (leaf, leaf._version, Sample.of(leaf)) for leaf in leaves}

    def proves(self, node: int, leaf: Tensor) -> bool:
        """Did the node with this sequence number read what the leaf holds now?"""
        if id(leaf) in self._before:
            _, version, sample = self._before[id(leaf)]
            unchanged = leaf._version == version and (sample is None or sample.matches(leaf))
            return unchanged and self._since <= node
        with self._lock:
            self._known[leaf] = None  # from the next pass on
        return leaf._version == 0 and asynchronous(leaf)  # never edited; nobody may look there

    def forget(self) -> None:
        """The pass is over."""
        self._before.clear()


sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr  # of this thread's next node


def owner_of(tensor: Tensor, made_by: str) -> str:
    """A parameter's name in the largest model that holds it; for messages, as it looks at every object."""
    what = f"{made_by or 'a leaf'} of shape {list(tensor.shape)}"
    names = [
        (len(name), f"the parameter {name} of {type(module).__name__}, of shape {list(tensor.shape)},")
        for module in gc.get_objects()
        if issubclass(type(module), torch.nn.Module)  # isinstance would ask lazy objects
        for name, parameter in module.named_parameters()
        if parameter is tensor
    ]
    return max(names)[1] if names else f"the output of {what}" if made_by else what
