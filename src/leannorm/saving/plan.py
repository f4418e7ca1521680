"""What a budget chooses: the cheapest set of tensors to rebuild, from what one forward pass measured."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from leannorm.saving.policy import of_held
from leannorm.saving.values import Value

LONGEST_CHAIN = 3
"""`budget=`: of so many residual blocks in a row, each rebuilt from the one before, one is held."""


def longest_chain_of_sums(value: Value, known: dict[Value, int]) -> int:
    """The most sums of rebuilt tensors on any path to this value; `known` are earlier answers."""
    step = value.step
    if step is None:
        return 0
    if value not in known:
        before = max((longest_chain_of_sums(v, known) for v in step.inputs), default=0)
        known[value] = before + (step.kind == "sum" and not of_held(value))
    return known[value]


class RebuildPlan(NamedTuple):
    """For every tensor that a forward pass saved, in order, whether it is rebuilt.

    `calls` tells one forward pass from another: the node and layout of each of its tensors.
    """

    calls: tuple[Hashable, ...]
    rebuild: tuple[bool, ...]
    kept_bytes: int
    stock_bytes: int
    seconds: float

    @property
    def ratio(self) -> float:
        """Planned kept bytes over those of stock autograd."""
        return self.kept_bytes / max(self.stock_bytes, 1)


class Part(NamedTuple):
    """Tensors of one memory (a tensor and its views), by their place in the forward pass.

    `sums`: so many sums of rebuilt tensors in a row does it rest on. A chain of residual blocks, each rebuilt
    from the one before, is alive as a whole when the backward pass reaches its end: it costs peak memory.
    """

    places: list[int]
    nbytes: int
    seconds: float
    sums: int


def _cost(part: Part) -> tuple[bool, float, list[int]]:
    return part.sums > 0, part.seconds / max(part.nbytes, 1), part.places


def plan(
    budget: float, calls: Sequence[Hashable], parts: Sequence[Part], kept: int, stock: int
) -> RebuildPlan:
    """The cheapest set, in seconds per byte, that brings what is kept down to `budget` of stock.

    What needs sums comes last, whatever its cost, and of a chain of sums every third is held
    unless only without it the budget can be met.
    `kept` are the bytes that stay if every part is rebuilt. Costs add up, since a tensor that several steps
    need is rebuilt once. Holding a tensor never makes another one harder to rebuild, so every subset of
    what can be rebuilt is a plan. What the last, large parts brought too much of is given back: the
    dearest that there is room for.
    """
    most, starts = budget * stock, dict[int, Part]()
    for part in sorted(parts):  # the first that rests on so many sums is the last of those sums
        starts.setdefault(part.sums, part)
    links = [part for sums, part in starts.items() if sums and sums % LONGEST_CHAIN == 0]
    candidates = sorted((part for part in parts if part not in links), key=_cost)
    kept += sum(part.nbytes for part in parts)
    if kept - sum(part.nbytes for part in candidates) > most >= kept - sum(part.nbytes for part in parts):
        candidates += links
    chosen = []
    for part in candidates:
        if kept <= most:
            break
        chosen.append(part)
        kept -= part.nbytes
    for part in sorted(chosen, key=lambda part: (part.sums == 0, -part.seconds, part.places)):
        if kept + part.nbytes <= most:
            chosen.remove(part)
            kept += part.nbytes
    rebuilt = {place for part in chosen for place in part.places}
    seconds = sum(part.seconds for part in chosen)
    return RebuildPlan(tuple(calls), tuple(i in rebuilt for i in range(len(calls))), kept, stock, seconds)
