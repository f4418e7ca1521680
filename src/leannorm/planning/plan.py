"""From the lines of a step and a goal to what is kept."""

from __future__ import annotations

from typing import NamedTuple

from leannorm.planning.goal import Goal
from leannorm.planning.lines import Lines
from leannorm.planning.timeline import Outcome


class Plan(NamedTuple):
    """`point`: what was chosen; `stock`: what happens without a plan. `step`: the price of stock's step in
    seconds. `least`: the fewest bytes that are possible, of the peak where a peak was asked for. `reached`:
    does the choice meet the goal?"""

    point: Outcome
    stock: Outcome
    step: float
    least: int
    reached: bool

    @property
    def ratio(self) -> float:
        """Planned kept bytes over stock's."""
        return self.point.held / max(self.stock.held, 1)

    @property
    def peak_ratio(self) -> float:
        """The planned peak over stock's."""
        return self.point.peak / max(self.stock.peak, 1)

    @property
    def overhead(self) -> float:
        """The price of what is made again beyond what stock makes again, over that of stock's step."""
        return (self.point.seconds - self.stock.seconds) / self.step if self.step else 0.0


def plan(lines: Lines, goal: Goal, beyond: bool = True) -> Plan:
    """The point of a line that a goal asks for; where it asks for too much, the leanest.

    `beyond`: may a budget or an overhead take a peak above stock's, for what is not possible below?
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
            point = _within(lines, goal, most)
        return Plan(point, stock, seconds, leanest.held, point.held <= most)
    if goal.overhead is not None:
        most = stock.seconds + goal.overhead * seconds
        line = [p for p in _freeing(line) if p is stock or p.seconds <= most]
    rate = goal.worth * seconds / max(stock.held, 1) if goal.worth is not None else float("inf")
    return Plan(min(line, key=lambda p: _cost(p, rate)), stock, seconds, leanest.held, True)


def _within(lines: Lines, goal: Goal, most: float) -> Outcome:
    """The first point of few enough bytes, or the last one behind it that takes hardly more; in any case one
    within the time."""
    line, seconds = lines.by_held, lines.step.seconds
    reached = next((p.seconds for p in line if p.held <= most), float("inf"))
    latest = lines.stock.seconds + (goal.overhead or 0.0) * seconds
    latest = min(latest, reached + (goal.free or 0.0) * seconds)
    return min((p for p in line if p is lines.stock or p.seconds <= latest), key=lambda p: p.held)


def by_overhead(lines: Lines) -> list[Outcome]:
    """The points for all overheads; the first is what happens without a plan."""
    return _freeing([*lines.by_held, *lines.beyond])


def _freeing(line: list[Outcome]) -> list[Outcome]:
    """The points that leave more room than the one before, which is stock at first: fewer bytes are held, and
    the peak rises by no more than those."""
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
