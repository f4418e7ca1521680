"""From the time that steps take to the overhead to plan for: prices are a first guess, which this corrects.

Passes that follow the plan and plain ones alternate until the ratio of their seconds is known; then another
point of the plan's line is taken, until what is measured is what was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

PLAN, PLAIN = "plan", "plain"

_WARM = 2  # passes of a new plan that are not timed: what is new in them is tried
_ORDER = (PLAIN, PLAIN, PLAN, PLAN)  # of two alike the faster one counts: the first has others' memory
_FEWEST, _MOST = 8, 60  # ratios of two and two, until one is known
_SURE = 0.02  # of a plain step
_FAR, _FEW = 0.06, 5  # so far from what was asked, all of so few ratios say enough
_NEAR = 0.015  # of what was asked is what was asked
_DECISIONS = 12  # from one point to another, before the best so far stays
_IDLE = 40  # passes in a row without a ratio: these are not to be timed
AGAIN = 1000  # passes until all is measured again


class Loop:
    """What one plan's passes are measured for. `asked`: the overhead.

    `rungs`: the planned overheads that can be chosen. `at`: the one that is. `is_off`: is every pass a plain
    one, as the least that can be rebuilt takes more? `measured`: the overhead that was taken; `error`: of it.
    """

    def __init__(self, asked: float) -> None:
        self.asked = asked
        self.rungs: list[float] = []
        self.at = 0.0
        self.is_off = False
        self.measured: float | None = None
        self.error = 0.0
        self._points: dict[float, float] = {}  # measured overheads, by planned ones
        self._left = 0  # passes until it is measured again; 0: it is now
        self._decisions = 0
        self._begin()

    def _begin(self) -> None:
        self._turn, self._idle = -_WARM, 0
        self._seconds: dict[str, list[float]] = {PLAN: [], PLAIN: []}
        self._ratios: list[float] = []

    @property
    def is_measuring(self) -> bool:
        return self._left == 0

    @property
    def is_timed(self) -> bool:
        """Does the time of this pass count?"""
        return self._left == 0 and self._turn > 0

    def take(self, rungs: Iterable[float], first: float) -> None:
        """Another line to choose from, whose prices say that `first` is what was asked."""
        taken = sorted(rung for rung in set(rungs) if rung > 0)
        if taken == self.rungs and self.at:  # the same plan, made again
            return
        self.rungs = taken
        self._points.clear()
        if not self.rungs:
            self._settle(0.0)
            return
        wanted = self.at or first or self.asked / 2
        self._go_to(max((r for r in self.rungs if r <= wanted * (1 + 1e-9)), default=self.rungs[0]))

    def _go_to(self, rung: float) -> None:
        self.at, self.is_off, self._left = rung, False, 0
        self._begin()

    def _settle(self, rung: float) -> None:
        """This one, until it is measured again; 0: none."""
        self.is_off = rung == 0
        self.at = rung or self.at
        if self._points:
            self.measured = self._points.get(rung, min(self._points.values()))
        self._left, self._decisions = AGAIN, 0

    def next(self) -> str:
        """What the next pass is to be, a plain one or one that follows the plan."""
        if self._left:
            self._left -= 1
            if self._left:
                return PLAIN if self.is_off else PLAN
            self._points.clear()
            if self.rungs:
                self._go_to(self.rungs[0] if self.is_off else self.at)
        self._turn += 1
        self._idle += 1
        if self._idle > _IDLE:
            self._left = AGAIN
            return PLAN
        return PLAN if self._turn <= 0 else _ORDER[(self._turn - 1) % len(_ORDER)]

    def note(self, kind: str, seconds: float, at: float) -> None:
        """A pass has taken so long, of a plan at this rung."""
        if self._left or (kind == PLAN and at != self.at) or self._turn <= 0:
            return
        for_kind = self._seconds[kind]
        for_kind.append(seconds)
        plans, plains = self._seconds[PLAN], self._seconds[PLAIN]
        if len(plans) < 2 or len(plains) < 2:
            return
        self._ratios.append(min(plans[-2:]) / max(min(plains[-2:]), 1e-9))
        self._idle = 0
        plans.clear()
        plains.clear()
        self._consider()

    def _consider(self) -> None:
        count, ratios = len(self._ratios), self._ratios
        if count < _FEW:
            return
        middle = median(ratios)
        spread = 1.4826 * median(abs(ratio - middle) for ratio in ratios)
        found, error = middle - 1.0, 2 * 1.253 * spread / count**0.5
        low, high = min(ratios) - 1.0, max(ratios) - 1.0
        is_far = low > self.asked + _FAR or (high < self.asked - _FAR and self.at < self.rungs[-1])
        if is_far or (count >= _FEWEST and error <= _SURE) or count >= _MOST:
            self._decide(found, error)

    def _decide(self, found: float, error: float) -> None:
        self._points[self.at], self.measured, self.error = found, found, error
        self._decisions += 1
        rung = self._better()
        if rung is None or self._decisions > _DECISIONS:
            self._settle(self._best())
        else:
            self._go_to(rung)

    def _best(self) -> float:
        """The most that was measured to be no more than asked; 0: all were more."""
        return max((rung for rung, found in self._points.items() if found <= self.asked + _NEAR), default=0.0)

    def _better(self) -> float | None:
        """The rung to try next; None if there is none between what is too little and what is too much."""
        low = self._best()
        above = [rung for rung in self._points if rung > low]
        high = min(above, default=None)
        if low and self._points[low] >= self.asked - _NEAR:
            return None
        within = [rung for rung in self.rungs if rung > low and (high is None or rung < high)]
        if not within:
            return None
        wanted = self._wanted(low, high)
        return max((rung for rung in within if rung <= wanted), default=within[0])

    def _wanted(self, low: float, high: float | None) -> float:
        """By the line through two points that were measured, or through one and nothing."""
        points = self._points
        known = sorted(points)
        if low and high is not None:
            pair = low, high
        elif len(known) > 1:
            pair = (known[-2], known[-1]) if high is None else (known[0], known[1])
        else:
            pair = 0.0, low or (high or 0.0)
        a, b = pair
        slope = (points[b] - points.get(a, 0.0)) / (b - a)
        if slope <= 0:  # more cannot take less: noise
            return 2 * b if high is None else (low + high) / 2
        wanted = b + (self.asked - points[b]) / slope
        if high is None:
            return min(max(wanted, low), 4 * low)
        return max(wanted, low)
