"""How the output of each kind of node is rebuilt: one decorated function per kind.

A recipe receives the node, the number of its output, `given(i)` (the value that stands for the node's input
i, if one is at hand) and the output itself where it is there to look at. It answers with a step, or None:
then the tensor is held, as in stock autograd. A step is a plain function and its arguments, and holds no
tensor of the graph but through its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from leannorm.saving.values import Step, Value

Given = Callable[[int], Value | None]
Recipe = Callable[[Any, int, Given, Tensor | None], Step | None]
RECIPES: dict[str, Recipe] = {}


def recipe(*kinds: str) -> Callable[[Recipe], Recipe]:
    """Register the decorated function for nodes of these kinds (see `graph.kind_of`)."""

    def register(build: Recipe) -> Recipe:
        RECIPES.update(dict.fromkeys(kinds, build))
        return build

    return register


def copy_of(value: Value | None) -> Tensor | None:
    """What a small tensor holds now: an optimizer's step before the backward pass changes nothing."""
    return None if value is None else value.look().detach().clone()
