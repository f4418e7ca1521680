"""Pruning: the part of a forked graph that has to run for given targets, in execution order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from leannorm.program.join import SHARED
from leannorm.program.memory import asserts


class Dependencies:
    """What each node of a forked graph depends on: its arguments, and earlier writes to what it reads."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.before: dict[fx.Node, set[fx.Node]] = {}
        state = {n.name for n in self.nodes if n.op in ("get_attr", "placeholder")}
        writers: list[tuple[fx.Node, set[str]]] = []
        self.effects: list[fx.Node] = []
        for node in self.nodes:
            read = {n.name for n in node.all_input_nodes}
            self.before[node] = set(node.all_input_nodes) | {
                writer
                for writer, names in writers  # neither branch depends on the other's writes
                if writer.meta["branch"] in (SHARED, node.meta["branch"]) and names & read
            }
            writes = set(node.meta.get("writes", ()))
            if writes:
                writers.append((node, writes))
            if writes & state or asserts(node):
                self.effects.append(node)

    def of(self, targets: Sequence[fx.Node], branches: Sequence[str]) -> list[fx.Node]:
        """The nodes that have to run for the values `targets` and for all the effects of `branches`.

        A module's state changes as a whole: if one of its nodes runs, all of its effects do.
        """
        needed: set[fx.Node] = set()
        waiting = list(targets)
        waiting += [n for n in self.effects if branches and n.meta["branch"] in (SHARED, *branches)]
        while waiting:
            while waiting:
                node = waiting.pop()
                if node not in needed:
                    needed.add(node)
                    waiting += self.before[node] - needed
            running = {_call(n) for n in needed}
            waiting = [n for n in self.effects if n not in needed and _call(n) in running - {None}]
        return [n for n in self.nodes if n in needed]


def _call(node: fx.Node) -> tuple[str, str] | None:
    """The branch and the module call to which a node belongs."""
    return (node.meta["branch"], node.meta["scopes"][-1]) if node.meta["scopes"] else None


def subgraph(
    root: torch.nn.Module,
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    results: Sequence[Any],
    intermediates: Sequence[fx.Node],
) -> fx.GraphModule:
    """A module that runs `nodes`, takes all `inputs` and returns `results` (nodes, or constants).

    It also returns the `intermediates` with the values that they had when computed: one that a later node
    overwrites is copied first. The results are not copied: they are what the model returns.
    """
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {n: graph.placeholder(str(n.target)) for n in inputs}
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        overwritten = set(node.meta.get("writes", ()))
        for value in intermediates:
            if value.name in overwritten and value in new and value not in copies:
                copies[value] = graph.call_function(torch.ops.aten.clone.default, (new[value],))
        if node not in new:
            new[node] = graph.node_copy(node, lambda n: new[n])
            new[node].meta = {}
    values = [new[v] if isinstance(v, fx.Node) else v for v in results]
    graph.output(values + [copies.get(v, new[v]) for v in intermediates])
    return fx.GraphModule(root, graph)
