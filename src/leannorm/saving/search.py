"""From a node to a step that rebuilds its output; is the step proved to read what the node read?"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from leannorm.autograd.nodes import NODES
from leannorm.saving import reasons, trial
from leannorm.saving.calls import know_attention
from leannorm.saving.device import asynchronous
from leannorm.saving.graph import (
    ACCUMULATES,
    PASSES_ON,
    Packed,
    find,
    identity,
    is_saving,
    kind_of,
    made_by,
    register,
    registered,
    saved,
)
from leannorm.saving.leaves import Leaves
from leannorm.saving.localized import Refused, localized, shape_of
from leannorm.saving.narrowed import POOLS
from leannorm.saving.policy import Policy
from leannorm.saving.provenance import FlagLog, Provenance, sequence_number
from leannorm.saving.recipes import RECIPES
from leannorm.saving.recipes.activations import ACTIVATIONS
from leannorm.saving.recipes.norms import NORMS
from leannorm.saving.recipes.products import CONVOLUTIONS, PRODUCTS
from leannorm.saving.recipes.resampled import NEAREST
from leannorm.saving.recipes.selected import BY_POSITION
from leannorm.saving.recipes.shards import LOCAL, REDISTRIBUTE, TELLING, know_torchs_functions, told_by
from leannorm.saving.recipes.views import ALIASES, MOVES, VIEWS, cat_of_copied_parts
from leannorm.saving.recipes.written import is_sum_in_view
from leannorm.saving.steps import Step, behind, is_unfilled, root_of
from leannorm.saving.values import COPIED_PART, Value, held

_SUMS = {"AddBackward0", "SubBackward0"}
_MAX_DEPTH = 20  # nodes of one chain
MOST_IN_A_ROW = 64  # steps; the backward pass rebuilds as many tensors at once
MOST_RUNS = 256  # of steps for one tensor, each of which is looked at again and again
_COSTLY_TO_ADD = NORMS | ACTIVATIONS  # nodes whose output takes a pass of arithmetic to rebuild
_ARITHMETIC = {*_SUMS, "MulBackward0", "MulBackward1", "DivBackward0"}
MAY_BE_IN_PLACE = ACTIVATIONS | _ARITHMETIC
# nodes that move elements, or round each of them once: their bits depend on no tensor's layout
_IN_ANY_LAYOUT = {
    *(ALIASES | VIEWS | BY_POSITION | MOVES | NEAREST | _ARITHMETIC),
    *("CloneBackward0", "ToCopyBackward0", "CatBackward0", "RepeatBackward0", "WhereBackward0"),
    *("NegBackward0", "ReluBackward0", "LeakyReluBackward0", "LeakyReluBackward1", "HardtanhBackward0"),
    "ConstantPadNdBackward0",
}
_COPIES_FIRST = {"SoftmaxBackward0", "SafeSoftmaxBackward0", "LogSoftmaxBackward0"}
"""Nodes whose kernels for CPUs and CUDA read a contiguous copy of whatever they get."""
_CONTIGUOUS = torch.empty(())
_WITHOUT_FLAGS = {"view", "copy"}  # kinds that move elements; any arithmetic may flush denormal numbers


class Missing(NamedTuple):
    """No step was found; these outputs of nodes had no value, the one that the others are made of first."""

    outputs: tuple[tuple[Node, int], ...] = ()
    communicates: bool = False  # a rebuild would, which must not be
    ruled_out: bool = False  # by the policy, or else something was not at hand
    too_deep: bool = False  # there was a step, behind too many others
    elsewhere: bool = False  # something is held that a backward pass may never come to


class Visit(NamedTuple):
    """A node that a search looked at, and the values of the inputs that its recipe asked for."""

    node: Any
    output: int
    inputs: dict[int, Value | None]


class Search:
    """Finds steps by one policy, during one forward pass; `at_pool` is called with each max pooling node."""

    def __init__(
        self, policy: Policy, at_pool: Callable[[Node], None], noted: Counter[str], from_here: bool = False
    ) -> None:
        """`from_here`: of nodes that were made before this object, nothing is known. `noted`: the reasons."""
        self.policy, self._at_pool, self._reasons = policy, at_pool, noted
        self.provenance, self.from_here = Provenance(), from_here
        self.leaves, self.flags = Leaves(self.provenance), FlagLog(self.provenance)
        know_torchs_functions()
        know_attention()
        self._base: Tensor | None = None  # of which the tensor in question is a view
        self.of_ranks = False  # has the pass a DTensor?
        self._visits: list[Visit] = []
        self._roots: tuple[Node | None, ...] = ()  # nodes that its backward pass comes to
        self._communicates = False  # would a rebuild of the tensor in question?
        self._ruled_out = False  # is it, where the search first failed?
        self._too_deep = self._elsewhere = False

    def considers(self, kind: str) -> bool:
        """Has this kind of node a recipe that the policy allows?"""
        return kind in RECIPES and self.policy.considers(kind)

    def step(
        self,
        node: Node,
        output: int,
        like: Tensor,
        visits: list[Visit] | None = None,
        saved_too: Node | None = None,
    ) -> Step | Missing:
        """How to rebuild `like`, an output of the node that was not edited since. The nodes that were looked
        at are added to `visits`. `saved_too`: a node of which the reader of `like` has saved an output."""
        missing: list[tuple[Node, int]] = []
        self._base, self._communicates, self._ruled_out = like._base, False, False
        self._too_deep = self._elsewhere = False
        self._visits, self._roots = [] if visits is None else visits, (node, saved_too)
        try:
            step = self._step(node, output, like, 0, missing)
        finally:
            self._base, self._visits, self._roots = None, [], ()  # a node must not be held by what it saves
        if step is None or is_unfilled(step):
            told = self._communicates, self._ruled_out, self._too_deep, self._elsewhere
            return Missing(tuple(missing), *told)
        return step

    def views_rebuilt(self, node: Node, kind: str) -> bool:
        """Is it a view of what is rebuilt, whatever a plan says of it? It costs nothing."""
        producer, output = node.next_functions[0] if kind in ALIASES else (None, 0)
        base = None if producer is None else find(producer, output)
        return base is not None and base.step is not None

    def _step(
        self, node: Node, output: int, like: Tensor | None, depth: int, missing: list[tuple[Node, int]]
    ) -> Step | None:
        kind = kind_of(node)
        if kind in POOLS:
            self._at_pool(node)
        recipe = RECIPES[kind] if self.considers(kind) else None
        if recipe is None or depth > _MAX_DEPTH:
            return None
        sums = kind in _SUMS or (kind == "CopySlices" and is_sum_in_view(node))
        if sums and not self._may_add(node):
            self._ruled_out |= not missing
            return None
        edges: tuple[tuple[Node | None, int], ...] = ()  # read once: torch builds a new tuple at each access
        proved, lacking = True, False
        visit = Visit(node, output, {})
        self._visits.append(visit)

        def value_of(i: int) -> Value | None:
            nonlocal edges, proved, lacking
            edges = edges or node.next_functions
            if i >= len(edges):
                return None
            value, sure = self._value(node, *edges[i], depth + 1, missing)
            if value is not None and is_unfilled(value.step) and (kind, i) != ("CopySlices", 0):
                value = None
            proved, lacking = proved and sure, lacking or value is None
            visit.inputs[i] = value
            return value

        if kind == "CatBackward0" and like is not None:
            edges = node.next_functions
            if self.policy.may_copy(len(edges)):
                recipe = cat_of_copied_parts
            elif value_of(len(edges) - 1) is None:  # the new part is mostly the last one
                return None
        step = recipe(node, output, value_of, like)
        self._ruled_out |= step is None and kind in PRODUCTS and not (lacking or missing)
        if self.of_ranks and kind not in LOCAL:
            step = self._on_local_tensors(step, kind, like)
        if step is None or (
            kind == "CloneBackward0"
            and is_copied_to_edit(node, sequence_number())
            and is_held(step.inputs[0])
        ):
            return None
        for value in step.inputs:
            if value.provenance is None:
                value.provenance, value.order = self.provenance, self.provenance.order
            if value.sample is None and value.users and _is_leaf_on_cpu(value.tensor):
                assert value.tensor is not None  # not sampled when the node saved it
                proved = proved and self.leaves.proves(node, value.tensor)
        for copied in visit.inputs.values():  # a made bias, say: the step has a copy of it, and no input
            if copied is not None and copied.step is not None and copied not in step.inputs:
                proved = proved and trial.proved(copied.step)
        told = identity(node)
        proved = proved and step.proved and told is not None
        told = (told, step.identity) if step.identity else told  # a norm and its activation
        flags = step.flags
        if flags is None and step.kind not in _WITHOUT_FLAGS:
            flags, sure = self.flags.of(node)
            if kind in CONVOLUTIONS and flags.benchmark and asynchronous(node._input_metadata[0]):
                self._reasons[reasons.BENCHMARK] = 1
                return None
            proved = proved and sure
        if any(captured is not None and captured._version for captured in step.captured):
            return None
        any_layout = step.in_any_layout or kind in _IN_ANY_LAYOUT
        any_layout |= kind in _COPIES_FIRST and node._input_metadata[0].device.type in ("cpu", "cuda")
        step = step.told(flags, proved, told, any_layout)
        if step.depth > MOST_IN_A_ROW or step.runs > MOST_RUNS:
            self._too_deep = True
            return None
        return step

    def _on_local_tensors(self, step: Step | None, kind: str, like: Tensor | None) -> Step | None:
        """The same step, of local tensors if it reads DTensors."""
        if step is None:
            untold = kind == REDISTRIBUTE and like is None  # to what it redistributes
            self._communicates = self._communicates or untold
            return None
        if all(value.spec is None for value in step.inputs):
            return step
        local = localized(step, like)
        if isinstance(local, Refused):
            self._communicates = self._communicates or local.communicates
            return None
        return local

    def _is_read_below(self, value: Value) -> bool:
        """Does the backward pass that reads the tensor in question come to the nodes that have saved what is
        held of this value? Torch lets a tensor be edited that only nodes elsewhere have saved, of a dead
        branch or of a loss whose backward pass is done."""
        roots = [root for root in self._roots if root is not None]
        return all(
            any(self.provenance.comes_to(root, one) for root in roots)
            for one in behind([value], through_packed=False)
            if one.step is None and one.seen_at and one.name != COPIED_PART
        )

    def _laid_out_as(self, reader: Any, producer: Any) -> Tensor | None:
        """A tensor of the producer's layout, where what it has put out was not packed."""
        if self._base is not None and self._base.grad_fn is producer:
            return self._base
        if self.of_ranks and kind_of(reader) in TELLING:
            return told_by(reader)
        copied_by_reshape = kind_of(producer) == "CloneBackward0" and kind_of(reader) == "UnsafeViewBackward0"
        return _CONTIGUOUS if copied_by_reshape else None

    def _may_add(self, node: Node) -> bool:
        """May this sum be rebuilt? Asked first, since the search for steps of its inputs takes time."""
        return all(
            producer is None
            or kind_of(producer) not in _COSTLY_TO_ADD
            or self.policy.may_add(kind_of(producer), find(producer, number))
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
        if kind_of(producer) == PASSES_ON:
            return self._value(reader, *made_by(producer, number), depth, missing)
        if kind_of(producer) == ACCUMULATES:
            leaf = producer.variable
            return held(leaf), self.leaves.proves(reader, leaf)
        if self.from_here and not self.provenance.made(producer):
            return None, True
        lookup = registered(producer, number)
        known = lookup() if lookup else None
        if known is not None:
            if not known.current or known.memory is not None:
                return None, True
            after = known.as_made or self.provenance.made_after(reader, known)
            if after is not False and not self._is_read_below(known):
                self._elsewhere, after = True, False
            if after is False:
                return None, True
            return known, after is True
        if (producer, number) in missing:  # looked at before, on another path
            return None, True
        step = self._step(producer, number, self._laid_out_as(reader, producer), depth, missing)
        if step is None or not (step.kind == "norm" or self.policy.allows(step)):
            self._ruled_out |= step is not None and not missing
            missing.append((producer, number))
            return None, True
        value = Value(None, 0, step, name=kind_of(producer))
        metadata = producer._input_metadata[number]
        value.shape, value.dtype = torch.Size(metadata.shape), metadata.dtype
        if step.spec is not None:
            value.spec, value.shape = step.spec, shape_of(step)
        register(producer, number, weakref.ref(value))
        return value, type(lookup) is not Packed or lookup.sample is None


def as_made(node: Any, output: int, version: int, depth: int = 0) -> bool | None:
    """Does a tensor of this version hold the node's output, without edits made while autograd was off?

    Version 0 does. A later version does if nodes that work in place account for every step of the counter.
    None where a node may have worked in place and does not tell.
    """
    if version == 0:
        return True
    kind = "" if node is None else kind_of(node)
    if not kind or kind == ACCUMULATES or not node.next_functions or depth > _MAX_DEPTH:
        return False
    known = find(node, output)
    was_packed = known is not None and (known.step is None or known.layout is not None)
    if known is not None and was_packed and (known.as_made or depth == 0):
        return known.version == version and known.as_made
    producer, number = node.next_functions[0]
    if kind in ALIASES or kind == "AsStridedBackward0":
        return as_made(producer, number, version, depth + 1)
    result = saved(node, "result") if hasattr(type(node), "_saved_result") else None
    if result is not None:
        return result.version == version and result.as_made
    in_place = _works_in_place(node, kind)
    if in_place is False:
        return False
    before = as_made(producer, number, version - 1, depth + 1)
    return before if in_place or not before else None


def _works_in_place(node: Any, kind: str) -> bool | None:
    """Did the node edit its first input? None where it does not tell."""
    if kind == "CopySlices":
        return True
    is_newest = node._sequence_nr() + 1 == sequence_number()  # an older one that has no result was freed
    if hasattr(type(node), "_saved_result") and is_newest and is_saving(node, "result"):
        return True  # what it has put out has a version above 0 already
    source = saved(node, "self") if hasattr(type(node), "_saved_self") else None
    if source is not None:
        return source.copied_to_edit
    if kind not in MAY_BE_IN_PLACE:
        return False
    seen: bool | None = None if NODES is None else NODES.worked_in_place(node)
    return seen


def is_copied_to_edit(node: Any, number: int) -> bool:
    """Is this copy made by a node that keeps it and then edits its source? Then its node is the newest of the
    thread, and `number` is that of the next."""
    return bool(node._sequence_nr() + 1 == number)


def _is_leaf_on_cpu(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad and tensor.is_cpu


def is_held(value: Value) -> bool:
    """Is it held, or a view of what is held?"""
    return root_of(value).step is None


def is_view_of_held(step: Step) -> bool:
    """Is the result a view of a held tensor? Then holding it costs no memory."""
    return step.kind == "view" and bool(step.inputs) and is_held(step.inputs[0])
