"""Which nodes of an exported graph are aliases of the same memory, and to which memory each node writes.

torch.export gives every node a fake value, and fake values that share memory share one storage. The
operators' schemas declare further results that may be views; dropout may return its input, which its schema
does not declare. `functional/graphs.py` knows what a call writes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from leannorm.functional.graphs import arguments, attribute, nodes_in, written_by

# of (input, p, train): they return the input itself if `train` is False
_DROPOUTS = {"aten::dropout", "aten::alpha_dropout", "aten::feature_dropout", "aten::feature_alpha_dropout"}


class GraphMemory:
    """The storages of each value of one graph, and those that each node writes to."""

    def __init__(self, graph: fx.Graph) -> None:
        self._same: dict[int, int] = {}
        for node in graph.nodes:
            self._unite(s for n in (node, *_aliased(node)) for s in _storages(n))

    def of(self, *nodes: fx.Node) -> set[int]:
        """The storages of the nodes' values, as numbers; storages that may be aliases have one number."""
        return {self._find(s) for node in nodes for s in _storages(node)}

    def written(self, node: fx.Node) -> set[int]:
        """The storages that this node writes to."""
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return self.of(*_written_inside(node))
        return self.of(*written_by(node))

    def _find(self, storage: int) -> int:
        while (other := self._same.get(storage, storage)) != storage:
            storage = other
        return storage

    def _unite(self, storages: Iterable[int]) -> None:
        roots = {self._find(s) for s in storages}
        first = min(roots, default=0)
        self._same.update((root, first) for root in roots)


def _storages(node: fx.Node) -> set[int]:
    values = pytree.tree_leaves(node.meta.get("val"))
    return {v.untyped_storage()._cdata for v in values if isinstance(v, Tensor)}


def _aliased(node: fx.Node) -> list[fx.Node]:
    """The arguments that the node's value may be a view of."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return []
    if target._schema.name in _DROPOUTS:
        return [] if node.args[2] else nodes_in(node.args[0])
    views = {s for r in target._schema.returns if r.alias_info for s in r.alias_info.before_set}
    named = arguments(node)
    return [
        n
        for argument in target._schema.arguments
        if argument.alias_info is not None and views & argument.alias_info.before_set
        for n in nodes_in(named.get(argument.name))
    ]


def submodules(node: fx.Node) -> list[fx.GraphModule]:
    """The graphs that a higher-order operator runs (a no_grad block, the branches of a condition)."""
    root: Any = node.graph.owning_module
    return [root.get_submodule(n.target) for n in nodes_in(node.args) if n.op == "get_attr" and is_graph(n)]


def is_graph(node: fx.Node) -> bool:
    """Whether the attribute that this get_attr node reads is a graph, not a tensor."""
    return isinstance(attribute(node.graph.owning_module, str(node.target)), fx.GraphModule)


def _written_inside(node: fx.Node) -> list[fx.Node]:
    operands = [n for n in nodes_in(node.args) if not (n.op == "get_attr" and is_graph(n))]
    changed = []
    for module in submodules(node):
        memory = GraphMemory(module.graph)
        inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
        written = set().union(*map(memory.written, module.graph.nodes))
        for inner, outer in zip(inputs, operands[len(operands) - len(inputs) :], strict=True):
            if memory.of(inner) & written:
                changed.append(outer)
    return changed


def random(node: fx.Node) -> bool:
    """Whether this node draws random numbers."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return any(random(n) for module in submodules(node) for n in module.graph.nodes)
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def asserts(node: fx.Node) -> bool:
    """Whether this node only checks a condition at run time."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (
        "_assert" in target._schema.name or "sym_constrain_range" in target._schema.name
    )


def place(root: torch.nn.Module, name: str, tensor: Tensor) -> None:
    """Put a variable into the module tree under its dotted name."""
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, torch.nn.Module())
        root = root.get_submodule(part)
    if isinstance(tensor, torch.nn.Parameter):
        root.register_parameter(last, tensor)
    else:
        root.register_buffer(last, tensor)
