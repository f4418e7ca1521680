"""A node that reads an input which the graph itself edits may not run again: by then the input has changed.

Torch's partition ignores that: as a buffer exists anyway, it saves the buffer instead of a product computed
from it, and the backward pass computes the product from the edited buffer. `docs/compiled.md` has a program
that shows it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import fx

from leannorm.compiled import operators
from leannorm.functional.graphs import written_by


def readers(graph: fx.Graph, num_fwd_outputs: int) -> set[fx.Node]:
    """The nodes that compute something from an input that the graph edits, or that is edited right after
    it."""
    edited = set(_edited(graph, num_fwd_outputs))  # with their views
    for node in graph.nodes:
        if not edited.isdisjoint(node.all_input_nodes) and operators.kind(node) == "view":
            edited.add(node)
    return {user for node in edited for user in node.users if user.op != "output"} - edited


def _edited(graph: fx.Graph, num_fwd_outputs: int) -> Iterator[fx.Node]:
    for node in graph.nodes:
        for argument in written_by(node):
            yield operators.behind_views(argument)
    named: Collection[Any] = graph.output_node().meta.get("desc") or ()
    mutated = {getattr(d, "mutated_input", None) for d in list(named)[:num_fwd_outputs]} - {None}
    for node in graph.find_nodes(op="placeholder"):
        if node.meta.get("desc") in mutated:
            yield node
