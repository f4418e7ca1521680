"""What is held for the backward pass and what will be rebuilt, in bytes, while both come and go."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from leannorm.saving.values import Value


class Record(NamedTuple):
    """One tensor that the forward pass saved: what made it, what it weighs, and what became of it.

    `bytes`: of its storage, where no record before has counted that; so records add up to `kept_bytes` and
    `rebuilt_bytes`. `seconds`: of one rebuild, measured when a step of its kind was first met.
    """

    node: str
    shape: torch.Size
    dtype: torch.dtype
    bytes: int
    rebuilt: bool
    seconds: float | None


class _Entry(NamedTuple):
    value: weakref.ref[Value]
    node: str
    shape: torch.Size
    dtype: torch.dtype
    seconds: float | None  # None: it is held


class Ledger:
    """Counts storages, not tensors; parameters, which are there anyway, are not counted as held."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._rebuilt: weakref.WeakKeyDictionary[Value, int] = weakref.WeakKeyDictionary()
        self._closed: list[tuple[_Entry, int]] | None = None

    def holds(self, value: Value, tensor: Tensor, node: str = "") -> None:
        """Storages are looked at when somebody asks: all at one time, and out of the forward pass."""
        base = tensor if tensor._base is None else tensor._base
        if not (base.requires_grad and base.is_leaf):  # no parameter
            self._enter(value, tensor, node, None)

    def rebuilds(
        self, value: Value, tensor: Tensor, node: str, seconds: float = 0.0, nbytes: int | None = None
    ) -> None:
        if nbytes is None:  # a view would hold the whole
            nbytes = tensor.untyped_storage().nbytes() if tensor.layout == torch.strided else tensor.nbytes
        self._rebuilt[_root(value)] = nbytes
        self._enter(value, tensor, node, seconds)

    def _enter(self, value: Value, tensor: Tensor, node: str, seconds: float | None) -> None:
        self._entries.append(_Entry(weakref.ref(value), node, tensor.shape, tensor.dtype, seconds))
        self._closed = None

    def parts(self) -> Iterator[tuple[Value, list[int], int, float]]:
        """The rebuilt values by the memory that they share: what it belongs to, their places among the
        tensors that were packed, its bytes, and the seconds of the slowest of them."""
        places: dict[Value, dict[int, float]] = {}
        for entry in self._entries:
            value = entry.value()
            if value is not None and value.place >= 0 and entry.seconds is not None:
                places.setdefault(_root(value), {})[value.place] = entry.seconds
        for root, sharing in places.items():
            yield root, sorted(sharing), self._rebuilt.get(root, 0), max(sharing.values())

    def close(self) -> None:
        """Remember what each entry weighs, which stays when the backward pass has let everything go."""
        self._closed = list(self._weighed())

    def records(self) -> list[Record]:
        return [
            Record(entry.node, entry.shape, entry.dtype, nbytes, entry.seconds is not None, entry.seconds)
            for entry, nbytes in self._look()
        ]

    def kept(self) -> int:
        return sum(nbytes for entry, nbytes in self._look() if entry.seconds is None)

    def rebuilt(self) -> int:
        return sum(nbytes for entry, nbytes in self._look() if entry.seconds is not None)

    def _look(self) -> list[tuple[_Entry, int]]:
        return list(self._weighed()) if self._closed is None else self._closed

    def alive(self) -> dict[int, int]:
        """The bytes of every storage that is held now."""
        return {
            storage._cdata: storage.nbytes()
            for entry in self._entries
            for storage in [_storage(entry)]
            if storage is not None
        }

    def _weighed(self) -> Iterator[tuple[_Entry, int]]:
        """Every entry that is alive, with the bytes of its storage if it is the first one of that storage."""
        seen: set[object] = set()
        for entry in self._entries:
            value = entry.value()
            if value is None:
                continue
            if entry.seconds is None:
                storage = _storage(entry)
                if storage is None:  # it has become one that is rebuilt
                    continue
                key: object = storage._cdata
                nbytes = 0 if key in seen else storage.nbytes()
            else:
                key = root = _root(value)
                nbytes = 0 if key in seen else self._rebuilt.get(root, 0)
            seen.add(key)
            yield entry, nbytes


def _storage(entry: _Entry) -> torch.UntypedStorage | None:
    value = entry.value()
    if value is None or entry.seconds is not None:
        return None
    tensor = value.memory if value.tensor is None else value.tensor
    if tensor is None or tensor.layout != torch.strided:
        return None
    return tensor.untyped_storage()


def _root(value: Value) -> Value:
    """The rebuilt tensor whose memory a rebuilt view shows."""
    root = value
    while root.step is not None and root.step.view and root.step.inputs:
        root = root.step.inputs[0]
    return root if root.step is not None else value
