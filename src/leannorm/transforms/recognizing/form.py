"""Which norms does leannorm have, as records of their settings, and which of them may a layer be?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations, product
from typing import NamedTuple

import torch

LOW = (torch.bfloat16, torch.float16)


class UnknownFormError(BaseException):
    """The layer computes none of leannorm's norms; the message says how that shows.

    Not an `Exception`, because a layer's own code that handles those must not handle this one.
    """


class Form(NamedTuple):
    """A norm that leannorm has: `kind` is "rms", "layer", "group" or "running" (a frozen batch norm).

    `dim` is the one normalized axis; None for the `last` last ones. The offset is added to the weight in
    `offset_dtype`. `groups` is their number, of a group norm or of an RMS norm of parts of its rows.
    """

    kind: str
    eps: float
    dim: int | None = None
    weight: str | None = None
    bias: str | None = None
    offset: float = 0.0
    offset_dtype: torch.dtype | None = None
    cast: str = "after"
    last: int = 1
    groups: int = 1
    gate: str | None = None
    gate_first: bool = False
    mean: str | None = None
    var: str | None = None

    @property
    def function(self) -> str:
        """The name of the function of ours that computes it."""
        gated = "gated_" if self.gate and self.gate != "sigmoid" else ""
        return {"running": "batch_norm"}.get(self.kind, f"{gated}{self.kind}_norm")

    def axes(self, rank: int) -> tuple[int, ...]:
        """The axes that are normalized together, in an input of this rank."""
        if self.kind in ("group", "running"):
            return tuple(range(1, rank))
        return tuple(range(rank - self.last, rank)) if self.dim is None else (self.dim,)


class Clues(NamedTuple):
    """What a run shows about the settings: the parameters that it read, and the numbers that it added.

    `groups`: of a group norm that it called. `parts`: into how many it split the last axis.
    """

    tensors: Sequence[str]
    numbers: Sequence[float]
    groups: Sequence[int]
    parts: Sequence[int]
    gates: Sequence[str]


def forms(
    clues: Clues, rank: int, axes: tuple[int, ...] | None, dtypes: Iterable[torch.dtype]
) -> Iterator[Form]:
    """The norms that agree with these clues; `axes`: where the layer's sizes are; None if it has none.

    `dtypes`: those in which an offset may be added to the weight.
    """
    names, eps = list(clues.tensors), [*clues.numbers, 0.0]
    affine = [pair for pair in permutations([*names, None, None], 2) if {*pair} >= {*names}]
    affine = list(dict.fromkeys(affine))
    offsets: list[tuple[float, torch.dtype | None]] = [(0.0, None)]
    offsets += product(filter(None, clues.numbers), dtypes)
    for over in [axes] if axes else [*(tuple(range(n, rank)) for n in range(rank - 1, 0, -1)), (1,)]:
        last = over == tuple(range(rank - len(over), rank))
        dim, count = None if last else over[0], len(over)
        for (weight, bias), number, (offset, dtype) in product(affine, eps, offsets):
            if offset and weight is None:
                continue
            form = Form("layer", number, dim, weight, bias, offset, dtype, last=count)
            if bias is None:
                yield from _rms(clues, form._replace(kind="rms"), last)
            if not clues.gates:
                yield form
    for (weight, bias), number, groups in product(affine, eps, clues.groups):
        yield Form("group", number, weight=weight, bias=bias, groups=groups)
    for order in permutations(names) if 2 <= len(names) <= 4 else ():
        mean, var, weight, bias = (*order, None, None)[:4]
        for number in filter(None, eps):
            yield Form("running", number, weight=weight, bias=bias, mean=mean, var=var)
            if bias is None and weight is not None:
                yield Form("running", number, bias=weight, mean=mean, var=var)


def _rms(clues: Clues, form: Form, last: bool) -> Iterator[Form]:
    """An RMS norm with its gate, its order of roundings, and over parts of the last axis."""
    casts = ("after", "before") if form.weight else ("after",)
    gated: list[tuple[str | None, bool]] = [*product(clues.gates, (False, True))] or [(None, False)]
    parts = (1, *clues.parts) if last and form.last == 1 and not form.offset else (1,)
    for groups, cast, (gate, first) in product(parts, casts, gated):
        if gate and (not last or form.offset or (gate == "sigmoid" and (first or cast == "before"))):
            continue
        if cast == "before" and form.offset:
            continue
        yield form._replace(cast=cast, groups=groups, gate=gate, gate_first=first)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
