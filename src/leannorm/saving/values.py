"""A saved tensor as a `Value`: the tensor itself (held), or a step that rebuilds it from other values."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from leannorm.saving.device import share, stream_of
from leannorm.saving.evidence import (
    EditedError,
    RebuildError,
    check_there,
    matches,
    near,
    owner_of,
    sample_of,
    version_of,
)
from leannorm.saving.flags import Flags, current
from leannorm.saving.shards import PLAIN, local_of, shared_as, spec_of
from leannorm.saving.steps import Owner, Step, behind, run

UNTOLD = torch.Size()
_CPU = torch.device("cpu")


class _Referable:
    __slots__ = ("__weakref__",)  # a dataclass has this slot itself from Python 3.11 on


@dataclass(slots=True, eq=False, repr=False)
class Value(_Referable):
    """One tensor of the forward pass, shared by every node that saved it.

    Either `tensor` is held, or `step` rebuilds it. A rebuilt tensor is kept from its first use to its last,
    so that several readers cost one rebuild; stock autograd would hold it during that time, too. If it is
    rebuilt from a narrower copy of its own, it takes the place of that copy. Of a DTensor, the value is the
    local tensor, and `spec` how the ranks share it; nodes and recipes get the DTensor (`shared`).

    The fields are slots: the C++ nodes read and write them in their places (csrc/nodes/values.h).
    """

    tensor: Tensor | None
    version: int = 0
    step: Step | None = None
    name: str = ""
    users: int = 0  # readers of the tensor: nodes and steps
    layout: Hashable = None  # of the packed tensor; None for a value that was not packed
    shape: torch.Size = UNTOLD  # shape and dtype of a rebuilt tensor, where they are known without it
    dtype: torch.dtype = torch.float32
    seconds: float = 0.0  # of one rebuild, measured
    frees: int = 0  # bytes of a rebuilt storage, at the value that owns it
    if_held: int = 0  # bytes that holding it would take, perhaps in a narrower dtype
    place: int = -1  # index among the packed tensors
    as_made: bool = True  # when it was packed, did it hold its node's output, unedited?
    provenance: object = None  # the pass that packed it
    order: int = 0  # of its packing among those of the pass
    seen_at: int = 0  # sequence number, in its thread, of the first node made after it was packed
    copied_to_edit: bool = False  # is it the copy that a node makes of what it then edits in place?
    products: int = 0  # the longest chain of convolutions and matrix products in its rebuild
    whole: Value | None = None  # the base, if this is a view
    call: Hashable = None  # the arguments of the norm call that saved this
    from_narrow: bool = False  # is it rebuilt from a copy of its own in a narrower dtype?
    alone: bool = False  # does only autograd hold the tensor?
    why: str = ""  # it is held, in words
    where: str = ""  # the layer that was running when it was packed; under `verify` only
    copied: Tensor | None = None  # a copy of a norm's weight that sharding frees after the norm ran
    watch: Tensor | None = None  # shares the tensor's version counter, without its memory
    spec: Any = None  # of the DTensor whose local tensor this is
    local_version: int = 0  # of that local tensor
    sample: bytes | None = None  # of the packed tensor's bytes
    pinned: Tensor | None = None  # of a leaf, which may get other data: an alias of what it had
    memory: Tensor | None = None  # of a rebuilt value that was edited through .data and packed again
    packed: Value | None = None  # of the same tensor, where this was a step's input before it was packed
    seen: weakref.ref[Tensor] | None = None  # the packed tensor, as long as the program has it
    original: Tensor | None = None  # under `verify`: the saved tensor, to compare the rebuild with
    sort: int | None = None  # a number for all that searches ask of it (sorts.py)
    in_rows: bool = False  # a log-softmax whose gradient can be computed some rows at a time
    device: torch.device = _CPU  # where it is in rows
    stream: torch.Stream | None = None  # on which the held tensor, or what the step captured, was made
    _rebuilt: Tensor | None = None
    _rebuilt_version: int = 0
    _rebuilt_on: torch.Stream | None = None
    _left: int = 0  # readers to come, before what is rebuilt is freed

    def __post_init__(self) -> None:
        tensor, step = self.tensor, self.step
        if tensor is not None:
            if type(tensor) not in PLAIN:
                self._of_ranks(tensor)
            self.stream = stream_of(self.tensor)  # type: ignore[arg-type]
        if step is not None:
            self._made_by(step)

    def _of_ranks(self, tensor: Tensor) -> None:
        """Hold the local tensor of a DTensor, and watch the counter of the DTensor itself."""
        local = local_of(tensor)
        if local is not None:
            self.tensor, self.spec, self.local_version = local, spec_of(tensor), local._version
            self.watch = version_of(tensor)

    def shared(self, tensor: Tensor) -> Tensor:
        """What a node or a recipe gets: the DTensor, if this is the local tensor of one."""
        return tensor if self.spec is None else shared_as(tensor, self.spec)

    def used(self) -> Value:
        """Count one more reader (a node or a step) and return self."""
        self.users += 1
        self._left += 1
        if self.users == 1 and self.step is not None:
            self._read_inputs(self.step)
        return self

    def becomes(self, step: Step, tensor: Tensor) -> None:
        """Free the tensor, if it is held: from now on `step` rebuilds it."""
        if self.tensor is not None:
            self.watch = version_of(tensor) if self.watch is None else self.watch
            self.sample = sample_of(tensor)
        self.shape, self.dtype, self.sort = tensor.shape, tensor.dtype, None
        self.step, self.tensor, self.from_narrow, self.pinned = step, None, False, None
        self._made_by(step)
        if self.users:
            self._read_inputs(step)

    def _made_by(self, step: Step) -> None:
        self.products = products_of(step.inputs) + (step.kind == "product")
        for tensor in step.captured:
            if tensor is not None:
                self.stream = stream_of(tensor)

    @staticmethod
    def _read_inputs(step: Step) -> None:
        """Count one more reader of each input; sample the held ones. Not before something reads the result:
        a reader that never comes would keep what is rebuilt for it."""
        for value in step.inputs:
            value.used()
            if value.step is None and value.sample is None and value.tensor is not None:
                value.pin(value.tensor)

    def pin(self, leaf: Tensor) -> None:
        """Steps will read what this leaf holds now, also where it has other data by then, as weights that are
        quantized for the time of a call (`leaf.data = other`). Nodes get the leaf itself, as in torch."""
        self.sample = sample_of(leaf)
        if leaf.requires_grad and type(leaf) in PLAIN:
            self.pinned = leaf.detach()

    @property
    def is_held(self) -> bool:
        """Is the tensor held, here or by others' hooks?"""
        return self.step is None or self.step.kind == "held"

    @property
    def current(self) -> bool:
        """Is the version counter still what it was when the tensor was packed?"""
        counter = self.tensor if self.watch is None else self.watch
        return counter is None or counter._version == self.version

    @property
    def at_hand(self) -> bool:
        """Can the tensor be read without a rebuild?"""
        return self.step is None or self._rebuilt is not None or self.memory is not None

    def read(self, flags: Flags | None = None) -> Tensor:
        """The tensor, for a node that saved it; raises autograd's error if it was edited in place.

        `flags` are the global flags that are set now; needed only where the tensor must be rebuilt.
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
        return None if whole is None else run(self.step, [(whole, Owner.HELD)], None)[0]

    def unread(self) -> bool:
        """May a node read the tensor in parts, from what it is rebuilt from? Raises as `read` does."""
        self._check_version()
        return not self.at_hand and self.original is None and self._edited_unseen() is None

    def skip(self) -> None:
        """A reader needed no rebuild."""
        self._left -= 1
        if self._left <= 0:
            self._left = self.users

    def source_of_rows(
        self, cast: Callable[..., Tensor], flags: Flags | None
    ) -> tuple[Tensor, list[torch.dtype]]:
        """The tensor that the step's input is a reshaped cast of, and the casts from it on; read once.

        Goes back only over tensors that this step alone reads, and that keep the last dim.
        """
        self.skip()
        assert self.step is not None
        source, casts = self.step.inputs[0], list[torch.dtype]()
        while source.step is not None and source.users == 1 and not source.at_hand and source.layout is None:
            function, before = source.step.function, source.step.inputs
            if function not in (cast, torch.reshape) or before[0].width != self.shape[-1]:
                break
            if function is cast:
                casts.insert(0, source.step.constants[0])  # type: ignore[arg-type]
            source = before[0]
        return source._for_a_rebuild(flags)[0], casts

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize if self.tensor is None else self.tensor.nbytes

    @property
    def width(self) -> int:
        """The size of the last dim."""
        shape = self.shape if self.tensor is None else self.tensor.shape
        return shape[-1] if shape else 0

    def look(self) -> Tensor:
        """The tensor, in the forward pass; not counted as one of its readers."""
        tensors, begun = dict[Value, Tensor](), [self]
        while begun:
            value = begun[-1]
            if value not in tensors:
                there = value._there()
                if there is None:
                    assert value.step is not None
                    missing = [before for before in value.step.inputs if before not in tensors]
                    if missing:
                        begun += missing
                        continue
                    inputs = [(tensors[before], Owner.HELD) for before in value.step.inputs]
                    there = run(value.step, inputs, current())[0]
                tensors[value] = there
            begun.pop()
        return tensors[self]

    def _there(self) -> Tensor | None:
        """The tensor, if it can be looked at without a rebuild."""
        if self.step is None:
            return self._proved(EditedError)
        if self.from_narrow and self._rebuilt is not None:
            if self._rebuilt._version != self._rebuilt_version:
                raise EditedError(self._edited(self._rebuilt))
            return self._rebuilt
        there = None if self.seen is None else self.seen()
        if there is None or there._version != self.version or not matches(self.sample, there):
            return None
        return there.detach()

    def _for_a_rebuild(self, flags: Flags | None) -> tuple[Tensor, Owner]:
        """The tensor for a step, and who owns its memory."""
        if self.step is not None:
            return self._rebuild(flags)
        tensor = self._proved()
        if self.stream is not None:
            share(tensor, self.stream)
        return tensor, Owner.HELD

    def _proved(self, error: type[RuntimeError] = RuntimeError) -> Tensor:
        """The held tensor; raises `error` if it was edited since it was packed."""
        leaf = self.tensor
        assert leaf is not None
        tensor = leaf if self.pinned is None else self.pinned
        self._check_version(error)
        if self.sample is None and (leaf.requires_grad or self.spec is not None):
            check_there(tensor, self.name)
        unseen = self.spec is not None and tensor._version != self.local_version
        if unseen or not matches(self.sample, tensor):
            check_there(tensor, self.name)
            raise error(
                f"{owner_of(leaf, self.name)} was edited where autograd does not see it (through"
                " .data), between the forward and the backward pass, and leannorm.lean() needs what it"
                " held to rebuild a tensor: edit it after backward(), or leave lean() out for this step"
            )
        return tensor

    def _rebuild(self, flags: Flags | None) -> tuple[Tensor, Owner]:
        """The rebuilt tensor and its owner. Steps in a row may be more than Python has calls in a row."""
        begun = [(self, list[tuple[Tensor, Owner]]())]
        while True:
            value, inputs = begun[-1]
            assert value.step is not None
            if value._rebuilt is None and len(inputs) < len(value.step.inputs):
                before = value.step.inputs[len(inputs)]
                if before.step is None:
                    inputs.append(before._for_a_rebuild(flags))
                else:
                    begun.append((before, []))
            else:
                result = value._made_of(inputs, flags)
                begun.pop()
                if not begun:
                    return result
                begun[-1][1].append(result)

    def _made_of(self, inputs: list[tuple[Tensor, Owner]], flags: Flags | None) -> tuple[Tensor, Owner]:
        """For one reader; kept for the others, unless it is a view of a held tensor."""
        assert self.step is not None
        if self._rebuilt is not None:
            tensor, memory = self._rebuilt, Owner.SHARED
            if tensor._version != self._rebuilt_version:  # edited by a user's backward function
                raise RuntimeError(self._edited(tensor))
            if self._rebuilt_on is not None:
                share(tensor, self._rebuilt_on)
        else:
            for captured in () if self.stream is None else self.step.captured:
                if captured is not None:
                    share(captured, self.stream)  # type: ignore[arg-type]
            tensor, memory = run(self.step, inputs, flags)
            if self.original is None and not matches(self.sample, tensor):
                self._check_rebuilt(tensor)
            self._rebuilt_on = stream_of(tensor)
        self._left -= 1
        if self._left <= 0 and not self.from_narrow:
            self._rebuilt, self._left = None, self.users
        elif memory is not Owner.HELD:  # held memory may be edited before the next read
            self._rebuilt, self._rebuilt_version, memory = tensor, tensor._version, Owner.SHARED
            if self.from_narrow:  # not both at once: the copy is freed, the tensor lasts as in stock
                self.step = self.step._replace(inputs=())
        return tensor, memory

    def _check_rebuilt(self, tensor: Tensor) -> None:
        """Its bytes are not those that were packed: raises, unless it is rounding, or others' hooks may have
        given back something else than they got. Their own tensor is read as they give it."""
        assert self.step is not None
        held: list[Any] = [v.step.constants[0] for v in behind([self]) if v.step and v.step.kind == "held"]
        if self.step.kind == "held" or any(packed.is_other for packed in held):
            return
        if near(self.sample, tensor):
            return
        raise RebuildError(
            f"the output of {self.name or 'a node'} of shape {list(self.shape)} was rebuilt, and is not what"
            " the forward pass saved: what it was made of, or a tensor on the way, was edited where autograd"
            " does not see it (under no_grad, through .data). Edit a copy of it, or leave leannorm.lean() out"
            " of this part; lean(verify=True) names the layer"
        )

    def _check_version(self, error: type[RuntimeError] = RuntimeError) -> None:
        if not self.current:
            tensor = self.tensor if self.watch is None else self.watch
            assert tensor is not None
            raise error(self._edited(tensor))

    def _edited(self, tensor: Tensor) -> str:
        shape = list(self.layout[0]) if isinstance(self.layout, tuple) else list(tensor.shape)
        return (
            "one of the variables needed for gradient computation has been modified by an inplace"
            f" operation: [{tensor.type()} {shape}], which is output of {self.name or 'a leaf'}, is at"
            f" version {tensor._version}; expected version {self.version} instead. leannorm.lean() needs it"
            " for the backward pass: edit a copy of it, or edit it after backward()."
        )


MUCH_LARGER = 32
"""What has so many times fewer elements than another tensor takes little memory and little time beside it."""


COPIED_PART = "copied part of a concatenation"
"""The name of a value that is held for a concatenation alone."""


def size_of(value: Value) -> int:
    """Elements of the tensor."""
    return prod(value.shape if value.tensor is None else value.tensor.shape)


def products_of(values: tuple[Value, ...]) -> int:
    """The longest chain of products among these inputs; those that are much smaller than the largest one are
    not counted, such as the shift and scale of a norm's output, from a linear layer on a condition."""
    if len(values) == 1:
        return values[0].products
    most = max([value.products for value in values], default=0)
    if not most:
        return 0
    largest = max(map(size_of, values))
    return max(v.products for v in values if size_of(v) * MUCH_LARGER > largest)


def held(tensor: Tensor, name: str = "") -> Value:
    """A value that holds the tensor, detached: its graph may lead back to the node that saved it.

    `name` is the name of the node that made it.
    """
    bare = tensor.grad_fn is None or (type(tensor) not in PLAIN and local_of(tensor) is not None)
    return Value(tensor if bare else tensor.detach(), tensor._version, None, name)
