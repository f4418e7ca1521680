"""The second saved-tensor hook: unpack turns a `Value` back into the tensor that the node saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from leannorm._torch import left_to_python
from leannorm.autograd.nodes import NODES
from leannorm.saving import device
from leannorm.saving.flags import GETTERS, current
from leannorm.saving.graph import Packed, kind_of
from leannorm.saving.rows import unbuilt
from leannorm.saving.search import is_view_of_held
from leannorm.saving.shards import as_plain
from leannorm.saving.small import Kept, read
from leannorm.saving.steps import Step, behind, share_memory
from leannorm.saving.timing import Timed
from leannorm.saving.trial import without_autocast
from leannorm.saving.values import COPIED_PART, Value
from leannorm.saving.verify import check_equal


@left_to_python
def _unpack(value: Value | Kept | Timed) -> Tensor:
    """The unpack hook."""
    if isinstance(value, Timed):
        value.timer.reach()
        timed: Tensor = value.unpack()
        return timed
    if isinstance(value, tuple):
        return read(value)
    held = value.tensor if value.step is None and value.spec is None else None
    if held is not None:
        with as_plain(held):
            if held._version == value.version:
                return held
    if value.at_hand:
        tensor = value.read()
    elif value.in_rows and (stand_in := unbuilt(value)) is not None:
        return stand_in
    elif not (torch.is_grad_enabled() or torch._C._is_any_autocast_enabled()):
        tensor = value.read(current())
    else:
        with torch.no_grad(), without_autocast():
            tensor = value.read(current())
    if value.original is not None:
        check_equal(tensor, value.original, value.name, value.where)
    elif value.step is not None and not (_only_reads() or _is_stocks(value.step) or _is_alone(value, tensor)):
        tensor = tensor.clone()
    return value.shared(tensor)


def _is_stocks(step: Step) -> bool:
    """Is its result the memory that stock autograd would give the reader?"""
    return step.kind == "held" or is_view_of_held(step)


def _is_alone(value: Value, tensor: Tensor) -> bool:
    """Does nothing else share the memory of what was rebuilt?"""
    for one in behind([value]):
        captured = () if one.step is None else one.step.captured
        if any(share_memory(other, tensor) for other in (one.tensor, one._rebuilt, *captured)):
            return False
    return True


_READERS = "torch.nn.", "torch.distributed.", "leannorm."


def _only_reads() -> bool:
    """Is the reader a node or a function of torch's or ours? A user's may write into what it has saved, and
    one of torch's that calls a user's, too: a custom operator's, a checkpoint's."""
    node: Any = torch._C._current_autograd_node()
    if isinstance(node, BackwardCFunction):
        return bool(node._forward_cls.__module__.startswith(_READERS))  # type: ignore[attr-defined]
    return node is not None and kind_of(node) != "CppFunction"


unpack: Callable[[Value | Kept | Timed], Tensor] = _unpack
if NODES is not None:  # asks Python for what is unusual
    NODES.set_lean(
        Value, Step, Packed, _unpack, GETTERS, Value(None), COPIED_PART, device.streams_used, device.stream_of
    )
    unpack = NODES.unpack
