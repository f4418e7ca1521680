"""A step: the operation that rebuilds a tensor from other values, and how it is run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from leannorm.saving.evidence import EditedError
from leannorm.saving.flags import Flags

if TYPE_CHECKING:
    from leannorm.saving.values import Value


UNFILLED = "unfilled"  # the kind of a step whose result is new memory in part: a later write must follow


class Owner(IntEnum):
    """Who owns a tensor's memory during a rebuild, and so whether a step may overwrite it."""

    OWN = 0  # allocated by this rebuild, without other readers
    SHARED = 1  # allocated by a rebuild, and kept for other readers
    HELD = 2  # held since the forward pass, perhaps by the user


class Step(NamedTuple):
    """How to rebuild a tensor: `function(*inputs, *captured, *constants)`; nothing else decides its bits.

    `captured` are small tensors that were copied, or statistics that the node keeps, none of them edited
    (their versions are 0); `constants` are hashable. `in_place` computes the same in the memory of the first
    input. Policies decide by `kind`: "norm" (also activations and casts), "scale", "sum", "added norm" (a sum
    in a norm's own pass), "product", "attention", "view" (shares its input's memory), "copy" (a view that may
    be copied into another layout) or "held" (unpacked by others' hooks). `flops` are those of a rebuild; it
    is `costly` if that is much for what it frees. `then(step, act[, added])`: the step with an activation, a
    cast (`act` is a dtype) or the addition of a value in the same pass, or None. `flags` are the global flags
    under which the node ran. `proved` is False where the step may read something else than the node read:
    then it is compared every time. `identity` is all that the node tells of its operation. `spec`: the result
    is the local tensor of a DTensor, shared so.
    `tells_layout` is False where a node may have put out another layout than the step does; `in_any_layout`:
    the result's bits depend on no layout. `depth` counts the steps in a row from held tensors on, `runs`
    those that must run for it from packed tensors on, one that is read twice twice.
    """

    function: Callable[..., Tensor]
    inputs: tuple[Value, ...]
    captured: tuple[Tensor | None, ...] = ()
    constants: tuple[Hashable, ...] = ()
    in_place: Callable[..., Tensor] | None = None
    kind: str = "norm"
    flops: int = 0
    costly: bool = False
    then: Callable[..., Step | None] | None = None
    flags: Flags | None = None
    proved: bool = True
    identity: Hashable = ()
    tells_layout: bool = True
    in_any_layout: bool = False
    spec: Any = None
    depth: int = 1
    runs: int = 1

    def told(self, flags: Flags | None, proved: bool, identity: Hashable, in_any_layout: bool) -> Step:
        """The same with what a search adds, for which `_replace` takes three times as long."""
        depth, runs = 1, 1
        for value in self.inputs:
            if value.step is not None:
                depth = max(depth, 1 + value.step.depth)
                runs += value.step.runs if value.layout is None else 0
        told = flags, proved, identity, self.tells_layout, in_any_layout, self.spec
        return Step(*self[:9], *told, depth, runs)

    @property
    def view(self) -> bool:
        return self.kind in ("view", "copy")


def behind(
    values: Iterable[Value], until: Collection[str] = (), *, through_packed: bool = True
) -> Iterator[Value]:
    """These values and all that they are made of, each once, back to steps of the kinds `until`, or perhaps
    to packed values."""
    every = list(dict.fromkeys(values))
    seen = set(every)
    for value in every:  # which grows
        yield value
        goes_on = through_packed or value.layout is None
        if goes_on and value.step is not None and value.step.kind not in until:
            every += [before for before in value.step.inputs if before not in seen]
            seen.update(value.step.inputs)


def root_of(value: Value) -> Value:
    """The value whose memory this has, where it is a view, or a view of a view."""
    while value.step is not None and value.step.kind == "view" and value.step.inputs:
        value = value.step.inputs[0]
    return value


def is_unfilled(step: Step | None) -> bool:
    return step is not None and step.kind == UNFILLED


def run(step: Step, inputs: list[tuple[Tensor, Owner]], flags: Flags | None) -> tuple[Tensor, Owner]:
    """Run a step on its inputs, each with its owner; returns the result and the owner of its memory.

    Whether the first input may be overwritten follows from its memory, not from what the recipe declares.
    `flags` are the global flags that are set now; the step's flags are set where they differ.
    """
    tensors = [tensor for tensor, _ in inputs]
    if any(captured is not None and captured._version for captured in step.captured):
        raise EditedError(
            "the statistics of a norm were edited in place between the forward and the backward pass, and"
            " leannorm.lean() needs what they were: edit a copy of them, or edit them after backward()"
        )
    function = step.in_place if step.in_place is not None and _may_overwrite(*inputs[0]) else step.function
    if step.flags is None or step.flags is flags:
        result = function(*tensors, *step.captured, *step.constants)
    else:
        with step.flags.set():
            result = function(*tensors, *step.captured, *step.constants)
    if step.kind == "held":  # other readers of what the hooks unpack may hold it, too
        return result, Owner.SHARED
    owner = Owner.OWN
    for tensor, memory in inputs:
        if memory > owner and share_memory(tensor, result):
            owner = memory
    for captured in step.captured:
        if owner is not Owner.HELD and share_memory(captured, result):
            owner = Owner.HELD
    return result, owner


def share_memory(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and bool(_is_alias_of(a, b))


_is_alias_of = torch._C._is_alias_of  # type: ignore[attr-defined]


def _may_overwrite(tensor: Tensor, memory: Owner) -> bool:
    return memory is Owner.OWN and torch.ops.aten.is_non_overlapping_and_dense(tensor)
