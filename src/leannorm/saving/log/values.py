"""The entries of a log: operator calls, and the versions of each memory that they read and made.

A value is one version of one memory; a view of it is the same value, with other sizes and strides. A write,
also through `.data`, under `no_grad` or into a view, is a call that makes the next version.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from leannorm.saving.flags import Flags
from leannorm.saving.log.rules import Rule
from leannorm.saving.log.tensors import FEW, MANY, Geometry, sample_of, shown
from leannorm.saving.logged import HAS_GRADIENT, WANTS
from leannorm.saving.reasons import NO_CAUSE, Cause, Why

if TYPE_CHECKING:
    from leannorm.saving.log.log import Log
    from leannorm.saving.log.moved import Elsewhere

FREE, HELD, DROPPED = range(3)  # states of a value: nothing needs it; it is kept; it is rebuilt
COPIED = 1 << 14  # bytes: up to this size, a tensor from before the pass is copied, as it may be updated


@dataclass(slots=True, eq=False)
class Value:
    """One version of a memory."""

    memory: int
    call: int  # that made it; -1: it was there before, or was made unseen
    made: Geometry
    storage_bytes: int
    counter: Tensor
    version: int
    outlives: bool  # whether its memory existed before the pass, and stays when the value is dropped
    logged: bool  # whether a logged call made its memory
    on: Any = None  # the stream of a GPU that made it
    out: int = 0  # its index among the results of its call
    held: Tensor | None = None  # an alias of the memory, or a copy of it
    copied: bool = False  # whether `held` is a copy
    elsewhere: Elsewhere | None = None  # if a user's hooks keep it
    shown: Tensor | None = None  # the memory itself, if it was edited unseen by autograd
    rebuilt: Tensor | None = None
    rebuilt_on: Any = None
    sample: bytes | None = None
    state: int = FREE
    why: Why = Why.NONE  # why it is kept
    cause: Cause = NO_CAUSE  # what a walk found first of what it is made of
    marked: bool = False  # whether its counter moved once more after the call that wrote it
    lost: bool = False  # whether it was overwritten without a recorded call
    listed: bool = False  # whether it is in the list of saved values, at `number`
    number: int = 0
    parameter: bool = False  # whether it is a parameter's memory, which exists without autograd too
    weight: bool = False  # whether it is memory of a leaf that requires a gradient
    # if no node saved it and it is kept for another value: whether it is more than a copied part of
    # a concatenation, and that other value
    whole: bool = True
    instead: int = -1
    # nodes that saved it; those and the values made of it; how many of these are still to read it
    saves: int = 0
    refs: int = 0
    left: int = 0
    runs: int = 0  # of a dropped value: calls, and the most in a row
    sums: int = 0
    products: int = 0
    seen: int = 0  # the last walk that came here, and what it found
    can: bool = False
    gradient: int = 0  # `WANTS`: it gets a gradient; `HAS_GRADIENT`: that is added to an existing one

    @property
    def is_outside(self) -> bool:
        return self.outlives or self.call < 0

    @property
    def takes_memory(self) -> bool:
        """Whether keeping it takes memory. Gathered weights, which no logged call made, are filled again."""
        return not self.outlives and (self.call >= 0 or self.logged)

    def note_gradient(self, tensor: Tensor) -> None:
        if tensor.requires_grad:
            base = tensor if tensor._base is None else tensor._base
            self.gradient |= WANTS | (HAS_GRADIENT if base.is_leaf and base.grad is not None else 0)

    def is_marked(self, log: Log) -> bool:
        """Whether the counter moved once more because a user's function called `mark_dirty` after its own
        operators wrote."""
        if self.call < 0 or self.marked or self.counter._version != self.version + 1:
            return False
        call = log.calls[self.call]
        return call.before >= 0 and not call.grad_mode

    def is_unedited(self, log: Log) -> bool:
        return self.counter._version == self.version or self.is_marked(log)

    def as_made(self, tensor: Tensor) -> Tensor:
        """The whole value, of which a node may have saved a part. Samples are of the whole, as copies are."""
        is_there = self.made.extent <= tensor.untyped_storage().nbytes() and self.made.device.type == "cpu"
        return shown(tensor, self.made) if is_there else tensor

    def sampled(self) -> bytes | None:
        """A sample of what is kept."""
        assert self.held is not None
        return sample_of(self.as_made(self.held), MANY if self.is_outside and not self.copied else FEW)

    def address(self) -> int:
        """The address of the memory that `held` has, or that a user's hooks were given."""
        assert self.held is not None
        memory = self.held.untyped_storage()._cdata if self.elsewhere is None else self.elsewhere.memory.cdata
        return int(memory)

    def owners(self) -> int:
        """How many tensors have that memory, this value's own included."""
        if self.elsewhere is not None:
            return 1 + (not self.elsewhere.memory.expired())
        assert self.held is not None
        storage = self.held.untyped_storage()
        return torch._C._storage_Use_Count(storage._cdata) - 1  # without the object above


class Read(NamedTuple):
    """A tensor among a call's arguments. `place`: its index if the argument is a list, else -1. `shape`: None
    if it is as the value was made. `wants`: whether it requires a gradient."""

    at: int
    place: int
    value: int
    shape: Geometry | None
    wants: bool


@dataclass(slots=True, eq=False)
class Call:
    """One call of an operator."""

    rule: Rule
    args: list[Any]  # with None for each tensor
    positional: int
    named: tuple[str, ...]
    flags: Flags  # those that were set when it ran
    in_checkpoint: bool  # whether a checkpoint's hooks save what it reads and makes
    usable: bool  # whether it may be made again
    grad_mode: bool = field(default_factory=torch.is_grad_enabled)
    by_result: bool = False  # whether its first result is computed from others of its results
    reads: list[Read] = field(default_factory=list)
    outs: list[int] = field(default_factory=list)  # values
    before: int = -1  # the value that its result overwrites
    kind: Any = None  # the key of its trials, once that is computed

    @property
    def results_read(self) -> list[int]:
        """The call's own results that are read when the call is made again."""
        return self.rule.results if self.by_result else []

    def sizes(self, log: Log, at: int) -> tuple[int, ...]:
        """The sizes of the tensor that is this argument; empty if it is not a tensor."""
        return next((log.shape_of(read).sizes for read in self.reads if read.at == at), ())


class Memory(StorageWeakRef):
    """The storage of tensors. The weak reference keeps its address from being used again."""

    def __init__(self, storage: torch.UntypedStorage, current: int) -> None:
        super().__init__(storage)
        self.current = current  # its value now
        self.sent = False  # whether messages arrive here; then nothing is rebuilt from it
        self.died = -1  # the first call that began after it was freed, if a plan may be made

    def storage(self) -> torch.UntypedStorage | None:
        made: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.cdata)
        return made
