"""What autograd saves, as values: a tensor that is held, or a step that rebuilds it from other values."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from leannorm.saving.evidence import Sample, owner_of, version_of
from leannorm.saving.flags import Flags, current


class Memory(IntEnum):
    """Whose memory a tensor has, in a rebuild."""

    OWN = 0  # allocated in this rebuild, and read by nobody else
    SHARED = 1  # allocated in a rebuild, and kept for other readers
    HELD = 2  # held since the forward pass, perhaps by the user


class EditedError(RuntimeError):
    """In the forward pass: a tensor does not hold any more what a node had read, so no step may read it."""


class Step(NamedTuple):
    """How to rebuild a tensor: `function(*inputs, *captured, *constants)`; nothing else decides its bits.

    `captured` are small tensors that were copied, or statistics that the node keeps; `constants` are what
    can be hashed. `in_place` computes the same in the memory of the first input. `kind` is what policies
    go by: "norm" (also activations and casts), "scale", "sum", "product", "view" (shares its input's
    memory) or "copy" (a view that is laid out anew where that is needed). `flops` are those of one rebuild
    of a product. `then_act` gives the step with an activation in the same pass, where there is one.
    `flags` are the global ones under which the node ran. `proved` is False where the step reads a tensor
    that may not be what the node read: then only a comparison can tell.
    """

    function: Callable[..., Tensor]
    inputs: tuple[Value, ...]
    captured: tuple[Tensor | None, ...] = ()
    constants: tuple[Hashable, ...] = ()
    in_place: Callable[..., Tensor] | None = None
    kind: str = "norm"
    flops: int = 0
    then_act: Callable[[str], Step | None] | None = None
    flags: Flags | None = None
    proved: bool = True

    @property
    def view(self) -> bool:
        return self.kind in ("view", "copy")


class Value:
    """One tensor of the forward pass, shared by every node that saved it.

    Either `tensor` is held, or `step` rebuilds it. A rebuilt tensor is kept from its first use to its last,
    so that several users cost one rebuild; stock autograd would have held it all the while.
    """

    layout: Hashable = None  # of the tensor that was packed; None: nobody packed it
    shape = torch.Size()  # of a tensor that is rebuilt, and its dtype, for who asks
    dtype = torch.float32
    seconds = 0.0  # of one rebuild
    place = -1  # among the tensors that were packed
    as_made = True  # was it what its node had put out, when it was packed?
    seen_at = 0  # sequence number of the first node made after it was packed
    made_at = -1  # sequence number of the node that made it
    products = 0  # convolutions and matrix products in a row, at most, that its rebuild takes
    whole: Value | None = None  # what this is a view of
    origin: tuple[Node, int] | None = None  # the node to ask again, if what was missing turns up
    call: Hashable = None  # what the norm that saved this was called with
    alone = False  # does nobody else hold the tensor?
    where = ""  # the layer at work when it was packed; known under `verify` only
    watch: Tensor | None = None  # shares the tensor's version counter, and none of its memory
    sample: Sample | None = None  # of what was packed
    memory: Tensor | None = None  # rebuilt, but edited unseen and packed again: what stock would read
    packed: Value | None = None  # of the same tensor, where this is a step's input that nobody had packed yet
    original: Tensor | None = None  # under `verify`: what the rebuild is compared with
    _rebuilt: Tensor | None = None
    _rebuilt_version = 0

    def __init__(
        self, tensor: Tensor | None, version: int = 0, step: Step | None = None, name: str = ""
    ) -> None:
        self.tensor, self.version, self.step, self.name = tensor, version, step, name
        self.users = self._left = 0
        if step is not None:
            self._rests_on(step)

    def used(self) -> Value:
        """One more node, or one more step, will read this value."""
        self.users += 1
        self._left += 1
        return self

    def becomes(self, step: Step) -> None:
        """Let go of the tensor: from now on it is rebuilt."""
        assert self.tensor is not None
        self.watch, self.sample = version_of(self.tensor), Sample.of(self.tensor)
        self.shape, self.dtype = self.tensor.shape, self.tensor.dtype
        self.step, self.tensor, self.origin = step, None, None
        self._rests_on(step)

    def _rests_on(self, step: Step) -> None:
        for value in step.inputs:
            value.used()
            if value.step is None and value.sample is None and value.tensor is not None:
                value.sample = Sample.of(value.tensor)
        self.products = max((value.products for value in step.inputs), default=0)
        self.products += step.kind == "product"

    @property
    def current(self) -> bool:
        """Has autograd counted no edit since it was packed?"""
        counter = self.tensor if self.step is None else self.watch
        return counter is None or counter._version == self.version

    @property
    def at_hand(self) -> bool:
        """Is there a tensor to be read, without rebuilding it?"""
        return self.step is None or self._rebuilt is not None or self.memory is not None

    def read(self, flags: Flags | None = None) -> Tensor:
        """The tensor, for a node that saved it; raises autograd's error if it was edited in place.

        `flags` are the global ones that are set now, where a rebuild may be needed.
        """
        self._check_version()
        if self.step is None:
            assert self.tensor is not None
            return self.tensor
        edited = self._edited_unseen()
        return self._rebuild(flags)[0] if edited is None else edited

    def _edited_unseen(self) -> Tensor | None:
        """What stock's memory holds in place of the rebuilt tensor; a view shows what its whole holds."""
        if self.packed is not None:
            return self.packed._edited_unseen()
        if self.memory is not None or self.step is None or self.step.kind != "view":
            return self.memory
        whole = self.step.inputs[0]._edited_unseen()
        return None if whole is None else run(self.step, [(whole, Memory.HELD)], None)[0]

    def look(self) -> Tensor:
        """The tensor, without counting as a use."""
        if self.step is None:
            return self._proved(EditedError)
        return run(self.step, [(value.look(), Memory.HELD) for value in self.step.inputs], current())[0]

    def _for_a_rebuild(self, flags: Flags | None) -> tuple[Tensor, Memory]:
        """The tensor for a step, and whose memory it is."""
        return self._rebuild(flags) if self.step is not None else (self._proved(), Memory.HELD)

    def _proved(self, error: type[RuntimeError] = RuntimeError) -> Tensor:
        """What is held, if it is still what was packed."""
        tensor = self.tensor
        assert tensor is not None
        if tensor._version != self.version:
            raise error(self._edited(tensor))
        if tensor.requires_grad or self.sample is not None:
            _check_there(tensor, self.name)
            if self.sample is not None and not self.sample.matches(tensor):
                raise error(
                    f"{owner_of(tensor, self.name)} was edited where autograd does not see it (through"
                    " .data), between the forward and the backward pass, and leannorm.lean() needs what it"
                    " held to rebuild a tensor: edit it after backward(), or leave lean() out for this step"
                )
        return tensor

    def _rebuild(self, flags: Flags | None) -> tuple[Tensor, Memory]:
        """The tensor, kept for its other readers where it has memory of its own, and whose memory it is."""
        assert self.step is not None
        if self._rebuilt is not None:
            tensor, memory = self._rebuilt, Memory.SHARED
            if tensor._version != self._rebuilt_version:  # by a backward function of the user's
                raise RuntimeError(self._edited(tensor))
        else:
            inputs = [value._for_a_rebuild(flags) for value in self.step.inputs]
            tensor, memory = run(self.step, inputs, flags)
        self._left -= 1
        if self._left <= 0:
            self._rebuilt, self._left = None, self.users
        elif memory is not Memory.HELD:  # which may change before the next reader comes
            self._rebuilt, self._rebuilt_version, memory = tensor, tensor._version, Memory.SHARED
        return tensor, memory

    def _check_version(self) -> None:
        if not self.current:
            tensor = self.tensor if self.step is None else self.watch
            assert tensor is not None
            raise RuntimeError(self._edited(tensor))

    def _edited(self, tensor: Tensor) -> str:
        shape = list(self.layout[0]) if isinstance(self.layout, tuple) else list(tensor.shape)
        return (
            "one of the variables needed for gradient computation has been modified by an inplace"
            f" operation: [{tensor.type()} {shape}], which is output of {self.name or 'a leaf'}, is at"
            f" version {tensor._version}; expected version {self.version} instead. leannorm.lean() needs it"
            " for the backward pass: edit a copy of it, or edit it after backward()."
        )


def _check_there(tensor: Tensor, name: str) -> None:
    """Raises where sharding has freed a weight since the forward pass."""
    if type(tensor) in (Tensor, torch.nn.Parameter) and tensor.numel() and tensor.layout == torch.strided:
        nbytes = tensor.untyped_storage().nbytes()
        if nbytes == 0:
            raise RuntimeError(
                f"what {name or 'a parameter'} of shape {list(tensor.shape)} held was freed since the"
                " forward pass, as sharding does with weights, and rebuilding a layer's product needs it: use"
                ' leannorm.lean("norm"), which reads no parameter in the backward pass, or shard whole blocks'
            )


def run(step: Step, inputs: list[tuple[Tensor, Memory]], flags: Flags | None) -> tuple[Tensor, Memory]:
    """The tensor that a step makes of its inputs, and whose memory it is.

    Each input comes with the same answer for itself. What a step may overwrite is decided by the memory
    at hand, not by what a recipe says of itself. `flags` are those that are set now; the step's own are set
    where they differ.
    """
    tensors = [tensor for tensor, _ in inputs]
    function = step.in_place if step.in_place is not None and _may_overwrite(*inputs[0]) else step.function
    if step.flags is None or step.flags is flags:
        result = function(*tensors, *step.captured, *step.constants)
    else:
        with step.flags.set():
            result = function(*tensors, *step.captured, *step.constants)
    place = _place_of(result)
    others = [*inputs, *((tensor, Memory.HELD) for tensor in step.captured if tensor is not None)]
    return result, max(
        (memory for tensor, memory in others if _place_of(tensor) == place), default=Memory.OWN
    )


def _may_overwrite(tensor: Tensor, memory: Memory) -> bool:
    return memory is Memory.OWN and torch.ops.aten.is_non_overlapping_and_dense(tensor)


def _place_of(tensor: Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else None


def held(tensor: Tensor, name: str = "") -> Value:
    """Without the graph that made it, which may lead back to the node that saved it; `name` is the node's."""
    return Value(tensor if tensor.grad_fn is None else tensor.detach(), tensor._version, None, name)
