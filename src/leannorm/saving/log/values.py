"""The entries of a log: operator calls, and the versions of each memory that they read and made.

A value is one version of one memory; a view of it is the same value, with other sizes and strides. A write,
also through `.data`, under `no_grad` or into a view, is a call that makes the next version.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from leannorm.saving.flags import Flags
from leannorm.saving.log.rules import Rule
from leannorm.saving.log.tensors import Geometry

if TYPE_CHECKING:
    from leannorm.saving.log.log import Log

FREE, HELD, DROPPED = range(3)  # states of a value: nothing needs it; it is kept; it is rebuilt
COPIED = 1 << 14  # bytes: up to this size, a tensor from before the pass is copied, as it may be updated


class Why(IntEnum):
    """Why a value is kept; as in log.h."""

    NONE = 0
    NEVER = 1
    NOT_REPEATED = 2
    NOT_AT_HAND = 3
    TOO_DEEP = 4
    OTHER_BITS = 5
    EDITED = 6
    SMALLER = 7
    UNKNOWN = 8
    FLAGS = 9
    PLANNED = 10
    COLLECTIVE = 11
    FREED = 12
    CHECKPOINTED = 13
    ALONE = 14
    UNTRIED = 16
    TIMED = 17


class Cause(NamedTuple):
    """Why a value is kept or cannot be used for a rebuild, and the operator to which that applies."""

    why: int = Why.NONE
    of: str = ""


class Value:
    __slots__ = (
        "call",
        "can",
        "cause",
        "copied",
        "counter",
        "elsewhere",
        "held",
        "instead",
        "left",
        "listed",
        "lost",
        "made",
        "marked",
        "memory",
        "number",
        "on",
        "out",
        "parameter",
        "products",
        "rebuilt",
        "rebuilt_on",
        "refs",
        "runs",
        "sample",
        "saves",
        "seen",
        "shown",
        "state",
        "storage_bytes",
        "sums",
        "version",
        "whole",
        "why",
    )  # fmt: skip

    def __init__(self, memory: int, call: int, made: Geometry, nbytes: int, counter: Tensor) -> None:
        self.memory, self.call, self.out, self.made, self.storage_bytes = memory, call, 0, made, nbytes
        self.counter, self.version = counter, counter._version
        self.on: Any = None  # the stream of a GPU that made it
        self.rebuilt_on: Any = None
        self.held: Tensor | None = None  # an alias of the memory, or a copy of it
        self.elsewhere: Any = None  # an object that gets it back, if a user's hooks keep it
        self.shown: Tensor | None = None  # the memory itself, if it was edited unseen by autograd
        self.rebuilt: Tensor | None = None
        self.sample: bytes | None = None
        self.state, self.cause = FREE, Cause()
        self.why: int = Why.NONE
        self.copied = False  # whether `held` is a copy
        self.marked = False  # whether its counter moved once more after the call that wrote it
        self.lost = False  # whether it was overwritten without a recorded call
        self.listed, self.number = False, 0  # whether it is in the list of saved values, and its index there
        self.parameter = False  # whether it is a parameter's memory, which exists without autograd too
        # if no node saved it and it is kept for another value: whether it is more than a copied part of
        # a concatenation, and that other value
        self.whole, self.instead = True, -1
        # nodes that saved it; those and the values made of it; how many of these are still to read it
        self.saves = self.refs = self.left = 0
        self.runs = self.sums = self.products = 0  # of a dropped value: calls, and the most in a row
        self.seen, self.can = 0, False  # the last walk that came here, and what it found

    def is_marked(self, log: Log) -> bool:
        """Whether the counter moved once more because a user's function called `mark_dirty` after its own
        operators wrote."""
        if self.call < 0 or self.marked or self.counter._version != self.version + 1:
            return False
        call = log.calls[self.call]
        return call.before >= 0 and not call.grad_mode

    def is_unedited(self, log: Log) -> bool:
        return self.counter._version == self.version or self.is_marked(log)


class Read(NamedTuple):
    """A tensor among a call's arguments. `place`: its index if the argument is a list, else -1. `shape`: None
    if it is as the value was made."""

    at: int
    place: int
    value: int
    shape: Geometry | None


class Call:
    __slots__ = (
        "args",
        "before", "by_result",
        "flags",
        "grad_mode",
        "in_checkpoint",
        "kind",
        "named",
        "outs",
        "positional",
        "reads",
        "rule",
        "sends",
        "usable",
        "writing",
    )  # fmt: skip

    flags: Flags  # those that were set when it ran

    def __init__(self, rule: Rule, args: list[Any], positional: int, named: tuple[str, ...]) -> None:
        self.rule, self.args, self.positional, self.named = rule, args, positional, named
        self.reads: list[Read] = []
        self.outs: list[int] = []  # values
        self.writing: list[int] = []  # memories
        self.before = -1  # the value that its result overwrites
        self.sends = rule.sends  # whether it communicates with other ranks
        self.in_checkpoint = False  # whether a checkpoint's hooks save what it reads and makes
        self.kind: Any = None  # the key of its trials, once that is computed
        self.grad_mode, self.usable, self.by_result = torch.is_grad_enabled(), True, False

    def sizes(self, log: Log, at: int) -> tuple[int, ...]:
        """The sizes of the tensor that is this argument; empty if it is not a tensor."""
        return next((log.shape_of(read).sizes for read in self.reads if read.at == at), ())


class Memory:
    __slots__ = ("current", "sent", "weak")

    def __init__(self, weak: int, current: int) -> None:
        # a weak reference to the storage, which keeps its address from being used again; and its value now
        self.weak, self.current = weak, current
        self.sent = False  # whether messages arrive here; then nothing is rebuilt from it

    @property
    def is_gone(self) -> bool:
        return bool(torch.UntypedStorage._expired(self.weak))

    def storage(self) -> torch.UntypedStorage | None:
        made: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.weak)
        return made


class Policy(NamedTuple):
    """What a rebuild may call. `sums` and `row`: the most sums and products in a row. `runs`: the most calls
    for one value; with a plan, the longest chain of them."""

    products: bool = False
    everything: bool = False
    sums: int = 2
    runs: int = 32
    row: int = 2
    by_plan: bool = False
    smallest: int = 1  # elements; a smaller tensor is kept


def results_read(call: Call) -> Iterable[int]:
    """The call's own results that are read when the call is made again."""
    if not call.by_result:
        return ()
    return (1, 2) if call.rule.by_statistics else call.rule.results
