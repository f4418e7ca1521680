"""What is held for the backward pass and what will be rebuilt, in bytes, while both come and go."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from leannorm.saving.values import Value


class Ledger:
    """Counts storages, not tensors; parameters, which are there anyway, are not counted as held."""

    def __init__(self) -> None:
        self._held: list[weakref.ref[Value]] = []
        self._rebuilt: weakref.WeakKeyDictionary[Value, int] = weakref.WeakKeyDictionary()
        self._closed: tuple[int, int] | None = None

    def holds(self, value: Value, tensor: Tensor) -> None:
        """Storages are looked at when somebody asks: all at one time, and out of the forward pass."""
        base = tensor if tensor._base is None else tensor._base
        if not (base.requires_grad and base.is_leaf):  # no parameter
            self._held.append(weakref.ref(value))
        self._closed = None

    def rebuilds(self, value: Value, tensor: Tensor, nbytes: int | None = None) -> None:
        if nbytes is None:  # a view would hold the whole
            nbytes = tensor.untyped_storage().nbytes() if tensor.layout == torch.strided else tensor.nbytes
        self._rebuilt[_root(value)] = nbytes
        self._closed = None

    def parts(self, values: Mapping[int, weakref.ref[Value]]) -> Iterator[tuple[Value, list[int], int]]:
        """The rebuilt values by the memory that they share: what it belongs to, their places, its bytes."""
        places: dict[Value, list[int]] = {}
        for place, reference in values.items():
            value = reference()
            if value is not None:
                places.setdefault(_root(value), []).append(place)
        for root, sharing in places.items():
            yield root, sharing, self._rebuilt.get(root, 0)

    def close(self) -> None:
        """Remember the sums, which stay when the backward pass has let everything go."""
        self._closed = self._sums()

    def kept(self) -> int:
        return (self._closed or self._sums())[0]

    def rebuilt(self) -> int:
        return (self._closed or self._sums())[1]

    def alive(self) -> dict[int, int]:
        """The bytes of every storage that is held now."""
        tensors = (value.tensor for value in (reference() for reference in self._held) if value is not None)
        storages = [
            tensor.untyped_storage()
            for tensor in tensors
            if tensor is not None and tensor.layout == torch.strided
        ]
        return {storage._cdata: storage.nbytes() for storage in storages}

    def _sums(self) -> tuple[int, int]:
        return sum(self.alive().values()), sum(list(self._rebuilt.values()))


def _root(value: Value) -> Value:
    """The rebuilt tensor whose memory a rebuilt view shows."""
    root = value
    while root.step is not None and root.step.view and root.step.inputs:
        root = root.step.inputs[0]
    return root if root.step is not None else value
