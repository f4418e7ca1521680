"""What is held for the backward pass and what will be rebuilt, in bytes, while both come and go."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from leannorm.saving.values import Value


class Entry(NamedTuple):
    """A storage (known by its address among those alive) and its bytes."""

    storage: int
    nbytes: int


class Ledger:
    """Counts storages, not tensors; parameters, which are there anyway, are not counted as held."""

    def __init__(self) -> None:
        self._held: weakref.WeakKeyDictionary[Value, Entry] = weakref.WeakKeyDictionary()
        self._rebuilt: weakref.WeakKeyDictionary[Value, Entry] = weakref.WeakKeyDictionary()
        self._closed: tuple[int, int] | None = None

    def holds(self, value: Value, tensor: Tensor) -> None:
        if tensor.layout == torch.strided and not _of_parameter(tensor):
            storage = tensor.untyped_storage()
            self._held[value] = Entry(storage._cdata, storage.nbytes())
        self._closed = None

    def rebuilds(self, value: Value, tensor: Tensor, nbytes: int | None = None) -> None:
        root = value
        while root.step is not None and root.step.view and root.step.inputs:
            root = root.step.inputs[0]
        self._rebuilt[root if root.step is not None else value] = Entry(
            0, tensor.nbytes if nbytes is None else nbytes
        )
        self._closed = None

    def close(self) -> None:
        """Remember the sums, which stay when the backward pass has let everything go."""
        self._closed = self._sums()

    def kept(self) -> int:
        return (self._closed or self._sums())[0]

    def rebuilt(self) -> int:
        return (self._closed or self._sums())[1]

    def _sums(self) -> tuple[int, int]:
        held = {e.storage: e.nbytes for v, e in list(self._held.items()) if v.step is None}
        return sum(held.values()), sum(e.nbytes for e in list(self._rebuilt.values()))


def _of_parameter(tensor: Tensor) -> bool:
    base = tensor if tensor._base is None else tensor._base
    return base.is_leaf and base.requires_grad
