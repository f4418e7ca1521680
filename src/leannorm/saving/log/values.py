"""One forward pass as a log: every operator call, and every version of every memory that they read and made.

A value is one version of one memory; a view of it is the same value, seen by other sizes and strides. A
write, also one through `.data`, under `no_grad` or into a view, is a call that makes the next version.
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

FREE, HELD, DROPPED = range(3)  # a value: nobody needs it; it is held; it is made again
COPIED = 1 << 14  # bytes: a smaller tensor that was there before is copied, as an optimizer may change it


class Why(IntEnum):
    """Why a value is held; as in log.h."""

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


class Cause(NamedTuple):
    """Why a value is held, or is not at hand, and the operator to which that applies."""

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
        "out",
        "parameter",
        "products",
        "rebuilt",
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
        self.held: Tensor | None = None  # an alias of the memory, or a copy of it
        self.elsewhere: Any = None  # who brings it back, where a user's hooks hold it
        self.shown: Tensor | None = None  # the memory itself, where it was edited unseen by autograd
        self.rebuilt: Tensor | None = None
        self.sample: bytes | None = None
        self.state, self.cause = FREE, Cause()
        self.why: int = Why.NONE
        self.copied = False  # is `held` a copy?
        self.marked = False  # its counter moved once more behind the call that wrote it
        self.lost = False  # it was overwritten past the dispatcher
        self.listed, self.number = False, 0  # among what the pass has saved, as its
        self.parameter = False  # memory of a parameter, which is there without autograd, too
        self.whole = (
            True  # of what nobody saved and is held for another: not a copied part of a concatenation
        )
        self.instead = -1  # that other
        self.saves = self.refs = self.left = (
            0  # nodes that saved it; these and values made of it; those to come
        )
        self.runs = self.sums = self.products = 0  # of a dropped value: calls, and the most in a row
        self.seen, self.can = 0, False  # the last walk that came here, and what it found

    def is_marked(self, log: Log) -> bool:
        """A function that says that it worked in place (mark_dirty) moves the counter once more behind its
        own operators."""
        if self.call < 0 or self.marked or self.counter._version != self.version + 1:
            return False
        call = log.calls[self.call]
        return call.before >= 0 and not call.grad_mode

    def is_unedited(self, log: Log) -> bool:
        return self.counter._version == self.version or self.is_marked(log)


class Read(NamedTuple):
    """A tensor among a call's arguments: `place` in a list, -1 without one. `shape` is None where it is as
    the value was made."""

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

    flags: Flags  # under which it ran

    def __init__(self, rule: Rule, args: list[Any], positional: int, named: tuple[str, ...]) -> None:
        self.rule, self.args, self.positional, self.named = rule, args, positional, named
        self.reads: list[Read] = []
        self.outs: list[int] = []  # values
        self.writing: list[int] = []  # memories
        self.before = -1  # the version that its result is written over
        self.sends = rule.sends  # to other ranks
        self.in_checkpoint = False  # do a checkpoint's hooks save what it reads and makes?
        self.kind: Any = None  # of its trials, once it was asked for
        self.grad_mode, self.usable, self.by_result = torch.is_grad_enabled(), True, False

    def sizes(self, log: Log, at: int) -> tuple[int, ...]:
        """Of the tensor that is this argument; none if it is no tensor."""
        return next((log.shape_of(read).sizes for read in self.reads if read.at == at), ())


class Memory:
    __slots__ = ("current", "sent", "weak")

    def __init__(self, weak: int, current: int) -> None:
        self.weak, self.current = weak, current  # the storage, whose address does not come again; a value
        self.sent = False  # do messages come here? Then nothing is made of it again

    @property
    def is_gone(self) -> bool:
        return bool(torch.UntypedStorage._expired(self.weak))

    def storage(self) -> torch.UntypedStorage | None:
        made: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.weak)
        return made


class Policy(NamedTuple):
    """In a row: `sums`, `row` products; `runs`: calls behind one value, or where that was planned the longest
    chain of them."""

    products: bool = False
    everything: bool = False
    sums: int = 2
    runs: int = 32
    row: int = 2
    by_plan: bool = False
    smallest: int = 1  # elements; a smaller tensor is held


def results_read(call: Call) -> Iterable[int]:
    """The results that the call is made again from."""
    if not call.by_result:
        return ()
    return (1, 2) if call.rule.by_statistics else call.rule.results
