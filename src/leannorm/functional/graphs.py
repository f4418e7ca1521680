"""The arguments of a node of an exported or compiled graph by name, and those that it writes.

An operator's schema declares which arguments are written to. For a norm that is not enough: it writes its
running statistics only if it uses the batch's (`declare.py` says when).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from leannorm.functional.declare import NORMS, written_by_schema


def arguments(node: fx.Node) -> dict[str, Any]:
    """All arguments of an operator's call by name, defaults included."""
    target: Any = node.target
    named = zip(target._schema.arguments, node.args, strict=False)
    defaults = {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()}
    return defaults | {a.name: v for a, v in named} | dict(node.kwargs)


def written_by(node: fx.Node) -> list[fx.Node]:
    """The arguments that an operator's call writes into."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return []
    name, named = target._schema.name, arguments(node)
    if name == "aten::detach_":  # its schema declares a write, but it changes no memory
        return []
    norm = NORMS.get(name)
    if norm is not None and not norm.by_batch(named):
        return []
    names = written_by_schema(target) if norm is None else norm.statistics
    return [n for name in names for n in nodes_in(named.get(name))]


def nodes_in(value: Any) -> list[fx.Node]:
    """The nodes in an argument, which may be nested."""
    return [v for v in pytree.tree_leaves(value) if isinstance(v, fx.Node)]


def attribute(root: Any, path: str) -> Any:
    """The object under a dotted name; None if there is none."""
    for part in path.split("."):
        root = getattr(root, part, None)
    return root
