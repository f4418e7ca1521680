"""Which tensors of a forward pass are rebuilt: a plan is the point that a goal takes on the lines of a step.

A pass without a plan rebuilds all that it can. Its sizes and prices make the plan for the next ones.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from copy import copy
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple, cast

from leannorm.planning.goal import Goal
from leannorm.planning.lines import Lines
from leannorm.planning.outcome import Outcome
from leannorm.planning.plan import Plan, by_overhead
from leannorm.planning.plan import plan as point_for
from leannorm.saving.reasons import Cause

Taken = list[tuple[str, float]]  # by call of an operator, its name and the seconds that it took
Call = tuple[Any, ...]  # node, shape, strides and dtype of a saved tensor, and its number among all of them


class Pass(NamedTuple):
    """What a forward pass saved, in order, and its step as the planner reads it.

    `places`: for each value of the step, the tensors that share its memory, by index. `pieces`: for each
    value that no node saves, the tensors that may be dropped if it is kept, each with the value's position
    among what that tensor is made of. `whys`: for each tensor that cannot be rebuilt, by index, the reason.
    `again`: returns the same pass at the prices of another one, from the seconds of its calls; None if they
    say nothing. `recording`: the share of a step that recording took, 0 if it was not measured.
    """

    calls: tuple[Call, ...]
    lines: Lines
    places: tuple[tuple[int, ...], ...]
    pieces: Mapping[int, tuple[tuple[int, int], ...]] = {}
    hooks: float = 0.0  # seconds that the hooks themselves take if everything is kept
    whys: Mapping[int, Cause] = {}
    again: Callable[[Taken], Pass | None] | None = None
    recording: float = 0.0

    def without_lines(self) -> Pass:
        """The pass without its step, which takes megabytes. Passes that follow the plan do not read it."""
        return self._replace(lines=cast("Any", None), places=(), pieces={}, again=None)

    def rebuilding_in(self, times: float) -> Pass:
        """The pass if rebuilds take this many times the share of the step that its prices say. Its lines stay
        the same: only the step that they are compared with is longer or shorter."""
        lines = copy(self.lines)
        lines.step = replace(lines.step, seconds=lines.step.seconds / times)
        return self._replace(lines=lines, hooks=self.hooks / times)

    @property
    def share_of_hooks(self) -> float:
        """What the hooks themselves take, as a share of a plain PyTorch step: measured, or else by price."""
        return self.recording or self.hooks / max(self.lines.step.seconds, 1e-12)


def size(call: Call) -> int:
    """The number of elements of a call's tensor."""
    return prod(call[1])


def structure(call: Call) -> Hashable:
    """A call without its sizes: node, number of dims, dtype, and its number."""
    kind, shape, _, dtype, number = call
    return kind, len(shape), dtype, number


class RebuildPlan(NamedTuple):
    """What a plan does with every tensor that a forward pass saved, in order.

    `rebuild` and `move`: whether the tensor is rebuilt, or moved to the host. `take`: what is kept instead of
    it, by position among what it is made of. `chosen`: the point. `made_for`: the pass. `hooks`: its
    `share_of_hooks`. `asked`: the overhead that was allowed, if any. `measured`: the overhead that steps have
    taken, once it is known. `is_watched`: whether it is measured.
    """

    made_for: Pass
    rebuild: tuple[bool, ...]
    move: tuple[bool, ...]
    take: tuple[tuple[int, ...], ...]
    chosen: Plan
    hooks: float
    asked: float | None = None
    measured: float | None = None
    is_watched: bool = False

    def __repr__(self) -> str:
        """One line: a plan's fields would fill pages, as they have an entry for each tensor."""
        return f"RebuildPlan({self.in_words()})"

    def in_words(self) -> str:
        """What is planned; if an overhead was asked for, also what was asked and measured."""
        planned = (
            f"{self.ratio:.2f} of the bytes and {self.peak_ratio:.2f} of the peak at {1 + self.overhead:.2f}"
        )
        point = self.chosen.point
        if point.away:
            planned = f"{point.away / max(self.stock_bytes, 1):.2f} of the bytes on the host, {planned}"
        if self.asked is None:
            return f"{planned} of its time"
        taken = "not measured yet" if self.measured is None else f"{1 + self.measured:.2f} measured"
        return f"{planned} of its time, {1 + self.asked:.2f} asked, {taken}"

    @property
    def kept_bytes(self) -> int:
        """Bytes that the plan keeps in the pass that it was made for."""
        return self.chosen.point.held

    @property
    def stock_bytes(self) -> int:
        """Bytes that plain PyTorch keeps in that pass."""
        return self.chosen.stock.held

    @property
    def ratio(self) -> float:
        """The planned kept bytes, as a share of plain PyTorch's."""
        return self.chosen.ratio

    @property
    def peak_ratio(self) -> float:
        """The planned peak of a step, as a share of plain PyTorch's."""
        return self.chosen.peak_ratio

    @property
    def overhead(self) -> float:
        """The price of rebuilds and hooks, as a share of a plain PyTorch step's."""
        return self.chosen.overhead + (0.0 if self.is_dear else self.hooks)

    @property
    def is_dear(self) -> bool:
        """Whether the hooks alone take more time than was allowed."""
        return not self.is_watched and self.asked is not None and self.hooks > self.asked


def plan(goal: Goal, made_for: Pass) -> RebuildPlan:
    """The tensors to rebuild, by the point of the pass's lines that the goal asks for.

    Every choice can be followed, since a tensor that is kept never makes another one harder to rebuild.
    """
    asked, hooks = goal.overhead if goal.promises_time else None, made_for.share_of_hooks
    if asked is not None:
        goal = goal._replace(overhead=max(asked - hooks, 0.0))
    elif goal.overhead is not None and goal.free is not None:
        # what recording takes is a part of the tenth, but at least half of that is left for rebuilds
        goal = goal._replace(overhead=max(goal.overhead - made_for.recording, goal.overhead / 2))
    chosen = point_for(made_for.lines, goal)
    if asked is not None and hooks > asked:  # then passes are left as they are
        chosen = chosen._replace(point=chosen.stock)
    return RebuildPlan(made_for, *_followed(made_for, chosen.point), chosen, hooks, asked)


def _followed(
    made_for: Pass, point: Outcome
) -> tuple[tuple[bool, ...], tuple[bool, ...], tuple[tuple[int, ...], ...]]:
    """For each place, whether it is rebuilt, whether it is moved, and what is kept instead of it."""
    rebuilt = {place for i in point.again for place in made_for.places[i]}
    held = {place for places in made_for.places for place in places} - rebuilt
    # tensors without a place of their own, views and repeats, are rebuilt wherever the pass did so
    moved, places = {place for i in point.moved for place in made_for.places[i]}, range(len(made_for.calls))
    take: dict[int, tuple[int, ...]] = {}
    for place, position in (one for i in point.kept for one in made_for.pieces.get(i, ())):
        take[place] = (*take.get(place, ()), position)
    return (
        tuple(i not in held for i in places),
        tuple(i in moved for i in places),
        tuple(take.get(i, ()) for i in places),
    )


def rungs(full: RebuildPlan) -> tuple[RebuildPlan, ...]:
    """The plans for all overheads, the smallest first; the measurement of steps chooses one of them."""
    passed, whole = full.made_for, full.made_for.without_lines()
    made = list[RebuildPlan]()
    for point in by_overhead(passed.lines):
        nothing = frozenset[int]()
        short = point._replace(kept=nothing, again=nothing, moved=nothing, alive=(point.peak,))
        rebuild, move, take = _followed(passed, point)
        chosen = full.chosen._replace(point=short)
        made.append(RebuildPlan(whole, rebuild, move, take, chosen, full.hooks, full.asked, is_watched=True))
    return tuple(made)
