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
    moments of the forward pass that make it and that read it last; `until` before `made`: it never lies in
    memory there. `again`: its bytes while it lies in memory otherwise, as a rule `nbytes`. `fused`: each
    reader can compute it, and it lies in memory only if one of them asks for that. `whole`: making this value
    asks for it, of what it is made of. `spares`: bytes that its first reader needs less where it is made
    again.
    """

    nbytes: int | None
    seconds: float | None
    made_of: tuple[int, ...] = ()
    made: int = 0
    until: int = 0
    again: int = 0
    fused: bool = False
    whole: bool = True
    spares: int = 0


class Moment(NamedTuple):
    """A moment of the backward pass: the values that it `reads`, and whether it asks for them in memory
    (`whole`). `writes`: the bytes of a result that takes the place of a value of that size, read last."""

    reads: Collection[int]
    whole: bool = True
    writes: int = 0


class Step(NamedTuple):
    """A training step. `values` stand in the order of their making: each is made of earlier ones.

    `forward`: the number of its moments. `beside`: for every moment, of both passes, the bytes alive that are
    none of the values: gradients, temporaries. `stock`: the values that are kept without a plan; the others
    that can be are made again. `seconds`: the price of the step without a plan. `held`: bytes that are kept
    whatever is chosen, beside the values.
    """

    values: Sequence[Value]
    forward: int
    backward: Sequence[Moment]
    beside: Sequence[int]
    stock: frozenset[int]
    seconds: float
    held: int = 0


class Outcome(NamedTuple):
    """What a choice leads to. `kept`, `again`: the values that are needed and kept, or made again. `held`:
    bytes kept. `seconds`, `written`: the price of all that is made again, and its bytes in memory. `alive`:
    bytes at every moment."""

    kept: frozenset[int]
    again: frozenset[int]
    held: int
    seconds: float
    written: int
    alive: tuple[int, ...]

    @property
    def peak(self) -> int:
        """The most bytes alive at one moment."""
        return max(self.alive, default=0)


class Uses:
    """When the backward pass needs each value: its `first` and `last` moment (-1: never), and whether it is
    `written`, in memory while it is there."""

    def __init__(self, step: Step, again: Collection[int]) -> None:
        count, never = len(step.values), len(step.beside)
        self.first, self.last, self.written = [never] * count, [-1] * count, [False] * count
        for moment, (reads, whole, _) in enumerate(step.backward, step.forward):
            for i in reads:
                self._use(i, moment, moment, whole)
        for i in range(count - 1, -1, -1):
            if self.last[i] >= 0 and i in again:
                self.lead_on(step.values[i], i)

    def lead_on(self, value: Value, i: int) -> None:
        """What a value is made of is needed when it is made, or as long as its readers compute it."""
        self.written[i] |= not value.fused
        last = self.first[i] if self.written[i] else self.last[i]
        for source in value.made_of:
            self._use(source, self.first[i], last, value.whole)

    def _use(self, i: int, first: int, last: int, whole: bool) -> None:
        self.first[i] = min(self.first[i], first)
        self.last[i] = max(self.last[i], last)
        self.written[i] |= whole


def outcome(step: Step, again: Collection[int]) -> Outcome:
    """What happens if just these values are made again where they are needed, and all others kept.

    A value is made again in the backward pass at its first use, of itself or of what is made of it, and lives
    until its last. What is computed by each reader uses what it is made of at each.
    """
    uses, writes = Uses(step, again), [moment.writes for moment in step.backward]
    change = [0] * (len(step.beside) + 1)
    kept, made_again, held, seconds, written = [], [], step.held, 0.0, 0
    for i, value in enumerate(step.values):
        if value.made <= value.until:
            change[value.made] += value.again
            change[value.until + 1] -= value.again
        last = uses.last[i]
        if last < 0:
            continue
        if i in again:
            assert value.seconds is not None, f"value {i} cannot be made again"
            made_again.append(i)
            seconds += value.seconds
            start, size = uses.first[i], value.again if uses.written[i] else 0
            written += size
            change[start] -= value.spares
            change[start + 1] += value.spares
        else:
            assert value.nbytes is not None, f"value {i} cannot be kept"
            kept.append(i)
            held += value.nbytes
            start, size = max(value.made, value.until + 1), value.nbytes
        if size and writes[last - step.forward] == size:  # what is written there takes its place
            writes[last - step.forward] = 0
            last -= 1
        change[start] += size
        change[max(last + 1, start)] -= size
    alive = tuple(map(sum, zip(accumulate(change[:-1]), step.beside, strict=True)))
    return Outcome(frozenset(kept), frozenset(made_again), held, seconds, written, alive)


def of_stock(step: Step) -> Outcome:
    """What happens without a plan."""
    return outcome(step, frozenset(range(len(step.values))) - step.stock)
