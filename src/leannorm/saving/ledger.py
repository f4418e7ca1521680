"""The bytes that are kept for the backward pass, and those that it will rebuild."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import torch

from leannorm.saving.shards import local_of, storage_of
from leannorm.saving.small import Kept


class Record(NamedTuple):
    """One tensor that the forward pass saved: what made it, its bytes, and whether it is rebuilt.

    `node`: the operator that made it, or "" if none was seen. `bytes`: of its storage, or 0 if an earlier
    record has counted that storage, so that records add up to `kept_bytes` and `rebuilt_bytes`. `why`: the
    reason why an operation's output is kept.
    """

    node: str
    shape: torch.Size
    dtype: torch.dtype
    bytes: int
    rebuilt: bool
    why: str = ""


Row = tuple[str, torch.Size, torch.dtype, int, bool, str]  # the fields of a Record


class Rows(Protocol):
    """What a pass saved: its bytes, and a row for each tensor."""

    @property
    def kept(self) -> int: ...

    @property
    def moved(self) -> int: ...

    @property
    def rebuilt(self) -> int: ...

    def rows(self) -> list[Row]: ...


class Ledger:
    """Counts storages, not tensors. It leaves out parameters, which exist without autograd, too."""

    def __init__(self) -> None:
        self._plain: list[Row] = []
        self._passes: list[Rows] = []

    def add(self, saved: Rows) -> None:
        """Add what a pass saves."""
        self._passes.append(saved)

    def close(self, kept: Iterable[Kept] = ()) -> None:
        """Add the tensors that a pass kept before it was recorded."""
        self._plain += _plain_rows(kept)

    def records(self) -> list[Record]:
        """One record for each saved tensor."""
        return [Record._make(row) for row in self.rows()]

    def all_bytes(self) -> int:
        """Bytes kept, and to be rebuilt."""
        return self.kept() + self.rebuilt()

    def kept(self) -> int:
        """Bytes kept for the backward pass."""
        return sum(one.kept for one in self._passes) + sum(row[3] for row in self._plain)

    def moved(self) -> int:
        """Bytes of these that `held="host"` has moved."""
        return sum(one.moved for one in self._passes)

    def rebuilt(self) -> int:
        """Bytes that the backward pass rebuilds."""
        return sum(one.rebuilt for one in self._passes)

    def rows(self) -> list[Row]:
        return [*self._plain, *itertools.chain(*(one.rows() for one in self._passes))]


def _plain_rows(kept: Iterable[Kept]) -> Iterator[Row]:
    seen = set[int]()
    for whole, _ in kept:
        local = local_of(whole)
        tensor = whole if local is None else local
        place, nbytes = storage_of(tensor)
        nbytes = 0 if place in seen else nbytes
        seen |= {place} if place else set()
        shape = torch.Size([tensor.numel()]) if tensor.is_nested else tensor.shape
        yield "", shape, tensor.dtype, nbytes, False, ""
