"""What a goal chooses of one forward pass: the lines of its step, and a point of them.

A pass without a plan rebuilds all that it can; from its sizes and prices the plan for the next ones is made.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from math import prod
from typing import Any, NamedTuple, cast

from leannorm.planning.goal import Goal
from leannorm.planning.lines import Lines
from leannorm.planning.plan import Plan, by_overhead
from leannorm.planning.plan import plan as point_for
from leannorm.planning.timeline import Outcome

Taken = list[tuple[str, float]]  # by call of an operator its name, and the seconds that it took
Call = tuple[Any, ...]  # node, shape, strides and dtype of a tensor, and its number among all that was saved


class Pass(NamedTuple):
    """What a forward pass saved, in order, and its step as the planner reads it.

    `places`: for each value of the step, the tensors that share its memory, by index. `whys`: why others
    could not be rebuilt. `again`: the same at the prices of another pass, by the seconds of its calls; None
    where these say nothing.
    """

    calls: tuple[Call, ...]
    lines: Lines
    places: tuple[tuple[int, ...], ...]
    hooks: float = 0.0  # seconds of the hooks themselves, where everything is held
    whys: Mapping[int, str] = {}
    again: Callable[[Taken], Pass | None] | None = None

    def without_lines(self) -> Pass:
        """What passes that follow a plan read of its pass: the step itself takes megabytes."""
        return self._replace(lines=cast("Any", None), places=(), again=None)

    @property
    def share_of_hooks(self) -> float:
        """The price of the hooks themselves over that of stock's step."""
        return self.hooks / max(self.lines.step.seconds, 1e-12)


def size(call: Call) -> int:
    """Elements of a call's tensor."""
    return prod(call[1])


def structure(call: Call) -> Hashable:
    """A call without its sizes: node, number of dims, dtype, number."""
    kind, shape, _, dtype, number = call
    return kind, len(shape), dtype, number


class RebuildPlan(NamedTuple):
    """For every tensor that a forward pass saved, in order, whether it is rebuilt; and what was `chosen`.

    `made_for`: the pass. `hooks`: its `share_of_hooks`. `asked`: the overhead
    that was allowed, if one was. `measured`: the overhead that steps have taken, once that is known.
    `is_watched`: is it going to be?
    """

    made_for: Pass
    rebuild: tuple[bool, ...]
    chosen: Plan
    hooks: float
    asked: float | None = None
    measured: float | None = None
    is_watched: bool = False

    def __repr__(self) -> str:
        """One line: a plan has a number for each tensor of its pass."""
        return f"RebuildPlan({self.in_words()})"

    def in_words(self) -> str:
        """What is planned; of a time that was asked for, what was asked, planned and measured."""
        planned = (
            f"{self.ratio:.2f} of the bytes and {self.peak_ratio:.2f} of the peak at {1 + self.overhead:.2f}"
        )
        if self.asked is None:
            return f"{planned} of its time"
        taken = "not measured yet" if self.measured is None else f"{1 + self.measured:.2f} measured"
        return f"{planned} of its time, {1 + self.asked:.2f} asked, {taken}"

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept, of the pass that the plan was made for."""
        return self.chosen.point.held

    @property
    def stock_bytes(self) -> int:
        """Bytes that stock autograd keeps there."""
        return self.chosen.stock.held

    @property
    def ratio(self) -> float:
        """Planned kept bytes over those of stock autograd."""
        return self.chosen.ratio

    @property
    def peak_ratio(self) -> float:
        """The planned peak of a step over stock's."""
        return self.chosen.peak_ratio

    @property
    def overhead(self) -> float:
        """The price of what is rebuilt, and of the hooks, over that of stock's step."""
        return self.chosen.overhead + (0.0 if self.is_dear else self.hooks)

    @property
    def is_dear(self) -> bool:
        """Do the hooks alone take more time than was allowed?"""
        return not self.is_watched and self.asked is not None and self.hooks > self.asked


def plan(goal: Goal, made_for: Pass) -> RebuildPlan:
    """The tensors to rebuild, by the point of the pass's lines that the goal asks for.

    Holding a tensor never makes another one harder to rebuild, so every choice can be followed.
    """
    asked, hooks = goal.overhead if goal.promises_time else None, made_for.share_of_hooks
    if asked is not None:
        goal = goal._replace(overhead=max(asked - hooks, 0.0))
    chosen = point_for(made_for.lines, goal)
    if asked is not None and hooks > asked:  # then passes are left as they are
        chosen = chosen._replace(point=chosen.stock)
    return RebuildPlan(made_for, _rebuilt(made_for, chosen.point), chosen, hooks, asked)


def _rebuilt(made_for: Pass, point: Outcome) -> tuple[bool, ...]:
    rebuilt = {place for i in point.again for place in made_for.places[i]}
    held = {place for places in made_for.places for place in places} - rebuilt
    # what has no place of its own, views and repeats, is as in the pass
    return tuple(i not in held for i in range(len(made_for.calls)))


def rungs(full: RebuildPlan) -> tuple[RebuildPlan, ...]:
    """The plans for all overheads, the least first: what is measured takes one of them."""
    passed, whole = full.made_for, full.made_for.without_lines()
    made = list[RebuildPlan]()
    for point in by_overhead(passed.lines):
        short = point._replace(kept=frozenset(), again=frozenset(), alive=(point.peak,))
        chosen = full.chosen._replace(point=short)
        made.append(
            full._replace(made_for=whole, rebuild=_rebuilt(passed, point), chosen=chosen, is_watched=True)
        )
    return tuple(made)
