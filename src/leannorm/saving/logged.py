"""What a log knows of a pass, in integers: its calls and values, of which a timeline is made."""

from __future__ import annotations

from typing import NamedTuple

WANTS, HAS_GRADIENT = 1, 2  # as `Gradient` in values.h
ALIVE, UNKNOWN = -1, -2  # memory that the program never freed, or of which that is unknown; as in plan.h


class Read(NamedTuple):
    """A tensor that a call reads: its bytes as read, whether it requires a gradient, and its argument."""

    value: int
    nbytes: int
    wants: bool
    at: int


class Call(NamedTuple):
    """One call of an operator. `operations` and `groups` are 0 unless it is a product or a convolution."""

    name: str
    operations: int
    groups: int
    grad_mode: bool
    reads: list[Read]
    outs: list[int]


class Value(NamedTuple):
    """One version of a memory. `storage`: the memory's bytes; `coded`: those that keeping it takes.
    `gradient`: bits of values.h. `needed`: whether the backward pass reads it or rebuilds others from it.
    `makes`: whether it is rebuilt, or could be if others were kept. `held`: whether this pass does not
    rebuild it. `counts`: whether its bytes count as kept or rebuilt. `cause`: why it is kept. `in_rows`:
    whether its gradient reads it some rows at a time. `waits`: whether nodes may get a stand-in for it.
    `follows`: the value that is rebuilt by the same call, and of which this one is made; -1: none."""

    memory: int
    call: int
    storage: int
    coded: int
    nbytes: int
    itemsize: int
    is_floating: bool
    gradient: int
    needed: bool
    makes: bool
    held: bool
    counts: bool
    copied: bool
    cause: tuple[int, str]
    inputs: list[int]
    in_rows: bool = False
    waits: bool = False
    follows: int = -1
