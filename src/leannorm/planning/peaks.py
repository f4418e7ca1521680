"""Choices with lower peaks: by weights of the moments of a step, or by changes of single values at a peak."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import accumulate
from math import exp

from leannorm.planning.cut import Cuts, price
from leannorm.planning.outcome import Outcome, Uses, outcome
from leannorm.planning.timeline import Step

_STARTS, _TRIALS = 4, 150
"""The number of points from which the peak is lowered by single changes, and of changes tried from each."""
_ROUNDS, _WIDTH, _FAILURES = 12, 8, 6
"""To lower a peak to the baseline's, so many changes are made at most, the best of so many each time; after
so many failures in a row, later points, which make more again, are not tried."""
_LAG, _SMALL = 0.003, 128
"""A point is near another one if it takes at most the first as a share of the step more, and keeps at most
the baseline's bytes divided by the second more."""
_RATES = [0.03 * 1.8**i for i in range(8)]
"""What lowering the peak to nothing is worth, in shares of the step's seconds."""
_SHARPNESS = (20, 60, 150, 150)
"""How much more the highest moments weigh than those a little lower, in each round."""


def under_peaks(step: Step, cuts: Cuts, stock: Outcome) -> Iterator[Outcome]:
    """Choices that weigh a byte by the moments at which it is in use: the closer to the peak, the more.

    The cheapest choice under a peak is also the cheapest for some weights of the moments (the dual of a
    linear program). For each worth of the peak, weights and choices are computed alternately.
    """
    point, weights = stock, None
    for rate in _RATES:
        worth = rate * step.seconds / max(stock.peak, 1)
        for sharpness in _SHARPNESS:
            highest = max(point.peak, 1)
            heights = [exp(sharpness * (alive / highest - 1)) for alive in point.alive]
            whole = sum(heights)
            fresh = [height / whole for height in heights]
            weights = fresh if weights is None else [(a + b) / 2 for a, b in zip(weights, fresh, strict=True)]
            point = outcome(step, _weighed(step, cuts, point.again, [worth * w for w in weights]))
            yield point


def _weighed(step: Step, cuts: Cuts, again: Collection[int], weights: list[float]) -> frozenset[int]:
    """The cheapest choice if a byte costs these seconds at each moment, with the lifetimes of `again`."""
    uses = Uses(step, again)
    needed = [moment >= 0 for moment in uses.last]
    for i in range(len(step.values) - 1, -1, -1):  # an unneeded value: as if its readers were made again
        if uses.last[i] >= 0:
            value = step.values[i]
            uses.lead_on(value._replace(made_of=tuple(s for s in value.made_of if not needed[s])), i)
    until = [0.0, *accumulate(weights)]
    held: list[int | None] = []
    prices: list[int | None] = []
    for value, begin, end, written in zip(step.values, uses.first, uses.last, uses.written, strict=True):
        keeping = (until[end + 1] - until[value.made]) * (value.nbytes or 0) if end >= 0 else 0.0
        making = (until[end + 1] - until[begin]) * value.again if end >= 0 and written else 0.0
        held.append(None if value.nbytes is None else price(keeping))
        prices.append(None if value.seconds is None else price(value.seconds + making))
    return cuts.weighed(held, prices)


def lowered(step: Step, points: list[Outcome], stock: Outcome) -> list[Outcome]:
    """For each point with a peak above the baseline's: a point near it with no higher peak, if there is one.

    A few bytes that are made again at the peak would rule out every point that makes them again. So one value
    in use at the peak is kept instead, or another one is made again. The changes that helped the point before
    are tried first. Each value is changed only once, as a change may raise the peak elsewhere.
    """
    free = set(step.free)
    kept, again = frozenset[int](), frozenset[int]()
    known, failed = [point for point in points if point.peak <= stock.peak], 0
    found: list[Outcome] = []
    for first in points:
        latest, most = first.seconds + _LAG * step.seconds, first.held + stock.held // _SMALL
        if any(p.seconds <= latest and p.held <= most for p in (*known, *found)):
            continue
        worth = (first.seconds - stock.seconds) / max(stock.held - first.held, 1)
        point = outcome(step, (first.again - kept) | again | step.unkept)
        if point.peak <= stock.peak:
            found.append(point)
            more = point.seconds - first.seconds + worth * (point.held - first.held)
            if more < _LAG * step.seconds:
                continue
            point = first
        left = free
        for _ in range(_ROUNDS):
            before, point = point, _changed_at_peak(step, point, stock.peak, worth, left)
            left = left - (before.again ^ point.again)
            if point is before or point.peak <= stock.peak:
                break
        if point.peak > stock.peak:
            failed += 1
            if failed == _FAILURES:
                break
            continue
        kept, again, failed = first.again - point.again, point.again - first.again, 0
        found.append(point)
    return found


def _changed_at_peak(step: Step, point: Outcome, peak: int, worth: float, free: set[int]) -> Outcome:
    """The point with one value changed that is in use at its peak, at the least cost if a byte is `worth` so
    many seconds. It tries the cheapest values that suffice to get below `peak`, or else the largest ones."""
    there = _in_use_at_peak(step, point, free)

    def size(i: int) -> int:
        value = step.values[i]
        return value.again if i in point.again else value.nbytes or 0

    def cost(i: int) -> float:
        value = step.values[i]
        more = (value.seconds or 0.0) - worth * (value.nbytes or 0)
        return -more if i in point.again else more

    enough = [i for i in there if size(i) >= point.peak - peak]
    best = sorted(enough, key=cost) or sorted(there, key=size, reverse=True)
    tried = (outcome(step, (point.again ^ {i}) | step.unkept) for i in best[:_WIDTH])
    return min(tried, key=lambda p: (_above(p, peak), p.seconds + worth * p.held), default=point)


def _above(point: Outcome, peak: int) -> int:
    """By how many bytes the point is above the peak, added up over all moments: several may be above it."""
    return sum(alive - peak for alive in point.alive if alive > peak)


def _in_use_at_peak(step: Step, point: Outcome, free: Collection[int]) -> list[int]:
    """Of the values in `free`, those in memory at the point's peak."""
    uses, top = Uses(step, point.again), point.alive.index(point.peak)
    there = (i for i in sorted(free) if uses.last[i] >= top and (uses.written[i] or i not in point.again))
    return [i for i in there if (uses.first[i] if i in point.again else step.values[i].made) <= top]


def descents(step: Step, points: list[Outcome]) -> list[Outcome]:
    """Lower and lower peaks, from some of these points."""
    return [point for start in points[:: len(points) // _STARTS + 1] for point in _descent(step, start)]


def _descent(step: Step, point: Outcome) -> Iterator[Outcome]:
    """From a point to lower peaks, by changing one value after another of those in use at the peak."""
    trials, tried = _TRIALS, {point.again}
    while trials > 0 and point.alive:
        there = sorted(_in_use_at_peak(step, point, step.free), key=lambda i: -(step.values[i].nbytes or 0))
        changed = [outcome(step, (point.again ^ {i}) | step.unkept) for i in there[:trials]]
        trials -= max(len(changed), 1)
        new = (p for p in changed if p.again not in tried)
        better = [p for p in new if (p.peak, p.seconds) < (point.peak, point.seconds)]
        if not better:
            return
        point = min(better, key=lambda p: (p.peak, p.seconds))
        tried.add(point.again)
        yield point
