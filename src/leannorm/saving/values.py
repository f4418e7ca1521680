"""What autograd saves, as values: a tensor that is held, or a step that rebuilds it from other values."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

_KEY, _WAITING = "leannorm", "leannorm waiting"
_PLAIN = (Tensor, torch.nn.Parameter)


class Step(NamedTuple):
    """How to rebuild a tensor: `rebuild(*inputs)`.

    `constants` are what `rebuild` closes over, for telling two steps apart; `overwrite` computes the same
    in the memory of the first input; `view` says that the result may share its input's memory,
    `copies` that it need not; `kind` is what policies go by; `flops` are those of one rebuild, where they
    are many; `with_act` gives the rebuild with an activation in the same pass, where there is one.
    """

    rebuild: Callable[..., Tensor]
    inputs: tuple[Value, ...]
    constants: Hashable = ()
    overwrite: Callable[..., Tensor] | None = None
    view: bool = False
    copies: bool = False
    kind: str = "norm"
    flops: int = 0
    with_act: Callable[[str], Callable[..., Tensor] | None] | None = None


class Value:
    """One tensor of the forward pass, shared by every node that saved it.

    A rebuilt tensor is held from its first use to its last, so that several users cost one rebuild; stock
    autograd would have held it all the while.
    """

    layout: Hashable = None  # of the tensor that was packed; None: nobody packed it
    place = -1  # among the tensors that were packed
    whole: Value | None = None  # what this is a view of
    origin: tuple[Node, int] | None = None
    eps: tuple[float | None] | None = None  # what a norm that saved this was called with
    alone = False  # does nobody else hold the tensor?
    products = 0  # convolutions and matrix products in a row, at most, that its rebuild takes
    _rebuilt: Tensor | None = None

    def __init__(
        self,
        tensor: Tensor | None,
        version: int = 0,
        step: Step | None = None,
        name: str = "",
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
        self.step, self.tensor, self.origin = step, None, None
        self._rests_on(step)

    def _rests_on(self, step: Step) -> None:
        before = max((value.used().products for value in step.inputs), default=0)
        self.products = before + (step.kind == "product")

    @property
    def at_hand(self) -> bool:
        """Is there a tensor to be read, without rebuilding it?"""
        return self.step is None or self._rebuilt is not None

    def read(self) -> Tensor:
        """The tensor, for one of its users; raises autograd's error if it was edited in place."""
        return self._held() if self.step is None else self._read()[0]

    def _read(self) -> tuple[Tensor, bool]:
        """The tensor for a rebuild, and whether it is the reader's to overwrite."""
        if self.step is None:
            return self._there(self._held()), False
        tensor = self._rebuilt
        shared = tensor is not None
        if tensor is None:
            tensor = run(self.step, [v._read() for v in self.step.inputs])
        self._left -= 1
        if self._left > 0:
            self._rebuilt, shared = tensor, True
        else:
            self._rebuilt, self._left = None, self.users
        return tensor, not (shared or self.step.view)

    def look(self) -> Tensor:
        """The tensor, without counting as a use."""
        if self.step is None:
            return self._held()
        return run(self.step, [(v.look(), False) for v in self.step.inputs])

    def _held(self) -> Tensor:
        tensor = self.tensor
        assert tensor is not None
        if tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace"
                f" operation: [{tensor.type()} {list(tensor.shape)}], which is output of"
                f" {self.name or 'a leaf'}, is at version {tensor._version}; expected version"
                f" {self.version} instead. leannorm.lean() holds it for the backward pass: edit a copy of"
                " it, or edit it after backward()."
            )
        return tensor

    def _there(self, tensor: Tensor) -> Tensor:
        if type(tensor) in _PLAIN and tensor.numel() and _freed(tensor):
            raise RuntimeError(
                f"what {self.name or 'a parameter'} of shape {list(tensor.shape)} held was freed since the"
                " forward pass, as sharding does with weights, and rebuilding a layer's product needs it: use"
                ' leannorm.lean("norm"), which reads no parameters in the backward pass'
            )
        return tensor


def _freed(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.untyped_storage().nbytes() == 0


def run(step: Step, inputs: list[tuple[Tensor, bool]]) -> Tensor:
    tensors = [tensor for tensor, _ in inputs]
    if step.overwrite is not None and inputs[0][1]:
        return step.overwrite(*tensors)
    return step.rebuild(*tensors)


# ------------------------------------------------ from a node's output to the value that stands for it


def register(node: Any, output: int, lookup: Callable[[], Value | None]) -> None:
    """Let `find` answer with `lookup()`: a weak reference, since the value may hold the node."""
    node.metadata.setdefault(_KEY, {})[output] = lookup


def find(node: Any, output: int) -> Value | None:
    known = node.metadata.get(_KEY)
    lookup = known.get(output) if known else None
    return lookup() if lookup else None


def wait(node: Any, output: int, value: weakref.ref[Value]) -> None:
    """Note that `value` could be rebuilt if only that output were at hand."""
    node.metadata.setdefault(_WAITING, {}).setdefault(output, []).append(value)


def waiting(node: Any, output: int) -> list[Value]:
    references = node.metadata.get(_WAITING, {}).pop(output, ())
    return [value for value in (reference() for reference in references) if value is not None]


# ------------------------------------------------ from a node's saved tensor to the value that was packed

_AS_IT_IS = nullcontext()


def unpack(value: Value) -> Tensor:
    """The unpack hook."""
    if value.at_hand or not (torch.is_grad_enabled() or torch._C._is_any_autocast_enabled()):
        return value.read()
    with torch.no_grad(), without_autocast():
        return value.read()


def without_autocast() -> AbstractContextManager[object]:
    """Rebuilding repeats kernels on given dtypes; a surrounding autocast may not change them."""
    if not torch._C._is_any_autocast_enabled():
        return _AS_IT_IS
    stack = ExitStack()
    for device in ("cpu", "cuda", "xpu", "mps"):
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def saved(node: Any, name: str) -> Value | None:
    """What the node saved under `name`: the value packed here, or a reading of what nobody packed.

    What others' hooks packed is not at hand: a checkpoint's would compute its part, for one reading alone.
    """
    raw = getattr(node, f"_raw_saved_{name}")
    packed = raw.data
    if packed is None or type(packed) is Value:
        return packed
    if raw.unpack_hook is not None:
        return None
    attribute = f"_saved_{name}"
    try:
        tensor = getattr(node, attribute)
    except RuntimeError:  # edited since: autograd will say so where it matters
        return None
    layout = (tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def read() -> Tensor:
        tensor: Tensor = getattr(node, attribute)
        return tensor.detach() if tensor.requires_grad else tensor

    step = Step(read, (), ("saved", *layout), view=True)
    return Value(None, tensor._version, step, name=node.name())


def saved_by_function(node: Any, count: int) -> list[Value | None] | None:
    """All that a `torch.autograd.Function` of ours saved; None while it is still saving."""
    try:
        packed = [tensor.data for tensor in node._raw_saved_tensors]
    except RuntimeError:  # freed
        return None
    ours = all(value is None or type(value) is Value for value in packed)
    return packed if ours and len(packed) == count else None


def held(tensor: Tensor) -> Value:
    """Without the graph that made it, which may lead back to the node that saved it."""
    node = tensor.grad_fn
    if node is None:
        return Value(tensor, tensor._version)
    return Value(tensor.detach(), tensor._version, None, node.name())
