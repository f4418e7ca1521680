"""From a node to a step that rebuilds what it put out, as far as it is proved what the node had read."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

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
from leannorm.saving.recipes.views import ALIASES, cat_of_copied_parts
from leannorm.saving.values import Step, Value, held

_DEEPEST = 20  # nodes of one chain
_MADE_ANEW = NORMS | ACTIVATIONS  # these take a pass of arithmetic
_IN_PLACE_TOO = ACTIVATIONS | {"AddBackward0", "SubBackward0", "MulBackward0", "MulBackward1", "DivBackward0"}
_WITHOUT_FLAGS = {"view", "copy", "scale", "sum"}  # kinds whose bits no global flag decides


class Missing(NamedTuple):
    """No step was found: these outputs of nodes were not at hand."""

    outputs: tuple[tuple[Node, int], ...] = ()


class Search:
    """The steps that a policy considers, over one forward pass."""

    def __init__(self, policy: Policy, at_pool: Callable[[Node], None], since: int = 0) -> None:
        """Of nodes that ran before `since`, nothing is known."""
        self._policy, self._at_pool = policy, at_pool
        self._recipes = {kind: made for kind, made in RECIPES.items() if policy.considers(kind)}
        self.leaves, self.flags, self._since = Leaves(), FlagLog(sequence_number()), since

    def considers(self, kind: str) -> bool:
        return kind in self._recipes

    def step(self, node: Node, output: int, like: Tensor) -> Step | Missing:
        """How to rebuild `like`, which the node put out and which is as it made it."""
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
        if recipe is None or depth > _DEEPEST or (kind == "AddBackward0" and not self._may_add(node)):
            return None
        edges: tuple[tuple[Node | None, int], ...] = ()  # made anew each time that the node is asked
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
            elif given(len(edges) - 1) is None:  # what is new comes last, most often
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
        return step._replace(flags=flags, proved=proved and sure)

    def _may_add(self, node: Node) -> bool:
        """Looked at before steps are made for the inputs of a sum, only to be thrown away."""
        return all(
            producer is None
            or kind_of(producer) not in _MADE_ANEW
            or self._policy.may_add(find(producer, number))
            for producer, number in node.next_functions
        )

    def _value(
        self, reader: Any, producer: Any, number: int, depth: int, missing: list[tuple[Node, int]]
    ) -> tuple[Value | None, bool]:
        """What `reader` had read from a node's output, if it is at hand, and whether that is proved.

        Known and unedited since, a leaf, or itself rebuilt. Of a tensor that nobody saved, no edit is seen
        that autograd does not see; of one whose readers are gone, it is not known when it was edited.
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
        if step is None or not (step.kind == "norm" or self._policy.allows(step, _nbytes(producer, number))):
            missing.append((producer, number))
            return None, True
        value = Value(None, 0, step, name=kind_of(producer))
        metadata = producer._input_metadata[number]
        value.shape, value.dtype = torch.Size(metadata.shape), metadata.dtype
        register(producer, number, weakref.ref(value))
        return value, type(lookup) is not Packed or lookup.sample is None


def as_made(node: Any, output: int, version: int) -> bool:
    """Is a tensor of this version what the node put out, or was it edited where autograd was off?

    Version 0 is as made. Later versions must be accounted for by nodes that work in place.
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
        # in place, and saving its output now
        return is_saving(node, "result") and version - 1 in _versions_as_made(producer, number)
    if kind in ALIASES:
        return as_made(producer, number, version)
    if hasattr(type(node), "_saved_self"):
        source = saved(node, "self")
        # working in place, it saved a copy that it had made itself; a view's node may be made anew as late
        copied = source is not None and source.name == "CloneBackward0"
        copied = copied and source is not None and source.made_at > node._sequence_nr()
        return copied and version - 1 in _versions_as_made(producer, number)
    return False


def _versions_as_made(node: Any, output: int, depth: int = 0) -> set[int]:
    """Which versions a node's output can have, if only nodes have edited it."""
    kind = "" if node is None else kind_of(node)
    if not kind or kind in (ACCUMULATES, "CopySlices") or depth > _DEEPEST:
        return set()
    known = find(node, output)
    if known is not None and known.as_made:
        return {known.version}
    if kind not in ALIASES and kind not in _IN_PLACE_TOO:
        return {0}
    producer, number = node.next_functions[0]
    before = _versions_as_made(producer, number, depth + 1)
    return before if kind in ALIASES else {0} | {version + 1 for version in before}


def _is_leaf_on_cpu(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad and tensor.device.type == "cpu"


def _nbytes(node: Any, output: int) -> int:
    metadata = node._input_metadata[output]
    return int(prod(metadata.shape) * metadata.dtype.itemsize)


def in_memory(step: Step) -> bool:
    """Is it a view of a tensor that is held? Then holding it costs nothing."""
    while step.kind == "view" and step.inputs:
        value = step.inputs[0]
        if value.step is None:
            return True
        step = value.step
    return False
