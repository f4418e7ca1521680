"""What reads an input that the graph itself edits may not run again: by then the input holds something else.

Torch's partition forgets that: a buffer is there anyway, so it saves the buffer in the place of a product of
it, and the backward pass makes that product of the edited buffer. `docs/compiled.md` has a program that shows
it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import fx

from leannorm.compiled import operators
from leannorm.program.memory import written_by


def readers(graph: fx.Graph, num_fwd_outputs: int) -> set[fx.Node]:
    """The nodes that compute something from an input that is edited by the graph or right after it."""
    edited = set(_edited(graph, num_fwd_outputs))
    found: set[fx.Node] = set()
    left = list(edited)
    seen = set(edited)
    while left:
        for user in left.pop().users:
            if user.op == "output" or user in seen:
                continue
            seen.add(user)
            if operators.kind(user) == "view":
                left.append(user)
            else:
                found.add(user)
    return found


def _edited(graph: fx.Graph, num_fwd_outputs: int) -> Iterator[fx.Node]:
    for node in graph.nodes:
        for argument in written_by(node):
            yield _source(argument)
    output = next(iter(graph.find_nodes(op="output")))
    named: Collection[Any] = output.meta.get("desc") or ()
    mutated = {getattr(d, "mutated_input", None) for d in list(named)[:num_fwd_outputs]} - {None}
    for node in graph.find_nodes(op="placeholder"):
        if node.meta.get("desc") in mutated:
            yield node


def _source(node: fx.Node) -> fx.Node:
    while operators.kind(node) == "view" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node
