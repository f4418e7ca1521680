"""Does a leaf still hold what a node of this pass read of it? By its contents at the start of the pass."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from itertools import islice
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from leannorm.autograd.nodes import NODES
from leannorm.saving.device import asynchronous
from leannorm.saving.evidence import matches, sample_of, version_of
from leannorm.saving.provenance import Provenance
from leannorm.saving.shards import PLAIN, local_of

_MAX_PLACES = 4096
_RECENT = 2048  # calls


class _Before(NamedTuple):
    """A leaf when the pass began. C++ reads it by place (`proves` of csrc/nodes/kinds.h)."""

    alias: Tensor | None  # holds the memory, so that its address is no other's; None where it was freed
    version: int
    sample: bytes | None
    storage: int


class _Asked(NamedTuple):
    """A leaf by its memory and its version counter: torch swaps no tensor that has weak references."""

    storage: StorageWeakRef
    counter: Tensor  # has the leaf's, and no memory
    layout: tuple[int, torch.Size, tuple[int, ...]]

    def now(self) -> _Before | None:
        """None where the memory is gone."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            return None
        alias = None
        if storage.nbytes():  # else it is freed for now, as sharding does
            with _disable_current_modes():  # a fake tensor's memory is a meta tensor's
                alias = torch.empty(0, dtype=self.counter.dtype, device=storage.device)
                alias = alias.set_(storage, *self.layout).requires_grad_()
        sample = None if alias is None else sample_of(alias)
        return _Before(alias, self.counter._version, sample, self.storage.cdata)


class Leaves:
    """The leaves that steps read, and their contents when a forward pass began.

    If a leaf has not changed since, nor had other data for a while (`leaf.data = other`), every node made in
    this pass read what the leaf holds now. A node made before the pass (a cast that autocast or the user
    keeps) may have read something else. That a leaf had other data, the C++ nodes tell; without them, what it
    held is known of biases alone that the function which calls torch has at hand, read while the call runs.
    """

    _asked_at: ClassVar[dict[Hashable, dict[int, _Asked]]] = {}  # by the place where the pass opens
    _lock = threading.Lock()  # passes may run in several threads

    def __init__(self, provenance: Provenance) -> None:
        self._provenance = provenance
        self.before: dict[int, _Before] = {}
        self._of_this_place = dict[int, _Asked]()
        self._in_calls = dict[int, dict[int, bytes | None]]()  # by the number of the node behind the call's
        self._watches = False

    def begin(self, place: Hashable) -> None:
        """Sample the leaves that passes at this place have asked for."""
        with self._lock:
            if len(self._asked_at) > _MAX_PLACES:
                self._asked_at.clear()
            self._of_this_place = self._asked_at.setdefault(place, self._of_this_place)
            now = {leaf: asked.now() for leaf, asked in self._of_this_place.items()}
            for gone in (leaf for leaf, before in now.items() if before is None):
                del self._of_this_place[gone]
        self.before = {leaf: before for leaf, before in now.items() if before is not None}
        if NODES is not None:
            NODES.watch_leaves()
            self._watches = True

    def proves(self, node: Node, leaf: Tensor) -> bool:
        """Did the node read what the leaf holds now?"""
        own = leaf if type(leaf) in PLAIN else local_of(leaf)
        if own is None:
            return False
        before = self.before.get(id(leaf))
        if before is not None and before.storage == own.untyped_storage()._cdata:
            unchanged = leaf._version == before.version and matches(before.sample, leaf)
            return unchanged and self._provenance.made(node) and self._had_its_data(node, own)
        counter = version_of(leaf)
        if counter is not None:
            layout = int(own.storage_offset()), own.shape, own.stride()
            with self._lock:  # sampled from the next pass on
                self._of_this_place[id(leaf)] = _Asked(StorageWeakRef(own.untyped_storage()), counter, layout)
        # never edited; a sample would stall the step
        return leaf._version == 0 and asynchronous(leaf) and self._had_its_data(node, own)

    def _had_its_data(self, node: Node, leaf: Tensor) -> bool:
        """Had the leaf, when the node read it, the memory that it has now?"""
        if NODES is not None:
            replaced: bool = NODES.had_other_data(leaf)
            return not replaced
        seen = self._in_calls.get(node._sequence_nr() + 1, {})
        return leaf.data_ptr() in seen and matches(seen[leaf.data_ptr()], leaf)

    def read_in_call(self, number: int, leaves: list[Tensor]) -> None:
        """The call that saves a tensor now reads these leaves; `number` is the next node's."""
        if len(self._in_calls) > 2 * _RECENT:  # a pass around many steps
            for old in [*islice(self._in_calls, _RECENT)]:
                del self._in_calls[old]
        if leaves:
            self._in_calls[number] = {leaf.data_ptr(): sample_of(leaf) for leaf in leaves}

    def forget(self) -> None:
        """Drop what was recorded when the pass began: the pass is over."""
        self.before.clear()
        self._in_calls.clear()
        if self._watches:
            NODES.stop_watching_leaves()
            self._watches = False
