"""What a setting rebuilds: norms and other cheap calls, products too, or all that can be rebuilt; and what a
plan answers for one tensor."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from leannorm.saving.reasons import NO_CAUSE, Cause


class Policy(NamedTuple):
    """What a rebuild may call. `products`: convolutions, matrix products and attention that take few
    operations per byte. `everything`: whatever the log can call again, as a plan decides what to keep.
    `sums` and `row`: the most sums and products in a row. `runs`: the most calls for one value; with a plan,
    the longest chain of them.
    """

    products: bool
    everything: bool = False
    sums: int = 2
    runs: int = 32
    row: int = 2
    smallest: int = 1  # elements; a smaller tensor is kept
    by_plan: bool = False

    def with_plan(self) -> Policy:
        """The same, where a plan decides how much is made again in a row."""
        return self._replace(sums=1 << 20, row=1 << 20, runs=2048, by_plan=True)


class Answer(NamedTuple):
    """What happens to a tensor that is saved: whether it may be dropped; if it is kept, whether it is moved,
    and why. `takes`: of the values that it is made of, by position, those that are kept instead. `by_plan`:
    whether a plan decides how much is made again in a row. `places`: for C++, the plan to follow from here
    on, as long as the pass does not differ from it."""

    drops: bool
    moves: bool
    cause: Cause = NO_CAUSE
    takes: Collection[int] = ()
    by_plan: bool = False
    places: Any = None


NORM, CONV, LEANEST = Policy(False), Policy(True), Policy(True, everything=True, row=6)
