"""All plans of this process, and which of them a forward pass follows, by what it has saved so far."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from leannorm.planning.goal import Goal
from leannorm.saving import reasons
from leannorm.saving.plan import Call, Pass, RebuildPlan, plan, size, structure

_MAX_PLANS = 256
_ANEW = 16  # a plan is made again after so many passes: what the first could not rebuild, a later one may
_MORE = 4  # and then after so many times as many
_TRIES = 3  # passes that follow no plan, so that one of them may be the one that no plan fits
_NEAR = 0.75, 4 / 3  # of the sizes that a plan was made for: there its choice is still a good one
_PROMISED = 1.05, 0.02  # of the share that is planned, and of stock's bytes: more was not kept as planned
_MISSES = 2


@dataclass(eq=False)
class _Entry:
    """A plan. `made_of`: the calls of the pass that it was made of. `missed`: did a pass keep more?"""

    plan: RebuildPlan
    made_of: tuple[Call, ...]
    anew: int
    follows: int = 0
    misses: int = 0
    missed: bool = False
    next: _Entry | None = None  # what the pass behind one of this plan followed

    @property
    def is_old(self) -> bool:
        """Is it to be made anew?"""
        return self.missed or self.follows >= self.anew


@dataclass
class _Known:
    """The plans of passes that begin alike, and how many passes are to follow none."""

    entries: list[_Entry] = field(default_factory=list)
    whole: int = 0
    last: _Entry | None = None


_KNOWN: dict[tuple[Goal, Hashable], _Known] = {}  # by the structure of the first tensor, too


class Following:
    """One pass, which follows a plan as long as its tensors are those of the plan's pass, in about its sizes.

    A plan for the same sizes is preferred. If no plan fits any more, everything is rebuilt that can be, and
    one of the next passes is made into a plan. So it is where a pass kept more than its plan said.
    """

    def __init__(self, goal: Goal) -> None:
        self.goal = goal
        self.plan: RebuildPlan | None = None
        self._entry: _Entry | None = None
        self._begun = False
        self.whole = True  # was the pass without a plan from the beginning?
        self.strayed = False  # did no plan fit any more?

    def rebuilds(self, calls: Sequence[Call]) -> bool:
        """May the tensor that was packed last be rebuilt? `calls` are all calls so far."""
        last = len(calls) - 1
        if not self._begun:
            self._begun = True
            known = self._known(calls)
            entry = None if known.whole else self._best(known, calls)
            self._follow(None if entry is not None and entry.is_old else entry)
            self.whole = self.plan is None
        elif self._entry is not None and not self._fits(self._entry, calls, last):
            known = self._known(calls)
            self._follow(self._best(known, calls))
            if self._entry is None:
                self._stray(known)
        return self.plan is None or self.plan.rebuild[last]

    def narrows(self, place: int) -> bool:
        """Was this tensor, in the plan's pass, rebuilt from a copy of its own in a narrower dtype?"""
        return self.plan is not None and place in self.plan.made_for.narrow

    def may_narrow(self, place: int) -> bool:
        """May this tensor be held in a narrower dtype? Where time was asked for, the plan must have paid."""
        plan = self.plan
        if plan is None or plan.asked is None:
            return True
        return plan.made_for.narrowing > 0 and (not self.narrows(place) or plan.rebuild[place])

    def why(self, place: int) -> str:
        """Why a tensor is held that the plan does not rebuild."""
        return reasons.PLANNED if self.plan is None else self.plan.made_for.whys.get(place, reasons.PLANNED)

    def end(self, calls: Sequence[Call], read: Callable[[], Pass], share: float) -> str | None:
        """Make a plan from a pass that followed none, or note that one was followed; a reason, if it missed.

        `calls` are those of the whole pass, `read()` its prices, which take time, `share` what it kept of
        stock's bytes.
        """
        if not calls:
            return None
        known, entry = self._known(calls), self._entry
        if entry is not None and len(entry.made_of) != len(calls):
            self._follow(None)
            self._stray(known)
        elif entry is not None:
            return self._followed(known, entry, tuple(calls), share)
        elif self.whole:
            self._make(known, tuple(calls), read)
        return reasons.STRAYED if self.strayed and self.goal.budget is None else None

    def _followed(self, known: _Known, entry: _Entry, calls: tuple[Call, ...], share: float) -> str | None:
        entry.follows += 1
        ratio = entry.plan.ratio
        if share > _PROMISED[0] * ratio + _PROMISED[1] and not entry.plan.is_dear:
            if entry.made_of != calls:  # these sizes need a plan of their own
                known.whole = max(known.whole, 1)
                return None
            entry.misses += 1
            if entry.misses <= _MISSES:
                entry.missed, known.whole = True, max(known.whole, 1)
            return reasons.missed(share, ratio)
        if entry.plan.made_for.calls != calls:  # from now on C++ may follow it in these sizes
            sized = entry.plan._replace(made_for=entry.plan.made_for._replace(calls=calls))
            entry = _Entry(sized, entry.made_of, entry.anew, entry.follows, entry.misses)
            self._add(known, entry)
        if known.last is not None:
            known.last.next = entry
        known.last = entry
        return None

    def _make(self, known: _Known, calls: tuple[Call, ...], read: Callable[[], Pass]) -> None:
        known.whole = max(known.whole - 1, 0)
        before = next((one for one in known.entries if one.made_of == calls), None)
        if before is not None and not before.is_old:
            return  # another pass was waited for
        passed = read()
        if not passed.lines.stock.held:
            return
        entry = _Entry(plan(self.goal, passed), calls, _ANEW)
        if before is not None:
            entry.anew, entry.misses = before.anew * (1 if before.missed else _MORE), before.misses
            known.entries = [one for one in known.entries if one.made_of != calls]
        known.whole, known.last = 0, entry
        self._add(known, entry)
        self._follow(entry)

    def _add(self, known: _Known, entry: _Entry) -> None:
        known.entries.insert(0, entry)
        if sum(len(one.entries) for one in _KNOWN.values()) > _MAX_PLANS:  # sizes that never repeat
            most = max(_KNOWN.values(), key=lambda one: len(one.entries))
            most.entries.pop()

    def _stray(self, known: _Known) -> None:
        known.whole, known.last, self.strayed = _TRIES, None, True

    def _follow(self, entry: _Entry | None) -> None:
        self._entry, self.plan = entry, None if entry is None else entry.plan

    def _known(self, calls: Sequence[Call]) -> _Known:
        if len(_KNOWN) > _MAX_PLANS:
            _KNOWN.clear()
        return _KNOWN.setdefault((self.goal, structure(calls[0])), _Known())

    def _best(self, known: _Known, calls: Sequence[Call]) -> _Entry | None:
        """The first plan that fits so far: if possible in its sizes, then as the passes before took turns."""
        fitting = [one for one in known.entries if self._fits(one, calls, 0)]
        if known.last is not None and known.last.next in fitting:
            fitting.insert(0, known.last.next)
        equal = (one for one in fitting if one.plan.made_for.calls[: len(calls)] == tuple(calls))
        return next(equal, fitting[0] if fitting else None)

    def _fits(self, entry: _Entry, calls: Sequence[Call], first: int) -> bool:
        """Are the calls from `first` on those of the plan's pass, in about its sizes?"""
        if len(entry.made_of) < len(calls):
            return False
        return all(self._is_near(entry.made_of[i], calls[i]) for i in range(first, len(calls)))

    def _is_near(self, planned: Call, call: Call) -> bool:
        if planned == call:
            return True
        most = 1.0 if isinstance(self.goal.peak, int) else _NEAR[1]  # a peak in bytes has no room for more
        return (
            structure(planned) == structure(call) and _NEAR[0] <= size(call) / max(size(planned), 1) <= most
        )
