"""The two hooks: what becomes of each tensor that autograd saves, and what it gets back."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import Node

from leannorm.saving import reasons
from leannorm.saving.calls import Call, call_of, is_compiled
from leannorm.saving.device import asynchronous
from leannorm.saving.evidence import Sample, sequence_number, version_of
from leannorm.saving.flags import current
from leannorm.saving.graph import Packed, find, kind_of, register, registered, saved, wait, waiting
from leannorm.saving.ledger import Ledger
from leannorm.saving.narrowed import POOLS, narrowed, narrowed_positions, references, references_when_alone
from leannorm.saving.plan import Part, Plan, plan, sums_in_a_row
from leannorm.saving.policy import Policy
from leannorm.saving.recipes.activations import SAVE_THEIR_OUTPUT
from leannorm.saving.recipes.views import find_parts_in, laid_out_as
from leannorm.saving.search import Missing, Search, as_made, in_memory
from leannorm.saving.trial import layout, seconds, without_autocast
from leannorm.saving.values import EditedError, Step, Value, held
from leannorm.saving.verify import Layers, check_equal

SMALLEST = 1024  # elements: below, a recipe weighs as much as the tensor
_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)


class Packing:
    """One forward pass's packing, by one policy; `choose(i, call)` may rule out rebuilding tensor i."""

    def __init__(
        self,
        policy: Policy,
        ledger: Ledger,
        choose: Callable[[int, Hashable], bool] | None,
        layers: Layers | None = None,
    ) -> None:
        self.policy, self.ledger, self.choose, self.layers = policy, ledger, choose, layers
        self.calls: list[tuple[Any, ...]] = []
        self.reasons: Counter[str] = Counter()
        self.seen = 0
        self.search = Search(policy, self._narrow_positions)
        self._anything_waits = False
        self._largest = 0
        self._call: tuple[int, Call | None] = -1, None

    def pack(self, tensor: Tensor) -> Value:
        """The pack hook. Whatever fails in it, the tensor is held as in stock autograd."""
        self.seen += 1
        try:
            alone = tensor.dtype is torch.int64 and references(tensor) <= references_when_alone()
            return self._pack(tensor, alone, sys._getframe(1)).used()
        except EditedError:  # what a step would read was edited since: no evidence
            return self._hold(tensor).used()
        except Exception as error:
            self.reasons[reasons.failed(tensor, error)] += 1
            return self._hold(tensor).used()

    def _pack(self, tensor: Tensor, alone: bool, frame: FrameType) -> Value:
        node, number = tensor.grad_fn, sequence_number()
        self.search.flags.look(number)
        if node is None:
            return self._without_node(tensor, alone, frame, number)
        kind = kind_of(node)
        if type(tensor) not in _PLAIN:
            value = self._hold(tensor, kind or node.name())
            value.call = self._call_of(frame, number)
            return value
        output, version, seen_as = tensor.output_nr, tensor._version, layout(tensor)
        lookup = registered(node, output)
        known = lookup() if lookup else None
        size, place, may = tensor.numel(), -1, False
        if size >= SMALLEST:
            place, call = len(self.calls), (kind, *seen_as)
            self.calls.append(call)
        if known is not None and known.layout == seen_as and known.version == version and known.current:
            return self._again(known, tensor)
        unedited = version == 0 or as_made(node, output, version)
        if known is None and type(lookup) is Packed:  # its reader is gone, a log perhaps
            unedited = unedited and (lookup.sample is None or lookup.sample.matches(tensor))
        if size >= SMALLEST:
            self._largest = max(self._largest, size)
            may = self.policy.is_worth(size, self._largest)
            may = may and (self.choose is None or self.choose(place, call)) and unedited
        found: Step | Missing = Missing()
        if may and known is not None and known.layout is not None and known.version == version:
            found = laid_out_as(known, tensor) or found
        elif may and self.search.considers(kind):
            found = self.search.step(node, output, tensor)
            if isinstance(found, Missing) and not self.reasons:
                self.reasons.update(reasons.of_hooks_within(node))
        spent = self._accepts(found, tensor, seen_as) if isinstance(found, Step) else None
        if isinstance(found, Step) and spent is not None:
            value = Value(None, version, found, name=kind)
            value.watch, value.sample = version_of(tensor), Sample.of(tensor)
            value.shape, value.dtype, value.seconds = tensor.shape, tensor.dtype, spent
            self.ledger.rebuilds(value, tensor)
        else:
            value = self._hold(tensor, kind or node.name())
            value.sample = Sample.of(tensor)  # it may be edited unseen before a step rests on it
        value.layout, value.place, value.as_made, value.seen_at = seen_as, place, unedited, number
        value.made_at, value.call = node._sequence_nr(), self._call_of(frame, number)
        self._mark(value, tensor)
        if known is not None and known.step is not None and known.layout is None:
            known.packed = value
        packed = Packed(value)
        packed.sample = value.sample
        register(node, output, packed)
        if value.step is None and unedited and size >= SMALLEST:
            missing = found.outputs if isinstance(found, Missing) else ()
            self._offer(value, tensor, node, kind, missing if may else ())
        if self._anything_waits:
            self._retry(node, output)
        return value

    def _again(self, known: Value, tensor: Tensor) -> Value:
        """A tensor that was packed before; edited unseen since, it is held: all read what stock's would."""
        rebuilt = known.step is not None and known.memory is None
        if rebuilt and known.sample is not None and not known.sample.matches(tensor):
            known.memory = tensor.detach()
        return known

    def _mark(self, value: Value, tensor: Tensor) -> None:
        if self.layers is not None:
            value.where = self.layers.at_work()
            if value.step is not None:
                value.original = tensor.detach()

    def _call_of(self, frame: FrameType, number: int) -> Call | None:
        """The same for all that one node saves: no node is made meanwhile."""
        if self._call[0] != number:
            self._call = number, call_of(frame)
            if is_compiled(frame):
                self.reasons[reasons.COMPILED_WITHIN] = 1
        return self._call[1]

    def _accepts(self, step: Step, tensor: Tensor, seen_as: Hashable) -> float | None:
        """The seconds of a rebuild, if it is worth it and exact."""
        if in_memory(step) or not self.policy.allows(step, tensor.nbytes):
            return None
        return seconds(step, tensor, seen_as)

    def plan(self, budget: float) -> Plan:
        """What later passes like this one should rebuild."""
        known: dict[Value, int] = {}
        # every view of a memory that nobody packed takes all of it anew
        parts = [
            Part(places, nbytes, spent, sums_in_a_row(root, known))
            for root, places, nbytes, spent in self.ledger.parts()
        ]
        kept, stock = self.ledger.kept(), self.ledger.kept() + self.ledger.rebuilt()
        return plan(budget, self.calls, parts, kept, stock)

    # ------------------------------------------------ held

    def _without_node(self, tensor: Tensor, alone: bool, frame: FrameType, number: int) -> Value:
        """Parameters, inputs, statistics, positions: nothing that could be rebuilt."""
        if tensor.requires_grad:  # a parameter, most often: not counted
            value = Value(tensor, tensor._version)
            # also a norm's, for its output, and a leaf of this pass alone, of which no other pass knows
            if tensor.dim() == 1 or self.policy.reads_weights or type(tensor) is Tensor:
                value.sample = Sample.of(tensor)  # an edit through .data may come before a step reads it
            return value
        if tensor.dtype != torch.int64 or type(tensor) not in _PLAIN:
            value = self._hold(tensor)
            call = value.call = self._call_of(frame, number)
            if call is None or call.reads_buffers or tensor.numel() >= SMALLEST:
                value.sample = Sample.of(tensor)  # what a norm in training keeps, nobody else has
            return value
        # a narrow copy beside the caller's own tensor would be memory added
        if alone and not asynchronous(tensor) and tensor.numel() >= SMALLEST:
            step = narrowed(tensor)
            if step is not None:
                value = Value(None, 0, step)
                value.shape, value.dtype = tensor.shape, tensor.dtype
                self._narrow(value, step, tensor)
                return value
        value = self._hold(tensor)
        value.alone = alone
        return value

    def _hold(self, tensor: Tensor, kind: str = "") -> Value:
        value = held(tensor, kind)
        self.ledger.holds(value, tensor)
        return value

    def _narrow(self, value: Value, step: Step, tensor: Tensor) -> None:
        narrow = step.inputs[0]
        assert narrow.tensor is not None
        self.ledger.holds(narrow, narrow.tensor)
        self.ledger.rebuilds(value, tensor, tensor.nbytes - narrow.tensor.nbytes)

    def _narrow_positions(self, node: Node) -> None:
        """Where windows had their maxima, in as few bytes as positions in the input need."""
        value = saved(node, "result1")
        if value is None or not value.alone or value.tensor is None or value.tensor.numel() < SMALLEST:
            return
        tensor = value.tensor
        step = narrowed_positions(tensor, node, POOLS[kind_of(node)])
        if step is not None:
            value.becomes(step)
            self._narrow(value, step, tensor)

    def _offer(
        self, value: Value, tensor: Tensor, node: Node, kind: str, missing: tuple[tuple[Node, int], ...]
    ) -> None:
        """What a held tensor brings within reach: the parts of a `cat`, the whole that a view is a part of.

        And the other way round: if the tensor itself could be rebuilt from something that is not held
        now, it waits for the case that it will be (attention scales q and k before v is saved, a view of
        the memory that q and k came from).
        """
        if kind == "CatBackward0":
            find_parts_in(value, node)
        base = tensor._base
        if base is not None and base.grad_fn is not None and base.grad_fn is not node:
            if find(base.grad_fn, base.output_nr) is None:
                value.whole = whole = held(base, kind_of(base.grad_fn))
                whole.as_made = as_made(base.grad_fn, base.output_nr, base._version)
                whole.seen_at, whole.sample = value.seen_at, Sample.of(base)
                register(base.grad_fn, base.output_nr, weakref.ref(whole))
                self._retry(base.grad_fn, base.output_nr)
        elif len(missing) == 1 and kind not in SAVE_THEIR_OUTPUT:
            value.origin = node, tensor.output_nr
            wait(*missing[0], weakref.ref(value))
            self._anything_waits = True

    def _retry(self, node: Node, output: int) -> None:
        for value in waiting(node, output):
            tensor = value.tensor
            if value.step is not None or tensor is None or value.origin is None or not value.current:
                continue
            if value.sample is not None and not value.sample.matches(tensor):
                continue  # edited unseen: what its own node reads cannot be rebuilt
            step = self.search.step(*value.origin, tensor)
            if isinstance(step, Step):
                spent = self._accepts(step, tensor, value.layout)
                if spent is not None:
                    value.becomes(step)
                    value.seconds = spent
                    self._mark(value, tensor)
                    self.ledger.rebuilds(value, tensor)


def unpack(value: Value) -> Tensor:
    """The unpack hook."""
    if value.at_hand:
        tensor = value.read()
    elif not (torch.is_grad_enabled() or torch._C._is_any_autocast_enabled()):
        tensor = value.read(current())
    else:
        with torch.no_grad(), without_autocast():
            tensor = value.read(current())
    if value.original is not None:
        check_equal(tensor, value.original, value)
    return tensor
