"""The lines that goals choose points from: in small steps, from the baseline to the leanest choice.

A line is made before any goal is known. So a goal that allows more time never keeps more bytes, and a goal
with a lower peak never gets a higher one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property
from itertools import accumulate, pairwise

from leannorm.planning.cut import Cuts
from leannorm.planning.outcome import Outcome, Uses, of_stock, outcome
from leannorm.planning.peaks import descents, lowered, under_peaks
from leannorm.planning.timeline import Step

_PARTS = 128
"""A jump of the chain of cuts is divided into parts of at least the baseline's bytes divided by this."""
_LARGE, _EARLY = 16, 48
"""A part of at least the baseline's bytes divided by the first is also dropped before its turn, in
up to this many earlier sets of the chain."""
_SPAN = 4
"""A row of values made again is cut when it reaches the baseline's bytes divided by this."""
_FEW = 512
"""In a step of more values the search for lower peaks takes most of the time, and adds no point to a line of
bytes that would be cheaper by a thousandth of the step. In a small step it does."""
_MOVED, _PACES = 32, (0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 4.0, float("inf"))
"""From so many points values are moved to the host; at most so many times as many bytes as the link has had
time for. At more than 1 the computation waits for copies."""


class Lines:
    """The lines of one step. The first point of each is `stock`: what happens without a plan."""

    def __init__(self, step: Step, stock: Outcome | None = None) -> None:
        self.step = step
        self.stock = of_stock(step) if stock is None else stock

    @cached_property
    def by_held(self) -> list[Outcome]:
        """Fewer and fewer bytes kept, for more and more seconds, at no peak above the baseline's."""
        return self._line(self._of_bytes, lambda point: point.held)

    @cached_property
    def beyond(self) -> list[Outcome]:
        """Fewer bytes kept than on that line, at peaks above the baseline's; the fewest seconds first."""
        least = self.by_held[-1].held
        above = [p for p in self._of_bytes if p.held < least and p.peak > self.stock.peak]
        return sorted(above, key=lambda p: (p.seconds, p.held))

    @cached_property
    def by_peak(self) -> list[Outcome]:
        """Lower and lower peaks, for more and more seconds; no point keeps more than the baseline."""
        return self._line(self._of_peaks, lambda point: point.peak)

    def _line(self, points: Iterable[Outcome], size: Callable[[Outcome], int]) -> list[Outcome]:
        line = [self.stock]
        allowed = (p for p in points if p.held <= self.stock.held and p.peak <= self.stock.peak)
        for point in sorted(allowed, key=lambda p: (max(p.seconds, self.stock.seconds), size(p))):
            if size(point) < size(line[-1]):
                line.append(point)
        return line

    @cached_property
    def _cuts(self) -> Cuts:
        return Cuts(self.step)

    @cached_property
    def _chains(self) -> list[list[frozenset[int]]]:
        step, least = self.step, self.stock.held // _PARTS
        chain = [choice.again for choice in self._cuts.chain(least)]
        spans = _spans(step, chain[-1], self.stock.held // _SPAN)
        short = [choice.again for choice in Cuts(step, spans).chain(least)]
        return [[*_in_parts(step, line, least)] for line in (chain, short)]

    @cached_property
    def _choices(self) -> list[Outcome]:
        large = self.stock.held // _LARGE
        early = (again for line in self._chains for again in _early(self.step, line, large))
        sets = dict.fromkeys([*self._chains[0], *self._chains[1], *early])
        return [outcome(self.step, again) for again in sets]

    @cached_property
    def _lowered(self) -> list[Outcome]:
        return lowered(self.step, self._choices[: len(self._chains[0])], self.stock)

    @cached_property
    def _of_bytes(self) -> list[Outcome]:
        if len(self.step.values) <= _FEW:
            return self._of_peaks
        points = [*self._choices, *self._lowered]
        return [*points, *_moving(self.step, points)]

    @cached_property
    def _of_peaks(self) -> list[Outcome]:
        points = [*self._choices, *under_peaks(self.step, self._cuts, self.stock)]
        low = descents(self.step, sorted(points, key=lambda p: (p.peak, p.seconds)))
        points += [*self._lowered, *low]
        return [*points, *_moving(self.step, points)]


def _moving(step: Step, points: list[Outcome]) -> Iterator[Outcome]:
    """Points that also move some of what they keep to the host.

    A value's bytes are freed if it is rebuilt or if it is moved. A point rebuilds values for which that is
    cheap. Of the others it moves as many as computation hides the copies of, or as the time allows. It takes
    them from all of the forward pass, since copies of many values in a row would not be hidden.
    """
    by_seconds = sorted(points, key=lambda p: (p.seconds, p.held)) if step.link else []
    could = [step.link * seconds for seconds in accumulate(step.taken)]
    for point in by_seconds[:: len(points) // _MOVED + 1]:
        free = [i for i in point.kept if step.values[i].ready >= 0 and step.values[i].nbytes]
        free.sort(key=lambda i: step.values[i].ready)
        found = dict.fromkeys(tuple(_at_pace(step, free, could, pace)) for pace in _PACES)
        yield from (outcome(step, point.again, moved) for moved in found if moved)


def _at_pace(step: Step, free: list[int], could: list[float], pace: float) -> Iterator[int]:
    nbytes = 0
    for i in free:
        if nbytes <= pace * could[step.values[i].ready]:
            nbytes += step.values[i].nbytes or 0
            yield i


def _in_parts(step: Step, chain: list[frozenset[int]], least: int) -> Iterator[frozenset[int]]:
    """The sets of a chain, and sets between them.

    The chain jumps if many equal layers have one price. Such a jump is divided into parts that share no value
    of more than `least` bytes. Parts of earlier layers come first, since the backward pass would keep those
    longest, and small ones are joined up to `least` bytes.
    """
    yield chain[0]
    for reached, after in pairwise(chain):
        size = 0
        for part in _parts(step, reached, after, least):
            reached = reached.union(part)
            size += _bytes_of(step, part)
            if size > least or len(reached) == len(after):
                yield reached
                size = 0


def _early(step: Step, sets: list[frozenset[int]], least: int) -> Iterator[frozenset[int]]:
    """Sets that drop one large part, such as a language model's logits, before its turn.

    The chain drops it late if that frees few bytes per second, which leaves a gap of its size between two
    points. A budget in that gap is reached in less time with this part and fewer of the others.
    """
    for at, (reached, after) in enumerate(pairwise(sets)):
        if _bytes_of(step, after - reached) >= least:
            part = (after - reached) | step.unkept
            yield from (before | part for before in sets[: at : at // _EARLY + 1])


def _bytes_of(step: Step, values: Iterable[int]) -> int:
    return sum(step.values[i].nbytes or 0 for i in values)


def _parts(step: Step, before: frozenset[int], after: frozenset[int], least: int) -> list[list[int]]:
    new = sorted(after - before)
    group = {i: i for i in new}

    def root(i: int) -> int:
        while group[i] != i:
            group[i] = group[group[i]]
            i = group[i]
        return i

    needed = {s for i in before for s in step.values[i].made_of} | {i for m in step.backward for i in m.reads}
    first_user: dict[int, int] = {}
    for i in new:
        for source in step.values[i].made_of:
            if source in group:
                group[root(i)] = root(source)
            elif source not in needed and _bytes_of(step, [source]) > least:  # kept only for these new values
                group[root(i)] = root(first_user.setdefault(source, i))
    parts: dict[int, list[int]] = {}
    for i in new:
        parts.setdefault(root(i), []).append(i)
    return list(parts.values())


def _spans(step: Step, again: Collection[int], most: int) -> set[int]:
    """Values to keep so that rows of values made one from another are short: a row is in memory at once."""
    cut, behind, written = set(), dict[int, int](), Uses(step, again).written
    for i, value in enumerate(step.values):
        if i in again:
            size = value.again if written[i] else 0
            behind[i] = size + max((behind.get(source, 0) for source in value.made_of), default=0)
            if size and value.nbytes is not None and behind[i] > most:
                cut.add(i)
                behind[i] = 0
    return cut
