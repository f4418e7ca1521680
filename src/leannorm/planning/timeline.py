"""One training step as the planner sees it: integers and seconds, nothing of torch.

A step is a sequence of moments: `forward` of them, then those of the backward pass. What the backward pass
reads of the forward pass are values: each is kept until its last reader, or made again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import NamedTuple


class Value(NamedTuple):
    """What the backward pass may read.

    `nbytes`: what keeping it takes, 0 if it is there anyway; None: it cannot be kept. `seconds`: the price of
    making it again, once; None: it cannot be made again. `made_of`: values, by index. `made`, `until`: the
    moments of the forward pass that make it and that read it last; `until` before `made`: the forward pass
    itself has it nowhere in memory. `again`: its bytes while it is there again, as a rule `nbytes`; 0: it
    never lies in memory then, since each reader computes it from what it is made of.
    """

    nbytes: int | None
    seconds: float | None
    made_of: tuple[int, ...] = ()
    made: int = 0
    until: int = 0
    again: int = 0


class Step(NamedTuple):
    """A training step. `values` stand in the order of their making: each is made of earlier ones.

    `reads`: for each moment of the backward pass the values that it reads. `beside`: for every moment, the
    bytes alive that are none of the values: gradients, temporaries. `stock`: the values that are kept without
    a plan; the others that can be are made again. `seconds`: the price of the step without a plan.
    """

    values: Sequence[Value]
    forward: int
    reads: Sequence[Collection[int]]
    beside: Sequence[int]
    stock: frozenset[int]
    seconds: float


class Outcome(NamedTuple):
    """What a choice leads to. `kept`, `again`: the values that are needed and kept, or made again. `held`:
    bytes kept. `seconds`: the price of all that is made again. `alive`: bytes at every moment."""

    kept: frozenset[int]
    again: frozenset[int]
    held: int
    seconds: float
    alive: tuple[int, ...]

    @property
    def peak(self) -> int:
        """The most bytes alive at one moment."""
        return max(self.alive, default=0)


def lifetimes(step: Step, again: Collection[int]) -> tuple[list[int], list[int]]:
    """For each value the first and the last moment of the backward pass that needs it (last -1: none)."""
    never = len(step.beside)
    first, last = [never] * len(step.values), [-1] * len(step.values)
    for moment, read in enumerate(step.reads, step.forward):
        for i in read:
            first[i] = min(first[i], moment)
            last[i] = moment
    for i in range(len(step.values) - 1, -1, -1):
        if last[i] >= 0 and i in again:
            lead_on(step.values[i], i, first, last)
    return first, last


def lead_on(value: Value, i: int, first: list[int], last: list[int]) -> None:
    """What a value is made of is needed when it is made, or as long as its readers compute it."""
    used_until = first[i] if value.again else last[i]
    for source in value.made_of:
        first[source] = min(first[source], first[i])
        last[source] = max(last[source], used_until)


def outcome(step: Step, again: Collection[int]) -> Outcome:
    """What happens if just these values are made again where they are needed, and all others kept.

    A value is made again in the backward pass at its first use, of itself or of what is made of it, and lives
    until its last. What is computed by each reader (`again` of 0 bytes) uses what it is made of at each.
    """
    first, last = lifetimes(step, again)
    change = [0] * (len(step.beside) + 1)
    kept, made_again, held, seconds = [], [], 0, 0.0
    for i, value in enumerate(step.values):
        if value.made <= value.until:
            change[value.made] += value.again
            change[value.until + 1] -= value.again
        if last[i] < 0:
            continue
        if i in again:
            assert value.seconds is not None, f"value {i} cannot be made again"
            made_again.append(i)
            seconds += value.seconds
            change[first[i]] += value.again
            change[last[i] + 1] -= value.again
        else:
            assert value.nbytes is not None, f"value {i} cannot be kept"
            kept.append(i)
            held += value.nbytes
            change[max(value.made, value.until + 1) if value.again else value.made] += value.nbytes
            change[last[i] + 1] -= value.nbytes
    alive = tuple(map(sum, zip(accumulate(change[:-1]), step.beside, strict=True)))
    return Outcome(frozenset(kept), frozenset(made_again), held, seconds, alive)


def of_stock(step: Step) -> Outcome:
    """What happens without a plan."""
    return outcome(step, frozenset(range(len(step.values))) - step.stock)
