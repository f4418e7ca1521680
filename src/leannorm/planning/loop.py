"""Finds the planned overhead that takes the time asked for, by measuring steps. Prices are a first guess.

Passes that follow the plan and plain passes alternate until the ratio of their seconds is known. Then another
point of the plan's line is taken, until the measured overhead is the one that was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

PLAN, PLAIN = "plan", "plain"

_WARM = 2  # passes of a new plan that are not timed, since they try new kinds of calls
_ORDER = (PLAIN, PLAIN, PLAN, PLAN)  # the faster of two alike counts: the first has memory of the others
_FEWEST, _MOST = 8, 60  # ratios that a decision takes; each compares two passes with two
_SURE = 0.02  # error of the overhead, in plain steps, at which it is known
_FAR, _FEW = 0.06, 5  # if so few ratios are all this far from what was asked, they are enough
_NEAR = 0.015  # this close to what was asked is close enough
_DECISIONS = 12  # moves from point to point, after which the best one stays
_IDLE = 40  # passes in a row without a ratio, after which timing is given up
AGAIN = 1000  # passes until everything is measured again


class Loop:
    """The measurements of one plan's passes, and the overhead that they lead to.

    `asked` is the overhead that was asked for. `rungs` are the planned overheads to choose from, and `at` is
    the chosen one. `is_off` says whether every pass is a plain one, since even the least rebuild takes more.
    `measured` is the overhead that was measured, with its `error`.
    """

    def __init__(self, asked: float) -> None:
        self.asked = asked
        self.rungs: list[float] = []
        self.at = 0.0
        self.is_off = False
        self.measured: float | None = None
        self.error = 0.0
        self._points: dict[float, float] = {}  # the measured overhead of each rung
        self._left = 0  # passes until the next measurement; 0 while measuring
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
        """Whether the time of this pass counts."""
        return self._left == 0 and self._turn > 0

    def take(self, rungs: Iterable[float], first: float) -> None:
        """Choose from these rungs from now on; by their prices, `first` is the one that was asked for."""
        taken = sorted(rung for rung in set(rungs) if rung > 0)
        if taken == self.rungs and self.at:  # the same plan was made again
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
        """Stay at this rung until the next measurement; at 0, rebuild nothing."""
        self.is_off = rung == 0
        self.at = rung or self.at
        if self._points:
            self.measured = self._points.get(rung, min(self._points.values()))
        self._left, self._decisions = AGAIN, 0

    def next(self) -> str:
        """The kind of the next pass: plain, or following the plan."""
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
        """Note how long a pass of this kind took, with the plan of rung `at`."""
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
        is_known = error <= _SURE or abs(found - self.asked) > _NEAR + error  # or it is known to be elsewhere
        if is_far or (count >= _FEWEST and is_known) or count >= _MOST:
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
        """The highest rung that was measured to take no more than asked; 0 if all took more."""
        return max((rung for rung, found in self._points.items() if found <= self.asked + _NEAR), default=0.0)

    def _better(self) -> float | None:
        """The rung to try next; None if no rung is left between too little and too much."""
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
        """The rung to aim at, on the line through two measured points, or through one and the origin."""
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
        if slope <= 0:  # rebuilding more cannot take less time, so this is noise
            return 2 * b if high is None else (low + high) / 2
        wanted = b + (self.asked - points[b]) / slope
        if high is None:
            return min(max(wanted, low), 4 * low)
        return max(wanted, low)
