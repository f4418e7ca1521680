"""What a budget chooses: the cheapest set of tensors to rebuild, from what one forward pass measured."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from leannorm.saving.policy import needs_no_norm
from leannorm.saving.values import Value

LONGEST_CHAIN = 3
"""With `budget=`, every third residual block is held; the others are rebuilt, each from the one before."""


def longest_chain_of_sums(value: Value, known: dict[Value, int]) -> int:
    """The largest number of sums of rebuilt tensors on any path to this value; `known` caches results."""
    step = value.step
    if step is None:
        return 0
    if value not in known:
        before = max((longest_chain_of_sums(v, known) for v in step.inputs), default=0)
        known[value] = before + (step.kind == "sum" and not needs_no_norm(value))
    return known[value]


class RebuildPlan(NamedTuple):
    """For every tensor that a forward pass saved, in order, whether it is rebuilt.

    `calls` identifies the forward pass: the node kind and layout of each saved tensor.
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
    """The rebuilt tensors of one storage (a tensor and its views), by their index in the forward pass.

    `sums`: how many sums of rebuilt tensors in a row it depends on. In a chain of residual blocks, each
    rebuilt from the one before, all blocks are in memory at once when the backward pass reaches the last:
    this raises peak memory.
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

    `kept` are the bytes that stay if every part is rebuilt. Parts that depend on sums come last, whatever
    their cost. In a chain of sums every third one is held, unless the budget can only be met by rebuilding
    it too. Costs add up, since a tensor that several steps need is rebuilt once. Holding a tensor never
    makes another one harder to rebuild, so every subset of the parts is a valid plan. If the last, large
    parts free more than the budget asks, the slowest chosen parts that fit in the difference are held.
    """
    most, starts = budget * stock, dict[int, Part]()
    for part in sorted(parts):  # the first part that depends on n sums is the n-th sum itself
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
