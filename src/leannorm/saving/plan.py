"""What a goal chooses of one forward pass: the lines of its step, and a point of them.

A pass without a plan rebuilds all that it can; from its sizes and prices the plan for the next ones is made.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from leannorm.planning.goal import Goal
from leannorm.planning.lines import Lines
from leannorm.planning.plan import Plan
from leannorm.planning.plan import plan as point_for

Call = tuple[Any, ...]  # node, shape, strides and dtype of a tensor that was saved


class Pass(NamedTuple):
    """What a forward pass saved, in order, and its step as the planner reads it.

    `places`: for each value of the step, the tensors that share its memory, by index. `narrow`: the tensors,
    by index, that are rebuilt from copies in a narrower dtype. `whys`: why others could not be rebuilt.
    """

    calls: tuple[Call, ...]
    lines: Lines
    places: tuple[tuple[int, ...], ...]
    narrow: frozenset[int] = frozenset()
    hooks: float = 0.0  # seconds of the hooks themselves, where everything is held
    whys: Mapping[int, str] = {}

    @property
    def share_of_hooks(self) -> float:
        """The price of the hooks themselves over that of stock's step."""
        return self.hooks / max(self.lines.step.seconds, 1e-12)

    def resized(self, calls: Sequence[Call]) -> Pass:
        """The same pass at other sizes, such as another sequence length; bytes and prices in proportion."""
        ratios = [size(new) / max(size(old), 1) for new, old in zip(calls, self.calls, strict=True)]
        whole = sum(map(size, calls)) / max(sum(map(size, self.calls)), 1)
        of_values = [ratios[places[0]] if places else whole for places in self.places]
        return self._replace(calls=tuple(calls), lines=self.lines.resized(of_values, whole))


def size(call: Call) -> int:
    """Elements of a call's tensor."""
    return prod(call[1])


def structure(call: Call) -> Hashable:
    """A call without its sizes: node, number of dims, dtype."""
    kind, shape, _, dtype = call
    return kind, len(shape), dtype


class RebuildPlan(NamedTuple):
    """For every tensor that a forward pass saved, in order, whether it is rebuilt; and what was `chosen`.

    `asked`: the overhead that was allowed, if one was.
    """

    made_for: Pass
    rebuild: tuple[bool, ...]
    chosen: Plan
    asked: float | None = None

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
        return self.asked is not None and self.hooks > self.asked

    @property
    def hooks(self) -> float:
        """As `Pass.share_of_hooks`."""
        return self.made_for.share_of_hooks


def plan(goal: Goal, made_for: Pass) -> RebuildPlan:
    """The tensors to rebuild, by the point of the pass's lines that the goal asks for.

    Holding a tensor never makes another one harder to rebuild, so every choice can be followed.
    """
    asked = goal.overhead
    if asked is not None:
        goal = goal._replace(overhead=max(asked - made_for.share_of_hooks, 0.0))
    chosen = point_for(made_for.lines, goal)
    rebuilt = {place for i in chosen.point.again for place in made_for.places[i]}
    return RebuildPlan(made_for, tuple(i in rebuilt for i in range(len(made_for.calls))), chosen, asked)
