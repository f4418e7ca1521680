"""The bytes that are held for the backward pass, and those that it will rebuild."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from leannorm.autograd.nodes import NODES
from leannorm.saving.evidence import is_parameter
from leannorm.saving.shards import local_of, nbytes_of, storage_of
from leannorm.saving.small import Kept
from leannorm.saving.steps import root_of
from leannorm.saving.values import COPIED_PART, Value


class Record(NamedTuple):
    """One tensor that the forward pass saved: the node that made it, its bytes, and whether it is rebuilt.

    `bytes`: of its storage, or 0 if an earlier record has counted that storage; so records add up to
    `kept_bytes` and `rebuilt_bytes`. `seconds`: of one rebuild, measured at the first step of its kind; None
    on CPU tensors, whose operators are recorded. `why`: of an operation's output that is held, the reason.
    """

    node: str
    shape: torch.Size
    dtype: torch.dtype
    bytes: int
    rebuilt: bool
    seconds: float | None
    why: str = ""


Row = tuple[str, torch.Size, torch.dtype, int, bool, float | None, str]  # the fields of a Record


_MANY = 4096  # values of a pass


class Rows(Protocol):
    """What a recorded pass saved: its bytes, and a row for each tensor."""

    @property
    def kept(self) -> int: ...

    @property
    def rebuilt(self) -> int: ...

    def rows(self) -> list[Row]: ...


class Ledger:
    """Counts storages, not tensors. Parameters are not counted: they exist without autograd, too."""

    def __init__(self) -> None:
        self.references: list[weakref.ref[Value]] = []
        self._most = _MANY
        self._dropped = 0  # references of values that are gone
        self._closed: list[Any] | None = None  # the fields of all rows: Python has fewer objects to collect
        self._plain: list[Row] = []
        self._recorded: list[Rows] = []

    def holds(self, value: Value, tensor: Tensor) -> None:
        """Record a held tensor. Its storage is read later, when the bytes are asked for."""
        if not is_parameter(tensor):
            self._note(value)
            if value.step is not None:
                value.frees = nbytes_of(tensor)  # moved elsewhere
        self._closed = None

    def rebuilds(self, value: Value, tensor: Tensor, nbytes: int | None = None) -> None:
        """Record that `value` (of `tensor`) is rebuilt; it may have been held before."""
        root = _root(value)
        if nbytes is None:  # a view would hold its whole storage
            nbytes = storage_of(tensor)[1]
            for part in () if root.step is None else root.step.inputs:
                alone = part.users == min(root.users, 1)
                if part.name == COPIED_PART and alone and part.tensor is not None:
                    self.holds(part, part.tensor)  # copied for this concatenation
                    nbytes -= part.tensor.nbytes
        root.frees = nbytes
        self._note(value)
        self._closed = None

    def _note(self, value: Value) -> None:
        self.references.append(weakref.ref(value))
        if len(self.references) > self._most:
            self._most = self.drop_dead()

    def drop_dead(self) -> int:
        """Forget values that are gone, of steps that are over; returns up to how many the rest may grow. Also
        called from C++."""
        before = len(self.references)
        self.references[:] = [reference for reference in self.references if reference() is not None]
        self._dropped += before - len(self.references)
        return max(_MANY, 2 * len(self.references))

    def close(self, kept: Iterable[Kept] = ()) -> None:
        """Store the bytes of each value, to be read also after the backward pass has freed the tensors.

        `kept` are tensors of a small pass, which were held without a value.
        """
        self._plain = [*self._plain, *_plain_rows(kept)]
        made = None if NODES is None else NODES.rows(self.references)
        made = [field for row in self._rows() for field in row] if made is None else made
        self._closed = [*itertools.chain(*self._plain), *made]

    def add(self, recorded: Rows) -> None:
        """Add what a recorded pass saves."""
        self._recorded.append(recorded)

    def is_mostly_gone(self) -> bool:
        """Are nearly all values gone? In a forward pass they live as long as its result does, but for what a
        part of it has dropped, such as a derivative within it."""
        alive = sum(1 for _ in self.values())
        return alive < (len(self.references) + self._dropped) / 8

    def records(self) -> list[Record]:
        """One record for each saved tensor."""
        return [Record._make(row) for row in self.rows()]

    def all_bytes(self) -> int:
        """Bytes held, and to be rebuilt."""
        return self.kept() + self.rebuilt()

    def kept(self) -> int:
        """Bytes held for the backward pass."""
        recorded = sum(one.kept for one in self._recorded)
        return recorded + sum(row[3] for row in self._unrecorded() if not row[4])

    def rebuilt(self) -> int:
        """Bytes that the backward pass rebuilds."""
        recorded = sum(one.rebuilt for one in self._recorded)
        return recorded + sum(row[3] for row in self._unrecorded() if row[4])

    def rows(self) -> list[Row]:
        return [*self._unrecorded(), *itertools.chain(*(one.rows() for one in self._recorded))]

    def _unrecorded(self) -> list[Row]:
        if self._closed is None:
            return [*self._plain, *self._rows()]
        return list(zip(*[iter(self._closed)] * len(Record._fields), strict=True))

    def alive(self) -> dict[int, int]:
        """The bytes of every storage that is held now, by storage."""
        tensors = (value.tensor for value in self.values())
        return dict(storage_of(t) for t in tensors if t is not None and t.layout == torch.strided)

    def values(self) -> Iterator[Value]:
        """The values that are alive; one that was held first and is rebuilt now comes twice."""
        for reference in self.references:
            value = reference()
            if value is not None:
                yield value

    def _rows(self) -> Iterator[Row]:
        """Every value that is alive; the first of each storage has that storage's bytes, the others 0.
        The C++ nodes do the same (`rows` of csrc/nodes/ledger.h)."""
        seen, roots, storages = set[Value](), set[Value](), set[int]()
        for value in self.values():
            tensor = value.tensor if value.step is None else value.memory
            if tensor is not None:
                place, nbytes = storage_of(tensor)
                nbytes = 0 if place in storages else nbytes
                storages |= {place} if place else set()
                yield value.name, tensor.shape, tensor.dtype, nbytes, False, None, value.why
            elif value not in seen:  # a value that was held first is listed twice
                root = _root(value)
                nbytes = 0 if root in roots else root.frees
                seen.add(value)
                roots.add(root)
                seconds = None if value.is_held else value.seconds
                yield value.name, value.shape, value.dtype, nbytes, not value.is_held, seconds, value.why


def _plain_rows(kept: Iterable[Kept]) -> Iterator[Row]:
    seen = set[int]()
    for whole, _ in kept:
        local = local_of(whole)
        tensor = whole if local is None else local
        place, nbytes = storage_of(tensor)
        nbytes = 0 if place in seen else nbytes
        seen |= {place} if place else set()
        shape = torch.Size([tensor.numel()]) if tensor.is_nested else tensor.shape
        yield "", shape, tensor.dtype, nbytes, False, None, ""


def _root(value: Value) -> Value:
    """The rebuilt value whose storage a rebuilt view shares."""
    root = root_of(value)
    return root if root.step is not None else value


def held_by(tensor: Tensor) -> int:
    """Elements of the memory that the tensor would hold: a view, all of its base's."""
    whole = tensor._base is None
    return tensor.numel() if whole else tensor.untyped_storage().nbytes() // tensor.itemsize
