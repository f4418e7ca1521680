"""How the output of each kind of node is rebuilt: one decorated function per kind.

A recipe receives the node, the index of its output, `value_of(i)` (the value of the node's input i, or None
if it has none) and the output tensor itself, if it exists at that time. It returns a step, or None: then the
tensor is held, as in stock autograd. A step is a plain function and its arguments; it holds tensors of the
graph only through its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from leannorm.saving.graph import constant, kind_of
from leannorm.saving.steps import Step
from leannorm.saving.values import Value

ValueOf = Callable[[int], Value | None]
Recipe = Callable[[Any, int, ValueOf, Tensor | None], Step | None]
RECIPES: dict[str, Recipe] = {}


def recipe(*kinds: str) -> Callable[[Recipe], Recipe]:
    """Register the decorated function for nodes of these kinds (see `graph.kind_of`)."""

    def register(build: Recipe) -> Recipe:
        RECIPES.update(dict.fromkeys(kinds, build))
        return build

    return register


class OfInput(NamedTuple):
    """A function of the node's first input and of these constants, which the node saved."""

    function: Callable[..., Tensor]
    constants: tuple[str, ...] = ()
    kind: str = "norm"


def of_input(rows: Mapping[str, OfInput]) -> set[str]:
    """Register the nodes of these kinds, each with what it computes; returns the kinds."""

    @recipe(*rows)
    def build(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
        function, names, kind = rows[kind_of(node)]
        x, constants = value_of(0), tuple(constant(node, name) for name in names)
        return None if x is None else Step(function, (x,), (), constants, kind=kind)

    return {*rows}


def copy_of(value: Value | None) -> Tensor | None:
    """A copy of a small tensor, so that an optimizer step before the backward pass does not change it."""
    if value is not None and value.copied is not None:
        return value.shared(value.copied)
    return None if value is None else value.shared(value.look().detach().clone())
