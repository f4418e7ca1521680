"""What to rebuild: norms and what is as cheap, cheap convolutions too, or as much as a budget asks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch

from leannorm._errors import InputError
from leannorm.saving.products import PRODUCTS
from leannorm.saving.values import Step, Value

FLOPS_PER_BYTE = 192.0
"""`recompute="conv"`: what a convolution or a matrix product puts out is rebuilt if it takes no more
operations per byte: in float32, of a layer with up to 384 inputs to each output."""


FEW_PARTS = 4
"""A concatenation of so many parts is rebuilt even where a part, not at hand, must be copied for it."""


MUCH_LARGER = 32
"""A tensor is held if the largest one so far is so many times its size: a rebuild takes as many calls for
little memory."""


LONGEST_CHAIN = 3
"""`budget=`: of so many residual blocks in a row, each rebuilt from the one before, one is held."""


class Record(NamedTuple):
    """One tensor that the forward pass saved: what made it, what it weighs, and what became of it.

    `outcome` is False for a tensor that is held, and else the time of one rebuild, measured when a step of
    its kind was first met.
    """

    node: str
    shape: torch.Size
    dtype: torch.dtype
    nbytes: int
    outcome: float | bool

    @property
    def rebuilt(self) -> bool:
        return self.outcome is not False

    @property
    def seconds(self) -> float | None:
        return float(self.outcome) if self.rebuilt else None


class Policy:
    """Decides by the kind of step and by size, or for `everything` that can be rebuilt.

    Convolutions and matrix products: up to `flops_per_byte`. Sums: of what is held. A sum of norms' outputs
    (a residual connection) would take those norms' time again for one tensor; one of tensors that are held,
    scaled or seen from another side takes an addition.
    Concatenations: of parts that are at hand, or can be copied. A dense block concatenates ever more parts,
    one of them new, and would spend more time on this than on its norms.
    """

    def __init__(self, flops_per_byte: float, everything: bool = False) -> None:
        self.flops_per_byte, self.everything = flops_per_byte, everything

    def considers(self, node: str) -> bool:
        return self.flops_per_byte > 0 or node not in PRODUCTS

    def may_add(self, value: Value | None) -> bool:
        """May a sum take this input? None: it is not at hand, and would first have to be rebuilt itself."""
        return self.everything or (value is not None and _of_held(value))

    def is_worth(self, size: int, largest: int) -> bool:
        """Has a tensor size enough, beside the largest one so far?"""
        return self.everything or size * MUCH_LARGER > largest

    def may_copy(self, parts: int) -> bool:
        """May parts be copied for a concatenation of so many?"""
        return self.everything or parts <= FEW_PARTS

    def allows(self, step: Step, nbytes: int) -> bool:
        if step.kind == "sum":
            return self.everything or all(map(_of_held, step.inputs))
        return step.kind != "product" or step.flops <= self.flops_per_byte * nbytes


NORM, CONV, LEANEST = Policy(0.0), Policy(FLOPS_PER_BYTE), Policy(float("inf"), everything=True)


def _of_held(value: Value) -> bool:
    """Does it take no norm or activation to rebuild, but for a product, whose operations were weighed?"""
    step = value.step
    if step is None or step.kind == "product":
        return True
    return (step.view or step.kind in ("scale", "sum")) and all(_of_held(v) for v in step.inputs)


def sums_in_a_row(value: Value, known: dict[Value, int]) -> int:
    """How many sums of other than held tensors lie on the way to it, at most; `known` are earlier answers."""
    step = value.step
    if step is None:
        return 0
    if value not in known:
        before = max((sums_in_a_row(v, known) for v in step.inputs), default=0)
        known[value] = before + (step.kind == "sum" and not _of_held(value))
    return known[value]


class Plan(NamedTuple):
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


def plan(budget: float, calls: Sequence[Hashable], parts: Sequence[Part], kept: int, stock: int) -> Plan:
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
    return Plan(tuple(calls), tuple(i in rebuilt for i in range(len(calls))), kept, stock, seconds)


def check(recompute: str, budget: float | None) -> None:
    if recompute not in ("norm", "conv"):
        raise InputError(f'recompute is "norm" or "conv"; got {recompute!r}')
    if budget is not None and not 0 < budget <= 1:
        raise InputError(
            f"budget is a share of the bytes that stock autograd keeps, in (0, 1]; got {budget!r}"
        )
