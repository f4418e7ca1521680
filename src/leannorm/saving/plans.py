"""All plans of this process, and which of them a forward pass follows, by what it has saved so far."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from leannorm.planning.goal import Goal
from leannorm.saving import reasons
from leannorm.saving.plan import Pass, RebuildPlan, plan, structure

_Key = tuple[Goal, Hashable]  # and the structure of the first tensor
_PLANS: dict[_Key, list[RebuildPlan]] = {}
_STRAYED: set[_Key] = set()  # passes that fitted no plan to their end: the next one is made into a plan
_MAX_PLANS = 256


class Following:
    """One pass, which follows a plan as long as its tensors match those of the plan's pass in all but size.

    A plan for the same sizes is preferred. If no plan fits any more, everything is rebuilt that can be.
    """

    def __init__(self, goal: Goal) -> None:
        self.goal = goal
        self.plan: RebuildPlan | None = None
        self._begun = False
        self.whole = True  # was the pass without a plan from the beginning?

    def rebuilds(self, calls: Sequence[tuple[Any, ...]]) -> bool:
        """May the tensor that was packed last be rebuilt? `calls` are all calls so far."""
        last = len(calls) - 1
        if not self._begun:
            self._begun = True
            key = self._key(calls)
            self.plan = None if key in _STRAYED else _best(_PLANS.get(key, ()), calls)
            self.whole = self.plan is None
        elif self.plan is not None and not _fits(self.plan.made_for.calls[last : last + 1], calls[last:]):
            self.plan = _best(_PLANS.get(self._key(calls), ()), calls)
            if self.plan is None:
                _STRAYED.add(self._key(calls))
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

    def end(self, calls: Sequence[tuple[Any, ...]], read: Callable[[], Pass]) -> None:
        """Make a plan from a pass that followed none, or resize the plan that it followed to its sizes.

        `calls` are those of the whole pass, `read()` its prices, which take time.
        """
        if not calls:
            return
        key, followed = self._key(calls), self.plan
        if followed is not None:
            if followed.made_for.calls == tuple(calls):
                _latest_first(_PLANS.get(key, []), followed)
                return
            if len(followed.made_for.calls) != len(calls):
                _STRAYED.add(key)
                return
            passed = followed.passed.resized(calls)
        elif not self.whole:
            return
        else:
            passed = read()
            if not passed.lines.stock.held:
                return
        made = plan(self.goal, passed)
        if sum(map(len, _PLANS.values())) >= _MAX_PLANS:  # shapes that never repeat must not fill memory
            _PLANS.clear()
        _PLANS.setdefault(key, []).insert(0, made)
        _STRAYED.discard(key)
        self.plan = made

    def _key(self, calls: Sequence[tuple[Any, ...]]) -> _Key:
        return self.goal, structure(calls[0])


def _latest_first(plans: list[RebuildPlan], followed: RebuildPlan) -> None:
    """Of two models that begin alike each pass begins with the plan of the model that ran last."""
    if plans and plans[0] is not followed:
        place = next((i for i, one in enumerate(plans) if one is followed), None)
        if place is not None:
            plans.insert(0, plans.pop(place))


def _best(plans: Sequence[RebuildPlan], calls: Sequence[tuple[Any, ...]]) -> RebuildPlan | None:
    """The first plan that fits so far, if possible in its sizes too."""
    fitting = [p for p in plans if _fits(p.made_for.calls[: len(calls)], calls)]
    equal = (p for p in fitting if p.made_for.calls[: len(calls)] == tuple(calls))
    return next(equal, fitting[0] if fitting else None)


def _fits(planned: Sequence[tuple[Any, ...]], calls: Sequence[tuple[Any, ...]]) -> bool:
    if len(planned) != len(calls):
        return False
    return all(a == b or structure(a) == structure(b) for a, b in zip(planned, calls, strict=True))
