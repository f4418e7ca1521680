"""Which calls of our functions may a layer compute?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import permutations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leannorm.functional.batch import batch_norm
from leannorm.functional.gated import gated_rms_norm
from leannorm.functional.group import group_norm
from leannorm.functional.layer import layer_norm, rms_norm
from leannorm.ops.activation import ACTIVATIONS

LOW = (torch.bfloat16, torch.float16)
STATISTICS = ("running_mean", "running_var")


class UnknownFormError(BaseException):
    """The layer computes none of leannorm's norms; the message says how that shows.

    Not an `Exception`, because a layer's own code that handles those must not handle this one.
    """


class Form(NamedTuple):
    """A norm that a layer may be: one of our functions, with its arguments but the input.

    `tensors` pairs an argument with the name of the layer's tensor; `settings` are the others by name. `last`
    is the number of normalized axes at the end, 1 with a `dim`; 0 for norms of channels. `parts`: into how
    many equal ones the rows are divided before. `shift` is added to the weight before, in a dtype.
    """

    function: Callable[..., Tensor]
    tensors: tuple[tuple[str, str], ...]
    settings: Mapping[str, Any]
    last: int = 0
    parts: int = 1
    shift: tuple[float, torch.dtype] | None = None

    def axes(self, rank: int) -> tuple[int, ...]:
        """The axes that are normalized together, in an input of this rank."""
        if not self.last:
            return tuple(range(1, rank))
        dim = self.settings.get("dim")
        return tuple(range(rank - self.last, rank)) if dim is None else (dim,)


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
    shifts = [None, *product(filter(None, clues.numbers), dtypes)]
    for over in [axes] if axes else [*(tuple(range(n, rank)) for n in range(rank - 1, 0, -1)), (1,)]:
        last = over == tuple(range(rank - len(over), rank))
        where = {"dim": None if last else over[0]}
        for (weight, bias), number, shift in product(affine, eps, shifts):
            if shift and weight is None:
                continue
            tensors, settings = _named(weight=weight, bias=bias), {"eps": number, **where}
            if bias is None:
                offset = shift[0] if shift else 0.0
                plain = Form(rms_norm, tensors, settings | {"weight_offset": offset}, len(over))
                yield from _rms(clues, plain, last)
            if not clues.gates:
                yield Form(layer_norm, tensors, settings, len(over), shift=shift)
    for (weight, bias), number, groups in product(affine, eps, clues.groups):
        yield Form(group_norm, _named(weight=weight, bias=bias), {"eps": number, "num_groups": groups})
    for order in permutations(names) if 2 <= len(names) <= 4 else ():
        mean, var, *others = order
        for number in filter(None, eps):
            for of in (("weight", "bias"), ("bias",)) if len(others) == 1 else (("weight", "bias"),):
                tensors = _named(running_mean=mean, running_var=var, **dict(zip(of, others, strict=False)))
                yield Form(batch_norm, tensors, {"eps": number})


def _named(**tensors: str | None) -> tuple[tuple[str, str], ...]:
    return tuple((argument, name) for argument, name in tensors.items() if name is not None)


def _rms(clues: Clues, form: Form, last: bool) -> Iterator[Form]:
    """An RMS norm with its gate, its order of roundings, and over parts of the last axis."""
    offset = form.settings["weight_offset"]
    casts = ("after", "before") if form.tensors else ("after",)
    gated: list[tuple[str | None, bool]] = [*product(clues.gates, (False, True))] or [(None, False)]
    parts = (1, *clues.parts) if last and form.last == 1 and not offset else (1,)
    for number, cast, (gate, first) in product(parts, casts, gated):
        if gate and (not last or offset or (gate == "sigmoid" and (first or cast == "before"))):
            continue
        if cast == "before" and offset:
            continue
        settings = {**form.settings, "cast": cast}
        if gate in ACTIVATIONS:  # a sigmoid is a product behind an RMS norm
            settings = {"eps": settings["eps"], "cast": cast, "act": gate, "norm_before_gate": not first}
            yield form._replace(function=gated_rms_norm, settings=settings, parts=number)
        else:
            yield form._replace(settings=settings, parts=number)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
