"""What `budget` and `overhead` choose: the cheapest set of tensors to rebuild, of one forward pass's.

A pass without a plan rebuilds all that it can; from its sizes and prices the plan for the next ones is made.
The prices go by shapes alone, so equal passes have equal plans, in every run and on every rank.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import prod
from typing import Any, NamedTuple

from leannorm.saving.policy import needs_no_norm
from leannorm.saving.values import Value

LONGEST_CHAIN = 3
"""Every third residual block is held; the others are rebuilt, each from the one before."""


def longest_chain_of_sums(value: Value, known: dict[Value, int]) -> int:
    """The largest number of sums of rebuilt tensors on any path to this value; `known` caches results."""
    step = value.step
    if step is None:
        return 0
    if value not in known:
        before = max((longest_chain_of_sums(v, known) for v in step.inputs), default=0)
        known[value] = before + (step.kind == "sum" and not needs_no_norm(value))
    return known[value]


class Goal(NamedTuple):
    """What to reach: a share of stock's bytes or of stock's step time; the other one is None."""

    budget: float | None = None
    overhead: float | None = None


class Part(NamedTuple):
    """The rebuilt tensors of one storage (a tensor and its views), by their index in the forward pass.

    `seconds`: the price of a rebuild. `sums`: how many sums of rebuilt tensors in a row it depends on. In a
    chain of residual blocks, each rebuilt from the one before, all blocks are in memory at once when the
    backward pass reaches the last: this raises peak memory.
    """

    places: tuple[int, ...]
    nbytes: int
    seconds: float
    sums: int


class Pass(NamedTuple):
    """What a forward pass saved: node and layout of every tensor, and the parts that can be rebuilt.

    `kept`: bytes that stay if every part is rebuilt. `seconds`: the price of stock's whole step. `always`:
    bytes of what is rebuilt under every plan, such as masks held as bits. `narrow`: the tensors, by index,
    that are rebuilt from copies in a narrower dtype.
    """

    calls: tuple[tuple[Any, ...], ...]
    parts: tuple[Part, ...]
    kept: int
    seconds: float
    always: int = 0
    narrow: frozenset[int] = frozenset()

    @property
    def stock(self) -> int:
        """Bytes that stock autograd keeps."""
        return self.kept + self.always + sum(part.nbytes for part in self.parts)

    def resized(self, calls: Sequence[tuple[Any, ...]]) -> Pass:
        """The same pass at other sizes, such as another sequence length; bytes and prices in proportion."""
        ratios = [size(new) / max(size(old), 1) for new, old in zip(calls, self.calls, strict=True)]
        parts = [
            part._replace(nbytes=round(part.nbytes * ratio), seconds=part.seconds * ratio)
            for part in self.parts
            for ratio in [ratios[part.places[0]]]
        ]
        whole = sum(map(size, calls)) / max(sum(map(size, self.calls)), 1)
        kept, always = round(self.kept * whole), round(self.always * whole)
        return Pass(tuple(calls), tuple(parts), kept, self.seconds * whole, always, self.narrow)


def size(call: tuple[Any, ...]) -> int:
    """Elements of a call's tensor."""
    return prod(call[1])


def structure(call: tuple[Any, ...]) -> Hashable:
    """A call without its sizes: node, number of dims, dtype."""
    kind, shape, _, dtype = call
    return kind, len(shape), dtype


class RebuildPlan(NamedTuple):
    """For every tensor that a forward pass saved, in order, whether it is rebuilt.

    `kept_bytes`, `stock_bytes`: of the pass that it was made for. `seconds`: the price of what is rebuilt.
    """

    made_for: Pass
    rebuild: tuple[bool, ...]
    kept_bytes: int
    stock_bytes: int
    seconds: float

    @property
    def ratio(self) -> float:
        """Planned kept bytes over those of stock autograd."""
        return self.kept_bytes / max(self.stock_bytes, 1)

    @property
    def overhead(self) -> float:
        """The price of what is rebuilt over that of stock's step."""
        return self.seconds / self.made_for.seconds if self.made_for.seconds else 0.0


def _cost(part: Part) -> tuple[bool, float, tuple[int, ...]]:
    return part.sums > 0, part.seconds / max(part.nbytes, 1), part.places


def plan(goal: Goal, made_for: Pass) -> RebuildPlan:
    """The cheapest set of parts, in seconds per byte, that meets the goal.

    Parts that depend on sums come last, whatever their cost. In a chain of sums every third one is held,
    unless a budget can only be met by rebuilding it too. Costs add up, since a tensor that several steps need
    is rebuilt once. Holding a tensor never makes another one harder to rebuild, so every subset of the parts
    is a valid plan. If the last, large parts free more than a budget asks, the slowest chosen parts that fit
    in the difference are held.
    """
    parts, starts = made_for.parts, dict[int, Part]()
    for part in sorted(parts):  # the first part that depends on n sums is the n-th sum itself
        starts.setdefault(part.sums, part)
    links = [part for sums, part in starts.items() if sums and sums % LONGEST_CHAIN == 0]
    candidates = sorted((part for part in parts if part not in links), key=_cost)
    if goal.budget is not None:
        most = goal.budget * made_for.stock
        chosen = _within_bytes(most, made_for.stock - made_for.always, candidates, links)
    else:
        chosen = _within_seconds(goal.overhead or 0.0, made_for.seconds, candidates)
    rebuilt = {place for part in chosen for place in part.places}
    kept = made_for.stock - made_for.always - sum(part.nbytes for part in chosen)
    flags = tuple(i in rebuilt for i in range(len(made_for.calls)))
    return RebuildPlan(made_for, flags, kept, made_for.stock, sum(part.seconds for part in chosen))


def _within_bytes(most: float, stock: int, candidates: list[Part], links: list[Part]) -> list[Part]:
    kept, chosen = stock, []
    without = stock - sum(part.nbytes for part in candidates)
    if without > most >= without - sum(part.nbytes for part in links):
        candidates = [*candidates, *links]
    for part in candidates:
        if kept <= most:
            break
        chosen.append(part)
        kept -= part.nbytes
    for part in sorted(chosen, key=lambda part: (part.sums == 0, -part.seconds, part.places)):
        if kept + part.nbytes <= most:
            chosen.remove(part)
            kept += part.nbytes
    return chosen


_STEP = 1e-3  # of stock's step time


def _within_seconds(overhead: float, stock: float, candidates: list[Part]) -> list[Part]:
    """The cheapest parts that fit in the time, or those that fit in less of it, if these free more.

    A large part that just fits may shut out others that are more together. With every thousandth of stock's
    step up to the time looked at, more time never holds more.
    """
    if sum(part.seconds for part in candidates) <= overhead * stock:
        return candidates
    best, most = list[Part](), -1
    for i in range(int(round(overhead / _STEP, 6)) + 1 if stock else 1):
        chosen, left = list[Part](), i * _STEP * stock
        for part in candidates:
            if part.seconds <= left:
                chosen.append(part)
                left -= part.seconds
        freed = sum(part.nbytes for part in chosen)
        if freed > most:
            best, most = chosen, freed
    return best
