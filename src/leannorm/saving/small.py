"""Small passes: everything that they save is held, since rebuilding would take more time than it is worth.

A pass starts as a small pass only if the one before, at the same place of the program, was small. It stops
being one when it has saved more than `SMALL` bytes; steps are searched for what is saved from there on. So
does a pass of whose time the hooks would take more than an `overhead` allows, when it has saved twice the
bytes of the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from leannorm._torch import left_to_python
from leannorm.saving.evidence import is_parameter
from leannorm.saving.shards import as_plain, local_of, nbytes_of, storage_of

SMALL = 4 << 20
"""Bytes that a small pass saves at most. Below, searching takes a tenth of the training step or more."""

NEVER_SMALL = object()
"""The place of passes that are searched at any size, such as those that a report measures."""

Kept = tuple[Tensor, int]  # a tensor and its version

_STAYED_SMALL: dict[Hashable, int] = {}  # and the bytes up to which the next one is small
_MAX_PLACES = 4096


def place_of(frame: FrameType) -> Hashable:
    """The line of the program that opens a pass."""
    return frame.f_code, frame.f_lasti


def was_small(place: Hashable) -> int | None:
    """The bytes up to which a pass at this place is small; None if the last one was not."""
    return _STAYED_SMALL.get(place)


def note(place: Hashable, nbytes: int, most: int) -> None:
    """Record that a pass at this place has saved so many bytes in all, and the most that a small one may."""
    if nbytes > most:
        _STAYED_SMALL.pop(place, None)
    else:
        if len(_STAYED_SMALL) >= _MAX_PLACES:
            _STAYED_SMALL.clear()
        _STAYED_SMALL[place] = most


class SmallPass:
    """The pack hook of a small pass, and the tensors that it has held."""

    def __init__(self, search: Callable[[], bool], most: int) -> None:
        """`search()` sets another hook in the place of this one, for what is saved behind `most` bytes: torch
        is to call that itself, as the frame above it tells which call saves. False if it could not be set."""
        self._most, self._search, self._thread = most, search, get_ident()
        self._over = False  # is the other hook set, or the pass closed?
        self.kept: list[Kept] = []
        self.nbytes = 0
        self._storages: dict[int, int] | None = None  # until the sum of all tensors is too large

    def forget(self) -> None:
        """Let go of the tensors, and of the pass, which holds this. A thread may still have this hook."""
        self.kept, self._over = [], True
        del self._search

    @left_to_python
    def pack(self, tensor: Tensor) -> Any:
        """The tensor, detached, and its version."""
        with as_plain(tensor):
            kept = kept_of(tensor)
            if not (self._over or is_parameter(tensor)) and get_ident() == self._thread:
                self._count(tensor)
                self.kept.append(kept)
            if not self._over and self.nbytes > self._most:
                self._over = self._search()
            return kept

    def _count(self, tensor: Tensor) -> None:
        """Each storage once, as in a pass that is searched, where the sum of all tensors is too large."""
        if self._storages is None:
            is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
            self.nbytes += tensor.nbytes if is_plain else nbytes_of(tensor)
            if self.nbytes <= self._most:
                return
            self._storages, self.nbytes = {}, 0
            for held, _ in self.kept:
                self._add(held, self._storages)
        self._add(tensor, self._storages)

    def _add(self, tensor: Tensor, storages: dict[int, int]) -> None:
        local = local_of(tensor)
        place, nbytes = storage_of(tensor if local is None else local)
        self.nbytes += nbytes - storages.get(place, 0)
        if place:  # else nobody can tell whether it is another's
            storages[place] = nbytes


def kept_of(tensor: Tensor) -> Kept:
    """What is packed of a tensor that is held, and that `read` unpacks."""
    return tensor if tensor.grad_fn is None else tensor.detach(), tensor._version


def read(kept: Kept) -> Tensor:
    """The tensor; raises autograd's error if it was edited in place."""
    tensor, version = kept
    with as_plain(tensor):
        if tensor._version == version:
            return tensor
        shape = tensor.numel() if tensor.is_nested else list(tensor.shape)
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation:"
            f" [{tensor.type()} {shape}] is at version {tensor._version}; expected version"
            f" {version} instead: edit a copy of it, or edit it after backward()"
        )
