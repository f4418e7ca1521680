"""The pack hook: what becomes of each tensor that autograd saves."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import Node

from leannorm.saving import own, products, views  # noqa: F401  (these register their recipes)
from leannorm.saving.device import asynchronous
from leannorm.saving.exact import layout, seconds
from leannorm.saving.ledger import Ledger
from leannorm.saving.policy import Part, Plan, Policy, Record, plan, sums_in_a_row
from leannorm.saving.recipes import MADE_ANEW, RECIPES, SAVE_THEIR_OUTPUT, eps_of_call
from leannorm.saving.values import Step, Value, find, held, register, saved, wait, waiting

SMALLEST = 1024  # elements: below, a recipe weighs as much as the tensor
_DEEPEST = 12  # nodes of one chain
_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)
_ACCUMULATES = "torch::autograd::AccumulateGrad"


class Packing:
    """One forward pass's packing, by one policy; `choose(i, call)` may rule out rebuilding tensor i."""

    def __init__(
        self,
        policy: Policy,
        ledger: Ledger,
        choose: Callable[[int, Hashable], bool] | None,
    ) -> None:
        self.policy, self.ledger, self.choose = policy, ledger, choose
        self.calls: list[tuple[Any, ...]] = []
        self.outcomes: list[float | bool | None] = []  # of each call: see `records`
        self._rebuilt_at: dict[int, weakref.ref[Value]] = {}
        self._recipes = {name: made for name, made in RECIPES.items() if policy.considers(name)}
        self._missing: list[tuple[Node, int]] = []
        self._seconds: float | None = None
        self._anything_waits = False
        self._largest = 0

    def pack(self, tensor: Tensor) -> Value:
        """The pack hook."""
        node = tensor.grad_fn
        if node is None:
            return self._without_node(tensor).used()
        size = tensor.numel()
        if type(tensor) not in _PLAIN or size < SMALLEST:
            value = self._hold(tensor)
            value.eps = eps_of_call(sys._getframe(1))
            return value.used()
        name, output, seen_as = node.name(), tensor.output_nr, layout(tensor)
        call = (name, *seen_as)
        self.calls.append(call)
        known = find(node, output)
        if known is not None and known.layout == seen_as and known.version == tensor._version:
            self.outcomes.append(None)  # counted when it was first packed
            return known.used()
        self._largest = max(self._largest, size)
        may = self.policy.is_worth(size, self._largest)
        may = may and (self.choose is None or self.choose(len(self.calls) - 1, call))
        rebuilt = None
        if may and (known is not None or name in self._recipes):
            self._missing.clear()
            rebuilt = self._rebuilt(tensor, node, known, seen_as)
        self.outcomes.append(rebuilt is not None and self._seconds)
        value = rebuilt or self._hold(tensor, name)
        value.layout, value.place, value.eps = seen_as, len(self.outcomes) - 1, eps_of_call(sys._getframe(1))
        reference = weakref.ref(value)
        register(node, output, reference)
        if value.step is None:
            self._offer(value, tensor, node, name, may)
        else:
            self._rebuilt_at[value.place] = reference
        if self._anything_waits:
            self._retry(node, output)
        return value.used()

    def records(self) -> list[Record | None]:
        """One for every call; None for a tensor that an earlier call has brought."""
        return [
            None if outcome is None else Record(name, shape, dtype, prod(shape) * dtype.itemsize, outcome)
            for (name, shape, _, dtype), outcome in zip(self.calls, self.outcomes, strict=True)
        ]

    def plan(self, budget: float) -> Plan:
        """What later passes like this one should rebuild."""
        known: dict[Value, int] = {}
        parts = [
            # every view of a memory that nobody packed takes all of it anew
            Part(
                places, nbytes, max(float(self.outcomes[i] or 0) for i in places), sums_in_a_row(root, known)
            )
            for root, places, nbytes in self.ledger.parts(self._rebuilt_at)
        ]
        kept, stock = self.ledger.kept(), self.ledger.kept() + self.ledger.rebuilt()
        return plan(budget, self.calls, parts, kept, stock)

    # ------------------------------------------------ held

    def _without_node(self, tensor: Tensor) -> Value:
        """Parameters, inputs, statistics, positions: nothing that could be rebuilt."""
        if tensor.requires_grad:  # a parameter, most often: not counted
            return Value(tensor, tensor._version)
        if tensor.dtype != torch.int64 or type(tensor) not in _PLAIN:
            value = self._hold(tensor)
            value.eps = eps_of_call(sys._getframe(2))
            return value
        # a narrow copy beside the caller's own tensor would be memory added
        alone = sys.getrefcount(tensor) <= views.references_when_alone()
        if alone and not asynchronous(tensor):
            return self._hold_narrowed(tensor)
        value = self._hold(tensor)
        value.alone = alone
        return value

    def _hold(self, tensor: Tensor, made_by: str = "") -> Value:
        value = Value(tensor.detach(), tensor._version, None, made_by) if made_by else held(tensor)
        self.ledger.holds(value, tensor)
        return value

    def _hold_narrowed(self, tensor: Tensor) -> Value:
        value = views.narrowed(tensor) if tensor.numel() >= SMALLEST else None
        if value is None or value.step is None:
            return self._hold(tensor)
        narrow = value.step.inputs[0]
        assert narrow.tensor is not None
        self.ledger.holds(narrow, narrow.tensor)
        self.ledger.rebuilds(value, tensor, tensor.nbytes - narrow.tensor.nbytes)
        return value

    def _narrow_positions(self, node: Any) -> None:
        """Where windows had their maxima, in as few bytes as positions in the input need.

        For devices, where a look at the numbers themselves would stall the step.
        """
        value = saved(node, "result1")
        if value is None or not value.alone or value.tensor is None or value.tensor.numel() < SMALLEST:
            return
        tensor = value.tensor
        step = views.narrowed_positions(tensor, node)
        if step is not None:
            narrow = step.inputs[0]
            assert narrow.tensor is not None
            value.becomes(step)
            self.ledger.holds(narrow, narrow.tensor)
            self.ledger.rebuilds(value, tensor, tensor.nbytes - narrow.tensor.nbytes)

    def _offer(self, value: Value, tensor: Tensor, node: Any, name: str, may: bool) -> None:
        """What a held tensor brings within reach: the parts of a `cat`, the whole that a view is a part of.

        And the other way round: if the tensor itself could be rebuilt from something that is not held
        now, it waits for the case that it will be (attention scales q and k before v is saved, a view of
        the memory that q and k came from).
        """
        if name == "CatBackward0":
            views.find_parts_in(value, node)
        base = tensor._base
        if base is not None and base.grad_fn is not None and base.grad_fn is not node:
            if find(base.grad_fn, base.output_nr) is None:
                value.whole = held(base)
                register(base.grad_fn, base.output_nr, weakref.ref(value.whole))
                self._retry(base.grad_fn, base.output_nr)
        elif may and len(self._missing) == 1 and name not in SAVE_THEIR_OUTPUT:
            value.origin = node, tensor.output_nr
            wait(*self._missing[0], weakref.ref(value))
            self._anything_waits = True

    def _retry(self, node: Node, output: int) -> None:
        for value in waiting(node, output):
            tensor = value.tensor
            if value.step is None and tensor is not None and value.origin is not None:
                step = self._step(*value.origin, tensor, 0)
                if step and self._accepts(step, tensor, value.layout):
                    value.becomes(step)
                    self.ledger.rebuilds(value, tensor)
                    self.outcomes[value.place] = self._seconds
                    self._rebuilt_at[value.place] = weakref.ref(value)

    # ------------------------------------------------ rebuilt

    def _rebuilt(self, tensor: Tensor, node: Node, known: Value | None, seen_as: Hashable) -> Value | None:
        if known is not None and known.version == tensor._version:
            step = views.laid_out_as(known, tensor)
        elif self._unedited(node, tensor.output_nr, tensor._version):
            step = self._step(node, tensor.output_nr, tensor, 0)
        else:
            step = None
        if step is None or not self._accepts(step, tensor, seen_as):
            return None
        value = Value(None, tensor._version, step, name=node.name())
        self.ledger.rebuilds(value, tensor)
        return value

    def _accepts(self, step: Step, tensor: Tensor, seen_as: Hashable) -> bool:
        if _in_memory(step) or not self.policy.allows(step, tensor.nbytes):
            return False
        self._seconds = seconds(step, tensor, seen_as)
        return self._seconds is not None

    def _step(self, node: Node, output: int, like: Tensor | None, depth: int) -> Step | None:
        name = node.name()
        if name in views.POOLS:
            self._narrow_positions(node)
        recipe = self._recipes.get(name)
        if recipe is None or depth > _DEEPEST or (name == "AddBackward0" and not self._may_add(node)):
            return None

        edges: tuple[tuple[Node | None, int], ...] = ()  # made anew each time that the node is asked

        def given(node: Node, i: int) -> Value | None:
            nonlocal edges
            edges = edges or node.next_functions
            return self._value(*edges[i], depth + 1) if i < len(edges) else None

        if name == "CatBackward0" and like is not None:
            edges = node.next_functions
            if self.policy.may_copy(len(edges)):
                recipe = views.cat_of_copied_parts
            elif given(node, len(edges) - 1) is None:  # what is new comes last, most often
                return None
        return recipe(node, output, given, like)

    def _may_add(self, node: Node) -> bool:
        """Looked at before steps are made for the inputs of a sum, only to be thrown away."""
        return all(
            producer is None
            or producer.name() not in MADE_ANEW
            or self.policy.may_add(find(producer, number))
            for producer, number in node.next_functions
        )

    def _value(self, node: Any, output: int, depth: int) -> Value | None:
        """The value at hand for a node's output: known, a leaf, or itself rebuilt."""
        if node is None:
            return None
        if node.name() == _ACCUMULATES:
            return held(node.variable)
        known = find(node, output)
        if known is not None:
            return known
        step = self._step(node, output, None, depth)
        if step is None or not (step.kind == "norm" or self.policy.allows(step, _nbytes(node, output))):
            self._missing.append((node, output))
            return None
        value = Value(None, 0, step, name=node.name())
        register(node, output, weakref.ref(value))
        return value

    def _unedited(self, node: Any, output: int, version: int) -> bool:
        """Is what the node put out still what the tensor holds, or was it edited where autograd was off?

        Version 0 is as made. Later versions must be accounted for by nodes that work in place.
        """
        if version == 0:
            return True
        known = find(node, output)
        if known is not None:
            return known.version == version
        if hasattr(type(node), "_saved_result"):  # asked of the node itself, it would unpack
            result = saved(node, "result")  # None: this is the node, saving its own output
            return result is None or result.version == version
        if node.name() in views.ALIASES:
            producer, number = node.next_functions[0]
            return self._unedited(producer, number, version)
        if version == 1 and hasattr(type(node), "_saved_self"):  # in place, these save a copy of their input
            source = saved(node, "self")
            return source is not None and source.name == "CloneBackward0"
        return False


def _nbytes(node: Any, output: int) -> int:
    metadata = node._input_metadata[output]
    return int(prod(metadata.shape) * metadata.dtype.itemsize)


def _in_memory(step: Step) -> bool:
    """Is it a view of a tensor that is held? Then holding it costs nothing."""
    while step.view and step.inputs and not step.copies:
        value = step.inputs[0]
        if value.step is None:
            return True
        step = value.step
    return False
