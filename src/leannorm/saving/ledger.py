"""The bytes that are kept for the backward pass, and those that it will rebuild."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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


class Saved(Protocol):
    """What a pass saved: its bytes, and a record for each tensor."""

    @property
    def kept(self) -> int: ...

    @property
    def moved(self) -> int: ...

    @property
    def rebuilt(self) -> int: ...

    def records(self) -> list[Record]: ...


class AllKept:
    """What a pass saved, all of it counted as kept."""

    moved = rebuilt = 0

    def __init__(self, records: Callable[[], list[Record]], kept: int) -> None:
        self._records, self.kept = records, kept

    def records(self) -> list[Record]:
        return [record._replace(rebuilt=False, why="") for record in self._records()]


class Ledger:
    """What all passes saved. Counts storages, not tensors. It leaves out parameters, which exist without
    autograd, too."""

    def __init__(self) -> None:
        self._passes: list[Saved] = []

    def add(self, saved: Saved) -> None:
        """Add what a pass saves."""
        self._passes.append(saved)

    def add_first(self, kept: Iterable[Kept]) -> None:
        """Add the tensors that a pass kept before it was recorded."""
        records = list(_records_of(kept))
        self._passes.insert(0, AllKept(lambda: records, sum(record.bytes for record in records)))

    def records(self) -> list[Record]:
        """One record for each saved tensor."""
        return [record for one in self._passes for record in one.records()]

    def largest(self, count: int) -> list[tuple[int, str, torch.Size]]:
        """What takes the most of what is kept: bytes, the operator or "", and the shape of each tensor."""
        kept = Counter[tuple[str, torch.Size]]()
        for one in self.records():
            if not one.rebuilt:
                kept[one.node, one.shape] += one.bytes
        return [(nbytes, *of) for of, nbytes in kept.most_common(count) if nbytes]

    @property
    def kept(self) -> int:
        """Bytes kept for the backward pass."""
        return sum(one.kept for one in self._passes)

    @property
    def moved(self) -> int:
        """Bytes of these that `held="host"` has moved."""
        return sum(one.moved for one in self._passes)

    @property
    def rebuilt(self) -> int:
        """Bytes that the backward pass rebuilds."""
        return sum(one.rebuilt for one in self._passes)


def _records_of(kept: Iterable[Kept]) -> Iterator[Record]:
    seen = set[int]()
    for whole, _ in kept:
        local = local_of(whole)
        tensor = whole if local is None else local
        place, nbytes = storage_of(tensor)
        nbytes = 0 if place in seen else nbytes
        seen |= {place} if place else set()
        shape = torch.Size([tensor.numel()]) if tensor.is_nested else tensor.shape
        yield Record("", shape, tensor.dtype, nbytes, False)
