"""Declares our functions as operators of torch, with what readers of an exported graph must know.

One declaration has everything: the schema (which marks the statistics as written), the function, the fake,
which calls write the statistics, and how `fold` reads the operator as a scale and a shift.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leannorm.ops.schema import LIBRARY

Arguments = Mapping[str, Any]


class AffineNames(NamedTuple):
    """The names of the arguments in y = (x - mean) / sqrt(var + eps) * weight + bias."""

    x: str = "x"
    mean: str = "running_mean"
    var: str = "running_var"
    weight: str = "weight"
    bias: str = "bias"
    eps: str = "eps"


Folds = AffineNames | Callable[[Arguments], str] | None


class Norm(NamedTuple):
    """An operator that normalizes by a batch's own statistics or by given ones.

    `by_batch(arguments)`: whether this call uses the batch's own, and so writes the buffers `statistics`.
    `folds`: the arguments that `fold` reads, or why it cannot fold a call; None if there is nothing to fold.
    """

    statistics: tuple[str, ...]
    by_batch: Callable[[Arguments], Any]
    folds: Folds = None


ARGUMENTS: dict[str, tuple[str, ...]] = {}
"""The names of each operator's arguments, in order: torch.export(strict=True) can read no schema."""

# the schemas of torch's own norms do not mark the running statistics as written
_BUFFERS = ("running_mean", "running_var")
NORMS = {
    "aten::batch_norm": Norm(_BUFFERS, itemgetter("training"), AffineNames("input")),
    "aten::instance_norm": Norm(_BUFFERS, itemgetter("use_input_stats")),
}


def in_training(arguments: Arguments) -> bool:
    """Whether this call of a batch norm uses the batch's own statistics. (The compiler cannot trace
    itemgetter.)"""
    return bool(arguments["training"])


def like_first(x: Tensor, *others: Any) -> Tensor:
    """The fake of an operator whose result is like its first argument."""
    return torch.empty_like(x)


def declare(
    schema: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    by_batch: Callable[[Arguments], Any] | None = None,
    folds: Folds = None,
) -> None:
    """Make one of our functions the operator `leannorm::name`: one node in an exported graph.

    Eager and compiled calls run the function, with its own derivative. Under torch.export only the fake
    runs, so that the graph depends on no shape, and the kernel is chosen when the program runs.
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

    names = ARGUMENTS[name] = tuple(argument.name for argument in operator._schema.arguments)
    defaults = {a.name: a.default_value for a in operator._schema.arguments if a.has_default_value()}

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        """Torch's own functions, for `run_decompositions`; calls that use a batch's own statistics stay
        ours."""
        arguments = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        if by_batch is not None and by_batch(arguments):
            return NotImplemented
        return function(*(arguments[name] for name in names))

    operator.py_impl(torch._C.DispatchKey.CompositeImplicitAutograd)(decomposed)
    if by_batch is not None:
        NORMS[operator._schema.name] = Norm(written_by_schema(operator), by_batch, folds)


def written_by_schema(operator: torch._ops.OpOverload) -> tuple[str, ...]:
    """The names of the arguments that an operator's schema marks as written."""
    arguments = operator._schema.arguments
    return tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
