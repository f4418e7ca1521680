"""What a choice of values to make again leads to: bytes, seconds, and the bytes in use at every moment."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import NamedTuple

from leannorm.planning.moves import Away, Moving
from leannorm.planning.timeline import Step, Value

_READ = 1 << 30  # more values than any is made of


class Outcome(NamedTuple):
    """What a choice leads to.

    Of the values that are needed, `kept` has those that are kept, and `again` those that are made again.
    `held` is the bytes kept. `seconds` is the price of `again`, and `written` its bytes in memory. `alive`
    has the bytes in use at every moment. `moved` has the values of `kept` that wait on the host, and `away`
    is their bytes, which `held` does not count; `seconds` includes the wait for their copies.
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
    says whether it is in memory between them. `users` counts the values that are made of it in its last
    moment; it is `_READ` or more if that moment also reads it itself.
    """

    def __init__(self, step: Step, again: Collection[int]) -> None:
        first, last, whole = step.read
        self.first, self.last, self.written = list(first), list(last), list(whole)
        self.users = [_READ if moment >= 0 else 0 for moment in last]
        for i in sorted(again, reverse=True):
            if self.last[i] >= 0:
                self.lead_on(step.values[i], i)

    def lead_on(self, value: Value, i: int) -> None:
        """Note that the sources of a value are needed when it is made, or whenever its readers compute it."""
        first, last, users, written = self.first, self.last, self.users, self.written
        written[i] |= not value.fused
        begin, reads = first[i], 1 if written[i] else _READ
        end = begin if written[i] else last[i]
        for source in value.made_of:
            if begin < first[source]:
                first[source] = begin
            if end > last[source]:
                last[source], users[source] = end, reads
            elif end == last[source]:
                users[source] += reads
            written[source] |= value.whole

    def passing(self) -> list[bool]:
        """For each value, whether it is made only for others of the same moment, if it is made again."""
        known = zip(self.first, self.last, self.users, self.written, strict=True)
        return [first == last and 0 < users < _READ and written for first, last, users, written in known]


def _freed_within(step: Step, uses: Uses, again: Collection[int]) -> dict[int, int]:
    """For each moment that makes passing values: the bytes of all that it makes, less the most of them that
    are in memory at once. Each reader makes its sources in turn, and frees those that nothing else needs."""
    values, first, passing, freed = step.values, uses.first, uses.passing(), dict[int, int]()
    for moment in {first[i] for i in again if passing[i]}:
        made, left = set[int](), dict[int, int]()
        made_of = dict[int, list[int]]()  # of the values that are met so far
        whole = most = there = gone = 0
        stack = [i for i in step.backward[moment - step.forward].reads if i in again and first[i] == moment]
        stack.reverse()
        while stack:
            i = stack[-1]
            if i in made:
                stack.pop()
                continue
            if i not in made_of:
                made_of[i] = [s for s in values[i].made_of if first[s] == moment and s in again]
                missing = [s for s in made_of[i] if s not in made]
                if missing:
                    stack += missing[::-1]
                    continue
            made.add(stack.pop())
            size = values[i].again if uses.written[i] else 0
            whole, there = whole + size, there + size
            most = max(most, there)
            for s in made_of[i]:
                left[s] = left.get(s, uses.users[s]) - 1
                gone += values[s].again if left[s] == 0 and passing[s] else 0
            if size:  # a call of several results is a value of no size, and has its sources until the first
                there, gone = there - gone, 0
        freed[moment] = whole - most
    return freed


def outcome(step: Step, again: Collection[int], moved: Sequence[int] = ()) -> Outcome:
    """What happens if the values in `again` are made again where needed, and all others are kept: those in
    `moved` on the host, if they have time to leave.

    The backward pass makes a value when it, or a value made of it, is first used, and has it in memory until
    the last use. If each reader computes a value, its sources are used at each reader. A value that is made
    only for others of the same moment is freed as soon as they are made.
    """
    uses, writes = Uses(step, again), [moment.writes for moment in step.backward]
    _, read_last, _ = step.read
    first, is_written, forward = uses.first, uses.written, step.forward
    change = list(step.change)
    kept, made_again, held, seconds, written = [], [], step.held, 0.0, 0
    moving = _moving(step, uses, again, moved)
    stays = dict(zip(moved, moving.stays(), strict=True))
    gone = frozenset(i for at, i in enumerate(moved) if moving.has_left(at))
    for i, (last, value) in enumerate(zip(uses.last, step.values, strict=True)):
        if last < 0:
            continue
        if i in again:
            assert value.seconds is not None, f"value {i} cannot be made again"
            made_again.append(i)
            seconds += value.seconds
            start, size = first[i], value.again if is_written[i] else 0
            written += size
            if last == read_last[i]:
                change[last] -= value.spares
                change[last + 1] += value.spares
        else:
            assert value.nbytes is not None, f"value {i} cannot be kept"
            kept.append(i)
            held += 0 if i in gone else value.nbytes
            start, size = max(value.made, value.until + 1), value.nbytes
        if size and writes[last - forward] == size:  # the result overwrites it
            writes[last - forward] = 0
            last -= 1
        if i in gone:
            left, back = max(stays[i].left + 1, start), max(stays[i].back, start)
            change[min(left, back)] -= size
            change[back] += size
        change[start] += size
        change[max(last + 1, start)] -= size
    for moment, size in _freed_within(step, uses, again).items():
        change[moment] -= size
        change[moment + 1] += size
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
