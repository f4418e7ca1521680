"""What is held for the backward pass and what will be rebuilt, in bytes, while both come and go."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from leannorm.saving.values import Value


class Ledger:
    """Counts storages, not tensors; parameters, which are there anyway, are not counted as held."""

    def __init__(self) -> None:
        self._held: list[tuple[weakref.ref[Value], int, int]] = []  # with storage and bytes
        self._rebuilt: weakref.WeakKeyDictionary[Value, int] = weakref.WeakKeyDictionary()
        self._closed: tuple[int, int] | None = None

    def holds(self, value: Value, tensor: Tensor) -> None:
        base = tensor._base
        if base is None:
            base = tensor
        if tensor.layout == torch.strided and not (base.is_leaf and base.requires_grad):  # no parameter
            storage = tensor.untyped_storage()
            self._held.append((weakref.ref(value), storage._cdata, storage.nbytes()))
        self._closed = None

    def rebuilds(self, value: Value, tensor: Tensor, nbytes: int | None = None) -> None:
        root = value
        while root.step is not None and root.step.view and root.step.inputs:
            root = root.step.inputs[0]
        self._rebuilt[root if root.step is not None else value] = tensor.nbytes if nbytes is None else nbytes
        self._closed = None

    def close(self) -> None:
        """Remember the sums, which stay when the backward pass has let everything go."""
        self._closed = self._sums()

    def kept(self) -> int:
        return (self._closed or self._sums())[0]

    def rebuilt(self) -> int:
        return (self._closed or self._sums())[1]

    def alive(self) -> dict[int, int]:
        """The bytes of every storage that is held now."""
        alive = ((reference(), storage, nbytes) for reference, storage, nbytes in self._held)
        return {
            storage: nbytes for value, storage, nbytes in alive if value is not None and value.step is None
        }

    def _sums(self) -> tuple[int, int]:
        return sum(self.alive().values()), sum(list(self._rebuilt.values()))
