"""Searches that found nothing: at the same place of the next passes, the same tensor is held without one, in
fewer bytes where it was.

A pass is like the one before if a line of the program opened both; a tensor, if as many were saved before it
and kind of node and layout are the same. Two passes in a row must have searched the same in vain. To hold a
tensor is always exact. Whether one could be rebuilt by now is searched again every so many passes, and in the
pass behind one that was not like the others.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence

from leannorm.saving.graph import kind_of
from leannorm.saving.narrowed import POOLS
from leannorm.saving.policy import Policy
from leannorm.saving.search import Missing, Visit, is_view_of_held
from leannorm.saving.steps import Step
from leannorm.saving.values import Value

_EVERY = 16  # passes
_MAX_PLACES = 64

_Found = dict[int, tuple[Hashable, str]]  # by order of packing: kind of node and layout, and why it is held
_BEFORE: dict[Hashable, tuple[int, _Found]] = {}  # by place: of the last pass, and how many were like it


class Vain:
    """What one pass may hold without a search, and what the next one may; nothing where `place` is None."""

    def __init__(self, place: Hashable, policy: Policy) -> None:
        self._place, self._policy = place, policy
        self._like, self._last = _BEFORE.get(place, (0, {}))
        self._before = self._last if self._like % _EVERY else {}
        self._found = list[tuple[int, Hashable, weakref.ref[Value]]]()

    def told(self, order: int, seen_as: Hashable) -> str | None:
        """Why such a tensor was held in the last pass; None if it was not, or must be searched. Also called
        from C++."""
        known = self._before.get(order)
        return known[1] if known is not None and known[0] == seen_as else None

    def note(
        self,
        order: int,
        seen_as: Hashable,
        value: Value,
        told: str | None,
        found: Step | Missing,
        visits: Sequence[Visit] | None,
    ) -> None:
        """This tensor is held, perhaps in fewer bytes: it was `told`, or what its search `found` is nothing,
        or ruled out.

        Not after a search that narrows what pooling holds on its way.
        """
        searched = visits is not None and not any(kind_of(visit.node) in POOLS for visit in visits)
        in_vain = isinstance(found, Missing) or is_view_of_held(found) or not self._policy.allows(found)
        if told is not None or (searched and in_vain):
            self.again(order, seen_as, value)

    def again(self, order: int, seen_as: Hashable, value: Value) -> None:
        """The next pass may hold such a tensor without a search. Also called from C++."""
        self._found.append((order, seen_as, weakref.ref(value)))

    def close(self) -> None:
        """At the end of the pass: which of them are held still."""
        if self._place is None:
            return
        if len(_BEFORE) >= _MAX_PLACES:
            _BEFORE.clear()
        alive = [(order, seen_as, reference()) for order, seen_as, reference in self._found]
        held = {
            order: (seen_as, v.why)
            for order, seen_as, v in alive
            if v is not None and (v.step is None or v.from_narrow)
        }
        _BEFORE[self._place] = self._like + 1 if held == self._last else 0, held
