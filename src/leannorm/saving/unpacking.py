"""The second saved-tensor hook: unpack turns a `Value` back into the tensor that the node saved."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from leannorm.autograd.nodes import NODES
from leannorm.saving import device
from leannorm.saving.flags import GETTERS, current
from leannorm.saving.graph import Packed
from leannorm.saving.rows import unbuilt
from leannorm.saving.small import Kept, read
from leannorm.saving.steps import Step
from leannorm.saving.trial import without_autocast
from leannorm.saving.values import COPIED_PART, Value
from leannorm.saving.verify import check_equal


def _unpack(value: Value | Kept) -> Tensor:
    """The unpack hook."""
    if isinstance(value, tuple):
        return read(value)
    held = value.tensor if value.step is None and value.spec is None else None
    if held is not None and held._version == value.version:
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
        check_equal(tensor, value.original, value)
    return value.shared(tensor)


unpack: Callable[[Value | Kept], Tensor] = _unpack
if NODES is not None:  # asks Python for what is unusual
    NODES.set_lean(
        Value, Step, Packed, _unpack, GETTERS, Value(None), COPIED_PART, device.streams_used, device.stream_of
    )
    unpack = NODES.unpack
