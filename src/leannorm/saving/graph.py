"""Reading autograd's graph: what kind a node is, what it saved, and which value stands for its output."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.autograd.function import BackwardCFunction

from leannorm.saving.evidence import Sample
from leannorm.saving.values import Value

_KEY, _WAITING = "leannorm", "leannorm waiting"
_OURS: dict[type, str] = {}
ACCUMULATES = "AccumulateGrad"


def ours(function: type) -> str:
    """Make the nodes of an autograd function of ours known, by their class; returns the kind's name."""
    return _OURS.setdefault(function._backward_cls, f"leannorm.{function.__name__}")  # type: ignore[attr-defined]


def kind_of(node: Any) -> str:
    """The class of one of torch's own nodes, "leannorm.…" for ours, and "" for a user's function.

    By the class itself: a user's function may have any name.
    """
    if isinstance(node, BackwardCFunction):
        return _OURS.get(type(node), "")
    return type(node).__name__


def constant(node: Any, name: str) -> Any:
    """A number or a list of numbers that the node saved; C++ hands negative ones over as unsigned."""
    value = getattr(node, f"_saved_{name}")
    if isinstance(value, (list, tuple)):
        return tuple(_signed(v) for v in value)
    return _signed(value)


def _signed(value: Any) -> Any:
    return value - 2**64 if isinstance(value, int) and value >= 2**63 else value


def saved(node: Any, name: str) -> Value | None:
    """The value that was packed for what the node saved under `name`.

    None where it was saved outside of `lean()` or by others' hooks, while the node is still saving it, and
    where it was edited unseen: before the node read it, or after.
    """
    packed = getattr(node, f"_raw_saved_{name}").data
    return packed if type(packed) is Value and packed.memory is None else None


def is_saving(node: Any, name: str) -> bool:
    """Is the node only now saving a tensor under `name`?"""
    return getattr(node, f"_raw_saved_{name}").data is None


def saved_by_function(node: Any, count: int) -> list[Value | None] | None:
    """All that a `torch.autograd.Function` of ours saved; None while it is still saving."""
    try:
        packed = [tensor.data for tensor in node._raw_saved_tensors]
    except RuntimeError:  # freed
        return None
    ours = all(value is None or (type(value) is Value and value.memory is None) for value in packed)
    return packed if ours and len(packed) == count else None


# ------------------------------------------------ from a node's output to the value that stands for it


class Packed(weakref.ref[Value]):
    """To the value of a tensor that a node saved. When that node is gone, its sample is still evidence."""

    __slots__ = ("sample",)
    sample: Sample | None


def register(node: Any, output: int, lookup: Callable[[], Value | None]) -> None:
    """Let `find` answer with `lookup()`: a weak reference, since the value may hold the node.

    Of a tensor that was packed, only the next time that it is packed tells more.
    """
    known = node.metadata.setdefault(_KEY, {})
    if type(lookup) is Packed or type(known.get(output)) is not Packed:
        known[output] = lookup


def registered(node: Any, output: int) -> Callable[[], Value | None] | None:
    known = node.metadata.get(_KEY)
    return known.get(output) if known else None


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
