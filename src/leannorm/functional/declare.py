"""Our functions as operators of torch, and what a reader of an exported graph must know about a norm.

One declaration says all of it: the schema (with the statistics, which it marks as written), the function,
the fake, when the statistics are written, and how `fold` reads the operator as a scale and a shift.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from leannorm.ops.schema import LIBRARY

Arguments = Mapping[str, Any]


class Affine(NamedTuple):
    """The names of the arguments in y = (x - mean) / sqrt(var + eps) * weight + bias."""

    x: str = "x"
    mean: str = "running_mean"
    var: str = "running_var"
    weight: str = "weight"
    bias: str = "bias"
    eps: str = "eps"


class Norm(NamedTuple):
    """An operator that normalizes by a batch's own statistics or by given ones.

    Where `by_batch` says so of a call's arguments, it uses the batch's own and writes `statistics`.
    `folds` names what is folded, or is the reason why a call cannot be; "" where there is nothing to fold.
    """

    statistics: tuple[str, ...]
    by_batch: Callable[[Arguments], Any]
    folds: Affine | str = ""


# torch's own hide in their schemas that they move their statistics
_BUFFERS = ("running_mean", "running_var")
NORMS = {
    "aten::batch_norm": Norm(_BUFFERS, itemgetter("training"), Affine("input")),
    "aten::instance_norm": Norm(_BUFFERS, itemgetter("use_input_stats")),
}


def declare(
    schema: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    by_batch: Callable[[Arguments], Any] | None = None,
    folds: Affine | str = "",
) -> None:
    """Make a function of ours an operator `leannorm::name`: one node in an exported graph.

    Eagerly and compiled it is the function, with the function's own derivative; an export sees only
    the fake, so that no shape is looked at and no kernel is chosen before the program runs.
    """
    name = LIBRARY.define(schema)
    operator = getattr(torch.ops.leannorm, name).default

    def kernel(*args: Any) -> Any:
        if torch.compiler.is_exporting():
            with torch._C._AutoDispatchBelowAutograd():
                return operator(*args)
        return function(*args)

    LIBRARY.impl(name, kernel, "Autograd")
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"leannorm::{name}", fake, lib=LIBRARY)

    names = [argument.name for argument in operator._schema.arguments]

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        """Torch's own functions, where `run_decompositions` asks; a batch's own statistics stay ours."""
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if by_batch is not None and by_batch(given):
            return NotImplemented
        return function(*(given[name] for name in names))

    operator.py_impl(torch._C.DispatchKey.CompositeImplicitAutograd)(decomposed)
    if by_batch is not None:
        NORMS[operator._schema.name] = Norm(written_by_schema(operator), by_batch, folds)


def written_by_schema(operator: torch._ops.OpOverload) -> tuple[str, ...]:
    """The names of the arguments that an operator's schema marks as written."""
    arguments = operator._schema.arguments
    return tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
