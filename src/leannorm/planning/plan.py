"""Chooses the point of a line that reaches a goal."""

from __future__ import annotations

from typing import NamedTuple

from leannorm.planning.goal import Goal
from leannorm.planning.lines import Lines
from leannorm.planning.outcome import Outcome

_MARGIN = 0.99
"""A pass may keep slightly more than its plan: tensors of a few elements are not planned."""


class Plan(NamedTuple):
    """What was chosen for a goal.

    `point` is the choice, and `stock` what happens without a plan. `step` is the price of the baseline's step
    in seconds. `least` is the fewest bytes that are possible: at the peak if a peak was asked for, otherwise
    those kept. `reached` says whether the choice reaches the goal.
    """

    point: Outcome
    stock: Outcome
    step: float
    least: int
    reached: bool

    @property
    def ratio(self) -> float:
        """The bytes that the plan keeps, relative to the baseline."""
        return self.point.held / max(self.stock.held, 1)

    @property
    def peak_ratio(self) -> float:
        """The peak that is planned, relative to the baseline."""
        return self.point.peak / max(self.stock.peak, 1)

    @property
    def overhead(self) -> float:
        """The price of what is made again, beyond what the baseline makes again, relative to its step."""
        return (self.point.seconds - self.stock.seconds) / self.step if self.step else 0.0


def plan(lines: Lines, goal: Goal, beyond: bool = True) -> Plan:
    """The cheapest point of a line that reaches the goal, or the leanest if none does.

    With `beyond`, a budget or an overhead may also take points whose peak is above the baseline's, to keep
    fewer bytes than any point below that peak.
    """
    stock, seconds = lines.stock, lines.step.seconds
    if goal.peak is not None:
        most = goal.peak * stock.peak if isinstance(goal.peak, float) else goal.peak
        line = lines.by_peak
        point = next((p for p in line if p.peak <= most), line[-1])
        return Plan(point, stock, seconds, line[-1].peak, point.peak <= most)
    stays = goal.worth is not None or goal.free is not None or not beyond
    line = lines.by_held if stays else [*lines.by_held, *lines.beyond]
    leanest = min(line, key=lambda p: (p.held, p.seconds))
    if goal.budget is not None:
        most = goal.budget * stock.held
        if goal.overhead is None:
            point = next((p for p in line if p.held <= most), leanest)
        else:
            point = _within(lines, goal, _MARGIN * most)
        return Plan(point, stock, seconds, leanest.held, point.held <= most)
    if goal.overhead is not None:
        line, most = _freeing(line), stock.seconds + goal.overhead * seconds
        leanest = line[-1]
        line = [p for p in line if p is stock or p.seconds <= most]
    rate = goal.worth * seconds / max(stock.held, 1) if goal.worth is not None else float("inf")
    return Plan(min(line, key=lambda p: _cost(p, rate)), stock, seconds, leanest.held, True)


def _within(lines: Lines, goal: Goal, most: float) -> Outcome:
    """The leanest point that costs at most `free` more than the first one with few enough bytes.

    It never costs more than `overhead`, even if the budget is then out of reach.
    """
    line, seconds = lines.by_held, lines.step.seconds
    reached = next((p.seconds for p in line if p.held <= most), float("inf"))
    latest = lines.stock.seconds + (goal.overhead or 0.0) * seconds
    latest = min(latest, reached + (goal.free or 0.0) * seconds)
    return min((p for p in line if p is lines.stock or p.seconds <= latest), key=lambda p: p.held)


def by_overhead(lines: Lines) -> list[Outcome]:
    """The points that overheads choose from; the first is what happens without a plan."""
    return _freeing([*lines.by_held, *lines.beyond])


def _freeing(line: list[Outcome]) -> list[Outcome]:
    """The points that leave more memory free than the point before, beginning with the baseline.

    Each keeps fewer bytes, and its peak rises by at most as many bytes as it frees.
    """
    points = line[:1]
    for point in sorted(line[1:], key=lambda p: (p.seconds, p.held)):
        last = points[-1]
        if point.held < last.held and point.held + point.peak <= last.held + last.peak:
            points.append(point)
    return points


def _cost(point: Outcome, rate: float) -> tuple[float, float]:
    if rate == float("inf"):
        return point.held, point.seconds
    return point.seconds + rate * point.held, point.held
