"""Reading autograd's graph: a node's kind, what it saved, and the value that represents its output."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from ctypes import string_at
from functools import lru_cache
from struct import unpack
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction

from leannorm.autograd.fast import call_of
from leannorm.autograd.nodes import NODES
from leannorm.saving.values import Value

_OF_NUMBERS = {torch.float64: "d", torch.int64: "q", torch.bool: "?"}
_IN_VIEW = "leannorm in view"
_KEYS = tuple([f"leannorm {output}" for output in range(8)])  # in a node's metadata, of its outputs
OURS = {"leannorm.ChannelNorm", "leannorm.ChannelAffine", "leannorm.RowNorm"}  # which C++ has too
FUNCTIONS: dict[type, str] = {}  # the kinds of autograd functions, by the classes of their nodes
_BY_KIND: dict[str, Any] = {}  # and the functions themselves
ACCUMULATES = "AccumulateGrad"
PASSES_ON = "leannorm.RegisterPostBackwardFunction"  # of FSDP2: its outputs are its inputs


def kind_of_function(function: type) -> str:
    """Register an autograd function of leannorm or torch; returns the kind that `kind_of` gives its nodes,
    in C++ too."""
    name, of_python = function.__name__, function._backward_cls  # type: ignore[attr-defined]
    kind = FUNCTIONS.setdefault(of_python, f"leannorm.{name}")
    _BY_KIND.setdefault(kind, function)
    if (in_cpp := getattr(NODES, f"{name}Backward", None)) is not None:
        FUNCTIONS[in_cpp] = kind
    return kind


def kept_by(node: Any) -> Any:
    """The record of what the function of this node keeps (its `Kept`)."""
    return _BY_KIND[kind_of(node)].Kept


def kind_of(node: Any) -> str:
    """The class name of a torch node, "leannorm.…" for functions registered here, "" for a user's.

    Functions are told apart by class, since a user's function may have any name.
    """
    kind: Any = type(node)
    known = FUNCTIONS.get(kind)
    if known is not None:
        return known
    return "" if isinstance(node, BackwardCFunction) else kind.__name__


def made_by(node: Any, output: int) -> tuple[Any, int]:
    """The node that made this output, and the output's number there, where the node only passed it on."""
    while kind_of(node) == PASSES_ON:
        node, output = node.next_functions[output]
    return node, output


def constant(node: Any, name: str) -> Any:
    """A number or a list of numbers that the node saved; C++ returns negative ones as unsigned."""
    value = getattr(node, f"_saved_{name}")
    if isinstance(value, (list, tuple)):
        return tuple([v - 2**64 if isinstance(v, int) and v >= 2**63 else v for v in value])
    return value - 2**64 if isinstance(value, int) and value >= 2**63 else value


def saved(node: Any, name: str) -> Value | None:
    """The packed value of the tensor that the node saved under `name`.

    None if it was saved outside of `lean()` or under other hooks, if the node is still saving it, or if it
    was found edited without autograd's notice, before or after the node read it.
    """
    packed = getattr(node, f"_raw_saved_{name}").data
    as_saved = type(packed) is Value and packed.memory is None and packed.current
    return packed if as_saved else None


def is_lost(node: Any, *names: str) -> bool:
    """Did the node save one of these tensors, and `saved` does not give it? Then it must not pass for absent,
    since the node computed with it."""
    return any(getattr(node, f"_raw_saved_{n}").data is not None and saved(node, n) is None for n in names)


def number(node: Any, name: str) -> Any:
    """The Python number that the node saved under `name`, or None: torch saves those without hooks."""
    value = getattr(node, f"_raw_saved_{name}").data
    if type(value) is not torch.Tensor or value.dim() or value.dtype not in _OF_NUMBERS:
        return None
    if value.device.type != "cpu":
        return None
    number = getattr(node, f"_saved_{name}")  # read by address: a dispatch mode would be given no tensor here
    return unpack(_OF_NUMBERS[value.dtype], string_at(number.data_ptr(), number.itemsize))[0]


@lru_cache(maxsize=1024)
def saved_names(kind: Any) -> tuple[str, ...]:
    """The attributes by which nodes of this class show the tensors that they saved, as they are packed."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def saved_values(node: Any) -> Iterator[Value]:
    """All that the node saved and that is packed as a value."""
    kind: Any = type(node)
    for name in saved_names(kind):
        try:
            raw = getattr(node, name)
        except RuntimeError:  # freed
            return
        for one in raw if isinstance(raw, (list, tuple)) else (raw,):
            packed = getattr(one, "data", None)
            if type(packed) is Value:
                yield packed


@lru_cache(maxsize=1024)
def _constant_names(kind: Any) -> tuple[str, ...]:
    names = dir(kind)
    return tuple(name for name in names if name.startswith("_saved_") and f"_raw{name}" not in names)


def constants_of(node: Any) -> tuple[str, ...]:
    """The attributes by which a node shows what it saved beside tensors."""
    kind: Any = type(node)
    return _constant_names(kind)


def identity(node: Any) -> Hashable:
    """All that a node tells of what it computes, but for tensors: its class, what it keeps, and the shape,
    dtype and device of each output and input. Nodes of one identity differ only in the values that they read
    and the layout of these. None where a node keeps what cannot be compared."""
    kind: Any = type(node)
    in_python, ours = isinstance(node, BackwardCFunction), kind_of(node) in OURS
    if NODES is not None and not (in_python or ours):
        told = NODES.told(node, constants_of(node))
        if told is not None:
            return kind, told
    metadata = outputs, inputs = _metadata(node)
    try:
        if ours:  # in whatever language, and whichever way its call has gone
            call = call_of(node)._asdict()
            call |= {"backend": call["backend"].whole, "statistics": False}
            there = tuple([one for one in inputs if one is not None])
            return kind_of(node), outputs[0], there, exact(sorted(call.items()))
        if in_python:
            kept: tuple[Any, ...] = exact(sorted(node.__dict__.items()))
        else:
            kept = tuple([exact(getattr(node, name)) for name in constants_of(node)])
    except (TypeError, RuntimeError):  # torch has no Python form of it
        return None
    return kind, metadata, kept


def exact(value: Any) -> Any:
    """The value as a key of a dict: 0.0 is not -0.0, and neither 1 nor True is 1.0."""
    kind = type(value)
    if kind is int or kind is str or value is None:
        return value
    if kind is list or kind is tuple:
        return tuple([v if type(v) is int else exact(v) for v in value])
    if kind is float or kind is bool or kind is complex:
        return kind, repr(value)
    if isinstance(value, torch.Tensor):
        raise TypeError("a tensor is no key")
    hash(value)
    return value


def inputs_of(node: Any) -> list[Any]:
    """What tells shape, dtype and device of each of the node's inputs; None for one without gradient."""
    return [None if p is None else p._input_metadata[i] for p, i in node.next_functions]


def _metadata(node: Any) -> tuple[tuple[Hashable, ...], tuple[Hashable, ...]]:
    outputs = tuple([(tuple(m.shape), m.dtype, m.device) for m in node._input_metadata])
    inputs = tuple([None if m is None else (tuple(m.shape), m.dtype, m.device) for m in inputs_of(node)])
    return outputs, inputs


class Layout(NamedTuple):
    """Where a tensor lies in its memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def in_view(node: Any) -> tuple[Any, Layout, Layout] | None:
    """What wrote in place into a view of a base, where `node` is the base's CopySlices: its node, and where
    base and view lie. None without the C++ nodes, and where a view is told otherwise."""
    told = None if NODES is None else NODES.in_view(node)
    return None if told is None else (told[0], Layout(*told[1]), Layout(*told[2]))


def noted_in_view(node: Any) -> tuple[str, tuple[Any, ...]] | None:
    """The kind and constants of the activation that wrote into a view of all of the base, if noted."""
    noted: tuple[str, tuple[Any, ...]] | None = node.metadata.get(_IN_VIEW)
    return noted


def note_in_view(tensor: torch.Tensor, node: Any, written: tuple[str, tuple[Any, ...]] | None) -> None:
    """`tensor`, whose node is an AsStrided, was just written in place by what is told."""
    base = tensor._base
    if written is None or base is None or base.numel() != tensor.numel():
        return
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):
        node.next_functions[0][0].metadata[_IN_VIEW] = written


def is_saving(node: Any, name: str) -> bool:
    """Is the node still saving its tensor `name`?"""
    return getattr(node, f"_raw_saved_{name}").data is None


def saved_by_function(node: Any) -> dict[str, Value | None] | None:
    """The packed values of all that one of leannorm's autograd functions saved, by the names of its `Kept`;
    a node in C++ has some of these. None while a function in Python is saving."""
    if isinstance(node, BackwardCFunction):
        names = [name for name in kept_by(node)._fields if name != "act"]
        try:
            packed = [tensor.data for tensor in node._raw_saved_tensors]
        except RuntimeError:  # freed
            return None
    else:
        of: Any = type(node)
        names = [name.removeprefix("_raw_saved_") for name in saved_names(of)]
        packed = [getattr(node, f"_raw_saved_{name}").data for name in names]
    ours = all(value is None or (type(value) is Value and value.memory is None) for value in packed)
    return dict(zip(names, packed, strict=True)) if ours and len(packed) == len(names) else None


# ------------------------------------------------ from a node's output to the value that represents it


class Packed(weakref.ref[Value]):
    """A reference to the value of a packed tensor. The sample stays when the value is gone."""

    __slots__ = ("sample",)
    sample: bytes | None


def _key(output: int) -> str:
    return _KEYS[output] if output < len(_KEYS) else f"leannorm {output}"


def register(node: Any, output: int, lookup: Callable[[], Value | None]) -> None:
    """Make `find` return `lookup()`, a weak reference: the value may hold the node.

    A reference to a packed value is only replaced by another one, when the tensor is packed again.
    """
    metadata, key = node.metadata, _key(output)
    if type(lookup) is Packed or type(metadata.get(key)) is not Packed:
        metadata[key] = lookup


def register_packed(node: Any, output: int, value: Value) -> None:
    """Make `find` return this value, of a packed tensor, while it is alive."""
    packed = Packed(value)
    packed.sample = value.sample
    register(node, output, packed)


def registered(node: Any, output: int) -> Callable[[], Value | None] | None:
    """What `register` recorded for this output of the node, also if the value is gone."""
    lookup: Callable[[], Value | None] | None = node.metadata.get(_key(output))
    return lookup


def find(node: Any, output: int) -> Value | None:
    """The value registered for this output of the node, if it is still alive."""
    lookup = registered(node, output)
    return lookup() if lookup else None
