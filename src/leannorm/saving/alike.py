"""Which tensors a pass rebuilds once no plan fits it: those that the plan it has followed rebuilds.

Some programs leave out other layers in each pass, or repeat a block as often as the input needs. Their passes
differ from every plan, but their tensors do not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from math import prod
from typing import NamedTuple

from leannorm.saving.plan import Call, RebuildPlan, structure


class Alike:
    """The choices of a plan, by what a tensor is: its node, shape, strides and dtype. In other sizes, by its
    structure.

    A plan may rebuild some of many equal tensors. The first of them in a pass is treated as the first one in
    the plan's pass, and so on.
    """

    def __init__(self, plan: RebuildPlan, calls: Sequence[Call], budget: float) -> None:
        """`calls`: the pass so far, which has followed the plan. `budget`: the share of its bytes to keep."""
        self._budget, self._kept, self._all = budget, 0, 0
        self._numbers = set[int]()
        self._choices = defaultdict[Hashable, list[_Choice]](list)
        self._met = defaultdict[Hashable, int](int)
        for place, call in enumerate(plan.made_for.calls):
            choice = _Choice(plan.rebuild[place], place in plan.made_for.whys)
            self._choices[call[:-1]].append(choice)
            self._choices[structure(call)].append(choice)
        for call in calls:
            self._count(call, self._next(call).keeps)

    def rebuilds(self, call: Call) -> bool:
        """Whether the tensor that is saved now may be rebuilt; also if the plan has none like it."""
        choice, new = self._next(call), self._new(call)
        fits = choice.is_source or self._kept + new <= self._budget * (self._all + new)
        self._count(call, choice.keeps and fits)
        return choice.rebuilds or not fits

    def _next(self, call: Call) -> _Choice:
        kind = call[:-1] if call[:-1] in self._choices else structure(call)
        choices, met = self._choices.get(kind), self._met[kind]
        self._met[kind] += 1
        return _REBUILT if choices is None else choices[met % len(choices)]

    def _new(self, call: Call) -> int:
        """Its bytes, if they are not counted yet."""
        return 0 if call[-1] in self._numbers else prod(call[1]) * int(call[3].itemsize)

    def _count(self, call: Call, keeps: bool) -> None:
        new = self._new(call)
        self._numbers.add(call[-1])
        self._all, self._kept = self._all + new, self._kept + keeps * new


class _Choice(NamedTuple):
    """Whether a plan rebuilds a tensor, and whether it is kept in any case since nothing can rebuild it."""

    rebuilds: bool
    is_source: bool = False

    @property
    def keeps(self) -> bool:
        return self.is_source or not self.rebuilds


_REBUILT = _Choice(True)
