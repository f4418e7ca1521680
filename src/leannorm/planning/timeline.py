"""One training step as the planner sees it, in integers and seconds, without torch.

A step is a sequence of moments: first those of the forward pass, then those of the backward pass. Values are
what the backward pass reads from the forward pass. Each is kept until its last reader, or made again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from leannorm.planning.moves import Away, Moving


class Value(NamedTuple):
    """What the backward pass may read.

    - `nbytes`: the bytes that keeping it takes, 0 if it is in memory anyway; None if it cannot be kept.
    - `seconds`: the price of making it again, once; None if it cannot be made again.
    - `made_of`: the values that it is made of, by index.
    - `made`, `until`: the moments of the forward pass that make it, and that read it last. If `until` is
      before `made`, it is never in memory there.
    - `again`: its bytes while it is in memory without being kept, as a rule `nbytes`.
    - `fused`: whether each reader can compute it, so that it is in memory only if a reader needs that.
    - `whole`: whether making it needs the values that it is made of in memory.
    - `spares`: the bytes that its last reader needs less if the value is made again for it alone.
    - `ready`: the moment after which it may be moved to the host; -1 if it may not.
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
    ready: int = -1


class Moment(NamedTuple):
    """A moment of the backward pass.

    `reads` has the values that it reads, and `whole` says whether it needs them in memory. `writes` is the
    size of a result that overwrites a value of that size, if this moment is the last to read that value.
    """

    reads: Collection[int]
    whole: bool = True
    writes: int = 0


@dataclass(frozen=True, eq=False)
class Step:
    """A training step.

    - `values`: in the order in which they are made: each is made of earlier ones.
    - `forward`: the number of moments of the forward pass.
    - `beside`: for every moment of both passes, the bytes in use other than values: gradients, temporaries.
    - `stock`: the values that are kept without a plan. The others are made again.
    - `seconds`: the price of the step without a plan.
    - `held`: the bytes that are kept whatever is chosen, in addition to the values.
    - `taken`: the seconds of each moment, and `link`: bytes per second to the host; only if values may move.
    """

    values: Sequence[Value]
    forward: int
    backward: Sequence[Moment]
    beside: Sequence[int]
    stock: frozenset[int]
    seconds: float
    held: int = 0
    taken: Sequence[float] = ()
    link: float = 0.0

    @cached_property
    def read(self) -> tuple[list[int], list[int], list[bool]]:
        """For each value, the first and the last moment that reads it, and whether one needs it in memory."""
        count, never = len(self.values), len(self.beside)
        first, last, whole = [never] * count, [-1] * count, [False] * count
        for moment, (reads, in_memory, _) in enumerate(self.backward, self.forward):
            for i in reads:
                first[i], last[i] = min(first[i], moment), moment
                whole[i] |= in_memory
        return first, last, whole

    @cached_property
    def unkept(self) -> frozenset[int]:
        """The values that cannot be kept, and are made again wherever they are needed."""
        return frozenset(i for i, value in enumerate(self.values) if value.nbytes is None)

    @cached_property
    def free(self) -> list[int]:
        """The values that could be kept, and could also be made again from values that could be either."""
        possible: list[bool] = []
        for value in self.values:
            made_of_possible = all(possible[s] or self.values[s].nbytes is not None for s in value.made_of)
            possible.append(value.seconds is not None and made_of_possible)
        return [i for i, value in enumerate(self.values) if possible[i] and value.nbytes is not None]

    @cached_property
    def change(self) -> list[int]:
        """For each moment, how many bytes of values begin to be in use in the forward pass, less those that
        end there."""
        change = [0] * (len(self.beside) + 1)
        for value in self.values:
            if value.made <= value.until:
                change[value.made] += value.again
                change[value.until + 1] -= value.again
        return change


class Outcome(NamedTuple):
    """What a choice leads to.

    `kept` and `again` have the values that are needed, and kept or made again. `held` is the bytes kept,
    `seconds` the price of all that is made again, and `written` the bytes of that in memory. `alive` has the
    bytes in use at every moment. `moved` has the values of `kept` that wait on the host, and `away` is their
    bytes, which are not in `held`; `seconds` includes the wait for their copies.
    """

    kept: frozenset[int]
    again: frozenset[int]
    held: int
    seconds: float
    written: int
    alive: tuple[int, ...]
    moved: frozenset[int] = frozenset()
    away: int = 0

    @property
    def peak(self) -> int:
        """The most bytes in use at one moment."""
        return max(self.alive, default=0)


class Uses:
    """When the backward pass needs each value.

    `first` and `last` have the moments of its first and last use (`last` is -1 if there is none). `written`
    says whether it is in memory between them. `ends` has the value that is the last one to be made of it
    (-1 if none is), if no moment reads it after that: then it is freed before its last moment ends.
    """

    def __init__(self, step: Step, again: Collection[int]) -> None:
        first, last, whole = step.read
        self.first, self.last, self.written = list(first), list(last), list(whole)
        self.ends = [-1] * len(first)
        for i in sorted(again, reverse=True):
            if self.last[i] >= 0:
                self.lead_on(step.values[i], i)

    def lead_on(self, value: Value, i: int) -> None:
        """Note that what a value is made of is needed when it is made, or whenever readers compute it."""
        self.written[i] |= not value.fused
        begin = self.first[i]
        end = begin if self.written[i] else self.last[i]
        for source in value.made_of:
            self.first[source] = min(self.first[source], begin)
            if end > self.last[source]:
                self.ends[source] = i
            if not self.written[i] and end >= self.last[source]:
                self.ends[source] = -1
            self.last[source] = max(self.last[source], end)
            self.written[source] |= value.whole


def outcome(step: Step, again: Collection[int], moved: Sequence[int] = ()) -> Outcome:
    """What happens if these values are made again where they are needed, and all others are kept; of those,
    `moved` on the host, if they have time to leave.

    The backward pass makes a value at the first use of it, or of what is made of it, and has it in memory
    until the last use. A value that each reader computes uses what it is made of at each reader. Of what one
    moment makes, values of which only others are made are freed as soon as these are there.
    """
    uses, writes = Uses(step, again), [moment.writes for moment in step.backward]
    _, read_last, _ = step.read
    change = list(step.change)
    kept, made_again, held, seconds, written = [], [], step.held, 0.0, 0
    freed, there, most = (defaultdict[int, int](int) for _ in range(3))  # by moment, of what it makes
    moving = _moving(step, uses, again, moved)
    stays = dict(zip(moved, moving.stays(), strict=True))
    gone = frozenset(i for at, i in enumerate(moved) if moving.has_left(at))
    for i, last in enumerate(uses.last):
        if last < 0:
            continue
        value = step.values[i]
        if i in again:
            assert value.seconds is not None, f"value {i} cannot be made again"
            made_again.append(i)
            seconds += value.seconds
            start, size = uses.first[i], value.again if uses.written[i] else 0
            written += size
            there[start] += size
            most[start] = max(most[start], there[start])
            for s in value.made_of:
                if uses.ends[s] == i and uses.first[s] == start and uses.written[s] and s in again:
                    there[start] -= step.values[s].again
                    freed[start] += step.values[s].again
            if last == read_last[i]:
                change[last] -= value.spares
                change[last + 1] += value.spares
        else:
            assert value.nbytes is not None, f"value {i} cannot be kept"
            kept.append(i)
            held += 0 if i in gone else value.nbytes
            start, size = max(value.made, value.until + 1), value.nbytes
        if size and writes[last - step.forward] == size:  # the result overwrites it
            writes[last - step.forward] = 0
            last -= 1
        if i in gone:
            left, back = max(stays[i].left + 1, start), max(stays[i].back, start)
            change[min(left, back)] -= size
            change[back] += size
        change[start] += size
        change[max(last + 1, start)] -= size
    for moment, size in freed.items():  # what is not there at the same time
        change[moment] -= there[moment] + size - most[moment]
        change[moment + 1] += there[moment] + size - most[moment]
    alive = tuple(map(sum, zip(accumulate(change[:-1]), step.beside, strict=True)))
    away = sum(step.values[i].nbytes or 0 for i in gone)
    seconds += moving.waited
    return Outcome(frozenset(kept), frozenset(made_again), held, seconds, written, alive, gone, away)


def _moving(step: Step, uses: Uses, again: Collection[int], moved: Sequence[int]) -> Moving:
    values = [Away(step.values[i].nbytes or 0, step.values[i].ready, uses.first[i]) for i in moved]
    taken = list(step.taken) if moved else []
    for i in again if moved else ():  # copies are hidden behind what is made again, too
        if uses.last[i] >= 0:
            taken[uses.first[i]] += step.values[i].seconds or 0.0
    return Moving(taken, step.forward if moved else 0, step.link, values)


def of_stock(step: Step) -> Outcome:
    """What happens without a plan."""
    return outcome(step, frozenset(range(len(step.values))) - step.stock)
