"""Recipes for what moves elements and changes none: views, copies, casts, concatenations."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from leannorm.saving.recipes import Given, _constant, recipe
from leannorm.saving.values import Step, Value, find, held, register


def _shape(node: Any, output: int) -> tuple[int, ...]:
    return tuple(node._input_metadata[output].shape)


@recipe(
    "ViewBackward0",
    "UnsafeViewBackward0",
    "ReshapeAliasBackward0",
    "UnsqueezeBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "SqueezeBackward2",
)
def reshape(node: Any, output: int, given: Given, like: Tensor | None) -> Step | None:
    x, shape = given(node, 0), _shape(node, output)
    return None if x is None else Step(lambda x: x.reshape(shape), (x,), ("reshape", shape), view=True)


@recipe("ExpandBackward0")
def expand(node: Any, output: int, given: Given, like: Tensor | None) -> Step | None:
    x, shape = given(node, 0), _shape(node, output)
    return None if x is None else Step(lambda x: x.expand(shape), (x,), ("expand", shape), view=True)


ALIASES = {"ExpandBackward0", "ViewBackward0", "UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1"}

_VIEWS: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    "AliasBackward0": (lambda x: x, ()),
    "TBackward0": (torch.t, ()),
    "TransposeBackward0": (torch.transpose, ("dim0", "dim1")),
    "PermuteBackward0": (torch.permute, ("dims",)),
    "SelectBackward0": (torch.select, ("dim", "index")),
    "SliceBackward0": (torch.ops.aten.slice, ("dim", "start", "end", "step")),
}


@recipe(*_VIEWS)
def view(node: Any, output: int, given: Given, like: Tensor | None) -> Step | None:
    function, names = _VIEWS[node.name()]
    x, constants = given(node, 0), tuple(_constant(node, name) for name in names)
    return (
        None
        if x is None
        else Step(lambda x: function(x, *constants), (x,), (node.name(), *constants), view=True)
    )


ALIASES |= {*_VIEWS, "UnbindBackward0", "SplitBackward0", "SplitWithSizesBackward0"}

_PARTS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "UnbindBackward0": (torch.unbind, ("dim",)),
    "SplitBackward0": (torch.split, ("split_size", "dim")),
    "SplitWithSizesBackward0": (torch.split_with_sizes, ("split_sizes", "dim")),
}


@recipe(*_PARTS)
def part(node: Any, output: int, given: Given, like: Tensor | None) -> Step | None:
    function, names = _PARTS[node.name()]
    x, constants = given(node, 0), tuple(_constant(node, name) for name in names)
    key = (node.name(), output, *constants)
    return None if x is None else Step(lambda x: function(x, *constants)[output], (x,), key, view=True)


@recipe("RollBackward0")
def roll(node: Any, output: int, given: Given, like: Tensor | None) -> Step | None:
    x, shifts, dims = given(node, 0), _constant(node, "shifts"), _constant(node, "dims")
    return None if x is None else Step(lambda x: torch.roll(x, shifts, dims), (x,), ("roll", shifts, dims))


@recipe("IndexBackward0")
def index(node: Any, output: int, given: Given, like: Tensor | None) -> Step | None:
    """A table's rows, such as the biases of relative positions."""
    x, places = given(node, 0), [raw.data for raw in node._raw_saved_indices]
    if x is None or not all(place is None or type(place) is Value for place in places):
        return None
    given_axes = tuple(place is not None for place in places)

    def rebuild(x: Tensor, *places: Tensor) -> Tensor:
        rest = iter(places)
        return x[tuple(next(rest) if there else slice(None) for there in given_axes)]

    inputs = x, *(place for place in places if place is not None)
    return Step(rebuild, inputs, ("index", given_axes), kind="scale")


@recipe("ConstantPadNdBackward0")
def pad(node: Any, output: int, given: Given, like: Tensor | None) -> Step | None:
    """Padding by nothing is a copy; what real padding was filled with, the node does not keep."""
    x, widths = given(node, 0), _constant(node, "pad")
    return None if x is None else Step(torch.clone, (x,), "pad by nothing") if not any(widths) else None


@recipe("RepeatBackward0")
def repeat(node: Any, output: int, given: Given, like: Tensor | None) -> Step | None:
    x, repeats = given(node, 0), _constant(node, "repeats")
    return None if x is None else Step(lambda x: x.repeat(repeats), (x,), ("repeat", repeats))


@recipe("CloneBackward0")
def clone(node: Any, output: int, given: Given, like: Tensor | None) -> Step | None:
    """A copy in the layout of what was copied; within a chain, as `reshape` and `contiguous` make it."""
    x = given(node, 0)
    form = torch.contiguous_format
    if like is not None and not like.is_contiguous():
        form = torch.preserve_format
        if like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last):
            form = torch.channels_last
    return (
        None
        if x is None
        else Step(lambda x: x.contiguous(memory_format=form), (x,), ("clone", form), view=True, copies=True)
    )


@recipe("ToCopyBackward0")
def cast(node: Any, output: int, given: Given, like: Tensor | None) -> Step | None:
    x, to = given(node, 0), node._input_metadata[output]
    if x is None or next(iter(node.next_functions))[0]._input_metadata[0].device != to.device:
        return None
    dtype = to.dtype
    return Step(lambda x: x.to(dtype), (x,), ("cast", dtype))


@recipe("CatBackward0")
def cat(node: Any, output: int, given: Given, like: Tensor | None) -> Step | None:
    """From parts that are all at hand."""
    return _cat(_constant(node, "dim"), [given(node, i) for i in range(len(node.next_functions))])


def cat_of_copied_parts(node: Any, output: int, given: Given, like: Tensor | None) -> Step | None:
    """A part that is not at hand is copied and held in its own right, so the next cat finds it.

    A dense block concatenates everything so far again and again; this way each part is held once.
    """
    dim, edges = _constant(node, "dim"), node.next_functions
    parts = [given(node, i) for i in range(len(edges))]
    if like is not None and any(parts) and all(producer is not None for producer, _ in edges):
        start = 0
        for i, (part, (producer, number)) in enumerate(zip(parts, edges, strict=True)):
            length = producer._input_metadata[number].shape[dim]
            if part is None:
                slice_ = like.detach().narrow(dim, start, length)
                parts[i] = value = held(slice_.clone(memory_format=torch.preserve_format))
                register(producer, number, weakref.ref(value))
            start += length
    return _cat(dim, parts)


def _cat(dim: int, parts: list[Value | None]) -> Step | None:
    known = tuple(part for part in parts if part is not None)
    if len(known) < len(parts):
        return None
    return Step(lambda *parts: torch.cat(parts, dim), known, ("cat", dim))


def laid_out_as(value: Value, like: Tensor) -> Step | None:
    """A value that is at hand in another layout, copied into this one."""
    shape, stride = tuple(like.shape), like.stride()
    if sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1 != like.numel():  # gaps
        return None

    def rebuild(x: Tensor) -> Tensor:
        return torch.empty_strided(shape, stride, dtype=x.dtype, device=x.device).copy_(x)

    return Step(rebuild, (value,), ("laid out", shape, stride))


class _Probe:
    references = 0

    def pack(self, tensor: Tensor) -> Tensor:
        return self._without_node(tensor)

    def _without_node(self, tensor: Tensor) -> Tensor:
        self.references = sys.getrefcount(tensor)
        return tensor.detach()


@lru_cache
def references_when_alone() -> int:
    """`sys.getrefcount` one call deep in a pack hook, of a tensor that no variable of the caller's holds."""
    probe = _Probe()
    with torch.enable_grad(), saved_tensors_hooks(probe.pack, lambda tensor: tensor):
        torch.relu(torch.zeros(1, requires_grad=True))
    return probe.references


def narrowed(tensor: Tensor) -> Value | None:
    """Whole numbers (where a pooling window had its maximum) held in as few bytes as they need."""
    if not tensor.is_contiguous():
        return None
    fake = isinstance(tensor, FakeTensor)  # of a window's positions, by far the most fit in two bytes
    low, high = (0, 0) if fake else (int(v) for v in tensor.aminmax())
    step = _in_fewer_bytes(tensor, low, high)
    return None if step is None else Value(None, 0, step)


POOLS = {"MaxPool2DWithIndicesBackward0": 2, "MaxPool3DWithIndicesBackward0": 3}  # and their windows' axes


def narrowed_positions(tensor: Tensor, node: Any) -> Step | None:
    """The same of a pooling node's own positions, which say by the input's size what they need."""
    producer, number = node.next_functions[0]
    if producer is None:
        return None
    sizes = producer._input_metadata[number].shape[-POOLS[node.name()] :]
    return _in_fewer_bytes(tensor, 0, prod(sizes) - 1)


def _in_fewer_bytes(tensor: Tensor, low: int, high: int) -> Step | None:
    for dtype in (torch.int16, torch.int32):
        span = torch.iinfo(dtype)
        if span.min <= low and high <= span.max:
            source = Value(tensor.to(dtype), 0, name="whole numbers")
            return Step(lambda x: x.to(torch.int64), (source,), "whole numbers")
    return None


def find_parts_in(value: Value, node: Any) -> None:
    """The inputs of a `cat` that is held are at hand from now on: as slices of it.

    What is new stands together and mostly last; nobody looks beyond it, where a dense block has many parts.
    """
    if value.tensor is None:
        return
    dim, reference, new = _constant(node, "dim"), weakref.ref(value), False
    start = value.tensor.shape[dim]
    for producer, number in reversed(node.next_functions):
        if producer is None:
            return
        length = producer._input_metadata[number].shape[dim]
        start -= length
        if find(producer, number) is None:
            register(producer, number, _slice(reference, dim, start, length))
            new = True
        elif new:
            return


def _slice(reference: weakref.ref[Value], dim: int, start: int, length: int) -> Callable[[], Value | None]:
    def lookup() -> Value | None:
        whole = reference()
        if whole is None:
            return None
        step = Step(
            lambda x: x.narrow(dim, start, length), (whole,), ("slice", dim, start, length), view=True
        )
        return Value(None, 0, step)

    return lookup
