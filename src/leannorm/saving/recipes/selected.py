"""Elements at positions that a node saved: what routers, and permutations around experts, are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from leannorm.saving.graph import constant, kind_of, saved
from leannorm.saving.recipes.registry import ValueOf, recipe
from leannorm.saving.steps import Step


def _at(x: Tensor, index: Tensor, select: Callable[..., Tensor], dim: int) -> Tensor:
    return select(x, dim, index)


_BY_POSITION: dict[str, tuple[Callable[..., Tensor], str]] = {
    "IndexSelectBackward0": (torch.index_select, "index"),
    "GatherBackward0": (torch.gather, "index"),
    "TopkBackward0": (torch.gather, "indices"),
    "SortBackward0": (torch.gather, "indices"),
}
BY_POSITION = {*_BY_POSITION, "IndexBackward0"}


@recipe(*_BY_POSITION)
def by_position(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    """The values of topk and sort are those at the positions that they put out: neither runs again."""
    select, name = _BY_POSITION[kind_of(node)]
    x, index = value_of(0), saved(node, name)
    if output or x is None or index is None:
        return None
    return Step(_at, (x, index), (), (select, constant(node, "dim")), kind="scale")
