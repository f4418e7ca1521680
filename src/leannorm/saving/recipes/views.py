"""Recipes that move elements without arithmetic: views, copies, casts, concatenations."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from leannorm.saving.graph import constant, find, inputs_of, kind_of, register
from leannorm.saving.recipes.activations import with_norm
from leannorm.saving.recipes.registry import OfInput, ValueOf, of_input, recipe
from leannorm.saving.shards import local_of
from leannorm.saving.steps import Step
from leannorm.saving.values import COPIED_PART, Value, held

_RESHAPED = {"ViewBackward0", "UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1"}
VIEWS = {*_RESHAPED, "SqueezeBackward2", "UnsafeViewBackward0", "ReshapeAliasBackward0"}


@recipe(*sorted(VIEWS), "ExpandBackward0")  # in one order in all processes
def in_shape(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    x, shape = value_of(0), tuple(node._input_metadata[output].shape)
    function: Callable[..., Tensor] = Tensor.expand if kind_of(node) == "ExpandBackward0" else torch.reshape
    return None if x is None else Step(function, (x,), (), (shape,), kind="view")


def as_it_is(x: Tensor) -> Tensor:
    return x


_VIEWS = of_input({
    "AliasBackward0": OfInput(as_it_is, (), "view"),
    "TBackward0": OfInput(torch.t, (), "view"),
    "TransposeBackward0": OfInput(torch.transpose, ("dim0", "dim1"), "view"),
    "PermuteBackward0": OfInput(torch.permute, ("dims",), "view"),
    "SelectBackward0": OfInput(torch.select, ("dim", "index"), "view"),
    "SliceBackward0": OfInput(torch.ops.aten.slice, ("dim", "start", "end", "step"), "view"),
})  # fmt: skip


def _part(x: Tensor, output: int, split: Callable[..., tuple[Tensor, ...]], *constants: Any) -> Tensor:
    return split(x, *constants)[output]


# What puts out several views, and its constants
PARTS: dict[str, tuple[Callable[..., tuple[Tensor, ...]], tuple[str, ...]]] = {
    "UnbindBackward0": (torch.unbind, ("dim",)),
    "SplitBackward0": (torch.split, ("split_size", "dim")),
    "SplitWithSizesBackward0": (torch.split_with_sizes, ("split_sizes", "dim")),
}
# Nodes whose output is an alias of their input: both share memory and version counter
ALIASES = {*_VIEWS, *PARTS, *_RESHAPED, "ExpandBackward0"}
SAME_MEMORY = {*ALIASES, "UnsafeViewBackward0", "ReshapeAliasBackward0"}  # of these two the memory alone


@recipe(*PARTS)
def part(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    x = value_of(0)
    split, names = PARTS[kind_of(node)]
    constants = output, split, *(constant(node, name) for name in names)
    return None if x is None else Step(_part, (x,), (), constants, kind="view")


of_input({"RepeatBackward0": OfInput(Tensor.repeat, ("repeats",))})
# Elements in another order, in memory of their own
MOVES = {"StackBackward0"} | of_input({
    "RollBackward0": OfInput(torch.roll, ("shifts", "dims")),
    "FlipBackward0": OfInput(torch.flip, ("dims",)),
    "PixelShuffleBackward0": OfInput(torch.pixel_shuffle, ("upscale_factor",)),
    "PixelUnshuffleBackward0": OfInput(torch.pixel_unshuffle, ("downscale_factor",)),
})  # fmt: skip


def _index(x: Tensor, *rest: Any) -> Tensor:
    *places, indexed = rest
    left = iter(places)
    return x[tuple(next(left) if there else slice(None) for there in indexed)]


@recipe("IndexBackward0")
def index(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    """Indexing, such as the rows of a table of relative position biases."""
    x, places = value_of(0), [raw.data for raw in node._raw_saved_indices]
    if x is None or not all(place is None or type(place) is Value for place in places):
        return None
    indexed = tuple(place is not None for place in places)
    inputs = x, *(place for place in places if place is not None)
    return Step(_index, inputs, (), (indexed,), kind="scale")


@recipe("ConstantPadNdBackward0")
def pad(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    """Padding of width 0, which is a copy. Other padding is held: its node does not save the fill value."""
    x, widths = value_of(0), constant(node, "pad")
    return None if x is None or any(widths) else Step(torch.clone, (x,))


def _contiguous(x: Tensor, form: torch.memory_format) -> Tensor:
    return x.clone() if form is torch.preserve_format else x.contiguous(memory_format=form)


@recipe("CloneBackward0")
def clone(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    """A copy in the layout of `like`; without it (inside a chain) contiguous, as `reshape` makes it."""
    x = value_of(0)
    if x is None:
        return None
    form = torch.contiguous_format
    if like is not None and not like.is_contiguous():
        form = _CHANNELS_LAST.get(like.dim(), torch.preserve_format)
        if not (form is torch.preserve_format or like.is_contiguous(memory_format=form)):
            form = torch.preserve_format
    return Step(_contiguous, (x,), (), (form,), kind="copy", tells_layout=like is not None)


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def cast_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


@recipe("ToCopyBackward0")
def cast(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    """A cast; to the same dtype it is a copy, and its rebuild may return the source itself."""
    x, to, source = value_of(0), node._input_metadata[output], inputs_of(node)[0]
    if x is None or source is None or source.device != to.device:
        return None
    kind = "copy" if source.dtype == to.dtype else "norm"
    if kind == "norm" and (fused := with_norm(x, to.dtype)) is not None:
        return fused._replace(tells_layout=like is not None)
    return Step(cast_to, (x,), (), (to.dtype,), kind=kind, tells_layout=like is not None)


_JOINS: dict[str, Callable[..., Tensor]] = {"CatBackward0": torch.cat, "StackBackward0": torch.stack}


@recipe(*_JOINS)
def joined(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    """A concatenation or a stack, of which every part has a value."""
    return _joined(node, [value_of(i) for i in range(len(node.next_functions))])


def _joined(node: Any, parts: list[Value | None]) -> Step | None:
    known = tuple(part for part in parts if part is not None)
    constants = _JOINS[kind_of(node)], constant(node, "dim")
    return None if len(known) < len(parts) else Step(_join, known, (), constants)


def _join(*parts_function_and_dim: Any) -> Tensor:
    *parts, function, dim = parts_function_and_dim
    whole: Tensor = function(parts, dim)
    return whole


def cat_of_copied_parts(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    """Copies each part that has no value, as this cat read it, and holds it so that the next cat finds it.

    A dense block concatenates all earlier outputs again in every layer; this way each of them is held once.
    """
    dim, edges = constant(node, "dim"), node.next_functions
    parts = [value_of(i) for i in range(len(edges))]
    if (
        like is not None
        and local_of(like) is None
        and any(parts)
        and all(producer is not None for producer, _ in edges)
    ):
        start = 0
        for i, (part, (producer, number)) in enumerate(zip(parts, edges, strict=True)):
            length = producer._input_metadata[number].shape[dim]
            if part is None:
                slice_ = like.detach().narrow(dim, start, length)
                parts[i] = value = held(slice_.clone(memory_format=torch.preserve_format), COPIED_PART)
                value.as_made, value.seen_at = False, node._sequence_nr()
                register(producer, number, weakref.ref(value))
            start += length
    return _joined(node, parts)


def _laid_out(x: Tensor, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=x.dtype, device=x.device).copy_(x)


def laid_out_as(value: Value, like: Tensor) -> Step | None:
    """A step that copies a value into the layout of `like`; None if that has gaps."""
    shape, stride = tuple(like.shape), like.stride()
    if sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1 != like.numel():  # gaps
        return None
    return Step(_laid_out, (value,), (), (shape, stride))


def find_parts_in(value: Value, node: Any) -> None:
    """Register the inputs of a held `cat` as slices of it.

    The inputs without a value are neighbours and mostly last. The loop stops after them, since a dense block
    has many parts.
    """
    if value.tensor is None or value.spec is not None:
        return
    dim, reference, seen_at = constant(node, "dim"), weakref.ref(value), node._sequence_nr()
    new = False
    start = value.tensor.shape[dim]
    for producer, number in reversed(node.next_functions):
        if producer is None:
            return
        length = producer._input_metadata[number].shape[dim]
        start -= length
        if find(producer, number) is None:
            register(producer, number, _slice(reference, seen_at, dim, start, length))
            new = True
        elif new:
            return


def _slice(
    reference: weakref.ref[Value], seen_at: int, dim: int, start: int, length: int
) -> Callable[[], Value | None]:
    """The part as the `cat` read it: what was read before may have been edited since."""

    def lookup() -> Value | None:
        whole = reference()
        if whole is None or not whole.current:
            return None
        value = Value(None, 0, Step(torch.narrow, (whole,), (), (dim, start, length), kind="view"))
        value.as_made, value.seen_at = False, seen_at
        value.provenance, value.order = whole.provenance, whole.order
        return value

    return lookup
