"""From a node to a step that rebuilds its output; is the step proved to read what the node read?"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from leannorm.saving import reasons
from leannorm.saving.device import asynchronous
from leannorm.saving.evidence import Leaves, sequence_number
from leannorm.saving.flags import FlagLog
from leannorm.saving.graph import (
    ACCUMULATES,
    Packed,
    find,
    is_saving,
    kind_of,
    register,
    registered,
    saved,
)
from leannorm.saving.narrowed import POOLS
from leannorm.saving.policy import Policy
from leannorm.saving.recipes import RECIPES
from leannorm.saving.recipes.activations import ACTIVATIONS
from leannorm.saving.recipes.norms import NORMS
from leannorm.saving.recipes.products import CONVOLUTIONS
from leannorm.saving.recipes.views import ALIASES, cat_of_copied_parts
from leannorm.saving.values import Step, Value, held

_MAX_DEPTH = 20  # nodes of one chain
_COSTLY_TO_ADD = NORMS | ACTIVATIONS  # nodes whose output takes a pass of arithmetic to rebuild
_MAY_BE_IN_PLACE = ACTIVATIONS | {
    "AddBackward0",
    "SubBackward0",
    "MulBackward0",
    "MulBackward1",
    "DivBackward0",
}
_WITHOUT_FLAGS = {"view", "copy", "scale", "sum"}  # kinds whose bits depend on no global flag


class Missing(NamedTuple):
    """No step was found; these outputs of nodes had no value."""

    outputs: tuple[tuple[Node, int], ...] = ()


class Search:
    """Finds steps by one policy, during one forward pass; `at_pool` is called with each max pooling node."""

    def __init__(
        self, policy: Policy, at_pool: Callable[[Node], None], found: Counter[str], since: int = 0
    ) -> None:
        """Of nodes that ran before `since`, nothing is known. `found`: the reasons of this pass."""
        self._policy, self._at_pool, self._reasons = policy, at_pool, found
        self._recipes = {kind: made for kind, made in RECIPES.items() if policy.considers(kind)}
        self.leaves, self.flags, self._since = Leaves(), FlagLog(sequence_number()), since

    def considers(self, kind: str) -> bool:
        """Has this kind of node a recipe that the policy allows?"""
        return kind in self._recipes

    def step(self, node: Node, output: int, like: Tensor) -> Step | Missing:
        """How to rebuild `like`, an output of the node that was not edited since."""
        missing: list[tuple[Node, int]] = []
        step = self._step(node, output, like, 0, missing)
        return Missing(tuple(missing)) if step is None else step

    def _step(
        self, node: Node, output: int, like: Tensor | None, depth: int, missing: list[tuple[Node, int]]
    ) -> Step | None:
        kind = kind_of(node)
        if kind in POOLS:
            self._at_pool(node)
        recipe = self._recipes.get(kind)
        if recipe is None or depth > _MAX_DEPTH or (kind == "AddBackward0" and not self._may_add(node)):
            return None
        edges: tuple[tuple[Node | None, int], ...] = ()  # read once: torch builds a new tuple at each access
        proved = True

        def given(i: int) -> Value | None:
            nonlocal edges, proved
            edges = edges or node.next_functions
            if i >= len(edges):
                return None
            value, sure = self._value(node, *edges[i], depth + 1, missing)
            proved = proved and sure
            return value

        if kind == "CatBackward0" and like is not None:
            edges = node.next_functions
            if self._policy.may_copy(len(edges)):
                recipe = cat_of_copied_parts
            elif given(len(edges) - 1) is None:  # the new part is mostly the last one
                return None
        step = recipe(node, output, given, like)
        if step is None:
            return None
        for value in step.inputs:
            if value.sample is None and value.users and _is_leaf_on_cpu(value.tensor):
                assert value.tensor is not None  # not sampled when the node saved it
                proved = proved and self.leaves.proves(node._sequence_nr(), value.tensor)
        if step.flags is not None or step.kind in _WITHOUT_FLAGS:
            return step if proved else step._replace(proved=False)
        flags, sure = self.flags.of(node._sequence_nr())
        if kind in CONVOLUTIONS and flags.benchmark and asynchronous(node._input_metadata[0]):
            self._reasons[reasons.BENCHMARK] = 1
            return None
        return step._replace(flags=flags, proved=proved and sure)

    def _may_add(self, node: Node) -> bool:
        """May this sum be rebuilt? Asked first, since the search for steps of its inputs takes time."""
        return all(
            producer is None
            or kind_of(producer) not in _COSTLY_TO_ADD
            or self._policy.may_add(find(producer, number))
            for producer, number in node.next_functions
        )

    def _value(
        self, reader: Any, producer: Any, number: int, depth: int, missing: list[tuple[Node, int]]
    ) -> tuple[Value | None, bool]:
        """The value that the node `reader` read from a producer's output, and whether that is proved.

        It is a packed value that was not edited since, a leaf, or a step. None if there is no such value. For
        a tensor that no node saved, edits that autograd does not count are not noticed. If the nodes that
        saved it are gone, it is not known when it was edited, and the step is not proved.
        """
        if producer is None:
            return None, True
        if kind_of(producer) == ACCUMULATES:
            leaf = producer.variable
            return held(leaf), self.leaves.proves(reader._sequence_nr(), leaf)
        if producer._sequence_nr() < self._since:
            return None, True
        lookup = registered(producer, number)
        known = lookup() if lookup else None
        if known is not None:
            sure = known.current and known.memory is None
            sure = sure and (known.as_made or reader._sequence_nr() >= known.seen_at)
            return (known, True) if sure else (None, True)
        step = self._step(producer, number, None, depth, missing)
        if step is None or not (step.kind == "norm" or self._policy.allows(step)):
            missing.append((producer, number))
            return None, True
        value = Value(None, 0, step, name=kind_of(producer))
        metadata = producer._input_metadata[number]
        value.shape, value.dtype = torch.Size(metadata.shape), metadata.dtype
        register(producer, number, weakref.ref(value))
        return value, type(lookup) is not Packed or lookup.sample is None


def as_made(node: Any, output: int, version: int) -> bool:
    """Does a tensor of this version hold the node's output, without edits made while autograd was off?

    Version 0 does. A later version does if nodes that work in place account for every step of the counter.
    """
    if version == 0:
        return True
    known = find(node, output)
    if known is not None:
        return known.version == version and known.as_made
    kind = kind_of(node)
    if not kind or not node.next_functions:
        return False
    producer, number = node.next_functions[0]
    if hasattr(type(node), "_saved_result"):
        result = saved(node, "result")
        if result is not None:
            return result.version == version and result.as_made
        # an in-place node that is saving its output now
        return is_saving(node, "result") and version - 1 in _versions_as_made(producer, number)
    if kind in ALIASES:
        return as_made(producer, number, version)
    if hasattr(type(node), "_saved_self"):
        source = saved(node, "self")
        # an in-place node saves a copy of its input, made after the node; so may a view's node be
        copied = source is not None and source.name == "CloneBackward0"
        copied = copied and source is not None and source.made_at > node._sequence_nr()
        return copied and version - 1 in _versions_as_made(producer, number)
    return False


def _versions_as_made(node: Any, output: int, depth: int = 0) -> set[int]:
    """The versions that a node's output can have if only nodes have edited it."""
    kind = "" if node is None else kind_of(node)
    if not kind or kind in (ACCUMULATES, "CopySlices") or depth > _MAX_DEPTH:
        return set()
    known = find(node, output)
    if known is not None and known.as_made:
        return {known.version}
    if kind not in ALIASES and kind not in _MAY_BE_IN_PLACE:
        return {0}
    producer, number = node.next_functions[0]
    before = _versions_as_made(producer, number, depth + 1)
    return before if kind in ALIASES else {0} | {version + 1 for version in before}


def _is_leaf_on_cpu(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad and tensor.device.type == "cpu"


def is_view_of_held(step: Step) -> bool:
    """Is the result a view of a held tensor? Then holding it costs no memory."""
    while step.kind == "view" and step.inputs:
        value = step.inputs[0]
        if value.step is None:
            return True
        step = value.step
    return False
