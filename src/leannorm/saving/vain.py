"""Searches that found nothing: at the same place of the next passes, the same tensor is held without one, in
fewer bytes where it was.

A pass is like one before if a line of the program opened both and it asks for the same tensors: as many were
saved before each, kind of node and layout are the same. So models, and lengths of sequences, may take turns.
Two such passes must have searched the same in vain. To hold a tensor is always exact. Whether one could be
rebuilt by now is searched again every so many passes.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from leannorm.saving.graph import kind_of
from leannorm.saving.narrowed import POOLS
from leannorm.saving.policy import Policy
from leannorm.saving.search import Missing, Visit, is_view_of_held
from leannorm.saving.steps import Step
from leannorm.saving.values import Value

_EVERY = 17  # passes of a place; a prime, so that each of those that take turns comes to be searched
_MAX_PLACES, _MAX_LIKE, _MOST_ASKED = 64, 8, 1 << 15

_Held = dict[int, tuple[Hashable, str]]  # by order of packing: kind of node and layout, and why


class _Pass(NamedTuple):
    """What a pass asked for, kind of node and layout by order of packing, and what it held.

    `settled`: held as in a pass before it.
    """

    asked: dict[int, Hashable]
    held: _Held
    settled: bool


_BEFORE: dict[Hashable, tuple[int, list[_Pass]]] = {}  # by place: how many passes, and those that differ


class Vain:
    """What one pass may hold without a search, and what the next one may; nothing where `place` is None."""

    def __init__(self, place: Hashable, policy: Policy) -> None:
        self._place, self._policy = place, policy
        self._passes, self._known = _BEFORE.get(place, (0, []))
        # those that this pass may be like, by what it has asked, and what each held next, the last first
        self._like = [(one, [*reversed(one.held)]) for one in self._known]
        self._noted = list[tuple[int, Hashable, weakref.ref[Value]]]()
        self._asked = dict[int, Hashable]()
        self._answer: str | None = None

    def told(self, order: int, seen_as: Hashable) -> str | None:
        """Why such a tensor was held in the passes like this one; None if it was not, or must be searched.

        Called from C++ too, and then again from Python.
        """
        if len(self._asked) > _MOST_ASKED:  # a pass around many steps
            return None
        if order not in self._asked:
            self._asked[order] = seen_as
            self._answer = self._told(order, seen_as)
        return self._answer

    def _told(self, order: int, seen_as: Hashable) -> str | None:
        alike = list[tuple[_Pass, list[int]]]()
        for one, left in self._like:
            if one.asked.get(order) == seen_as and (not left or left[-1] >= order):
                if left and left[-1] == order:
                    left.pop()
                alike.append((one, left))
        self._like = alike
        if not alike or any(order not in one.held for one, _ in alike):
            return None  # where one of them has rebuilt it, this pass may, too
        newest = alike[-1][0]
        return newest.held[order][1] if newest.settled and self._passes % _EVERY else None

    def note(
        self,
        order: int,
        seen_as: Hashable,
        value: Value,
        told: str | None,
        outcome: Step | Missing,
        visits: Sequence[Visit] | None,
    ) -> None:
        """This tensor is held, perhaps in fewer bytes: it was `told`, or the `outcome` of its search is
        nothing, or ruled out.

        Not after a search that narrows what pooling holds on its way.
        """
        searched = visits is not None and not any(kind_of(visit.node) in POOLS for visit in visits)
        in_vain = isinstance(outcome, Missing) or is_view_of_held(outcome) or not self._policy.allows(outcome)
        if told is not None or (searched and in_vain):
            self.again(order, seen_as, value)

    def again(self, order: int, seen_as: Hashable, value: Value) -> None:
        """The next pass may hold such a tensor without a search. Also called from C++."""
        self._noted.append((order, seen_as, weakref.ref(value)))

    def close(self) -> None:
        """At the end of the pass: which of them are held still."""
        if self._place is None or not self._asked:
            return
        if len(_BEFORE) >= _MAX_PLACES:
            _BEFORE.clear()
        alive = [(order, seen_as, reference()) for order, seen_as, reference in self._noted]
        held: _Held = {
            order: (seen_as, v.why)
            for order, seen_as, v in alive
            if v is not None and (v.step is None or v.from_narrow)
        }
        like = [one for one, left in self._like if not left]
        asked = self._asked | {order: seen_as for order, (seen_as, _) in held.items()}
        this = _Pass(asked, held, any(one.held == held for one in like))
        others = [one for one in self._known if one not in like]
        _BEFORE[self._place] = self._passes + 1, [*others[1 - _MAX_LIKE :], this]
