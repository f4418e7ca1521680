"""The arguments of a torch norm's call that its node does not keep: eps and the bias.

The pack hook runs inside the call. The frame above it is the Python function that made the call; where that
is a function of `torch.nn.functional`, its local variables are the arguments.
"""

from __future__ import annotations

from types import FrameType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_WITH_BIAS = {f.__code__ for f in (F.batch_norm, F.instance_norm, F.group_norm, F.layer_norm)}
_WITHOUT = F.rms_norm.__code__


class NormArguments(NamedTuple):
    """The arguments; `bias` is a copy, since the parameter may change before the backward pass."""

    eps: float | None
    bias: Tensor | None
    reads_buffers: bool  # normalizes by the running statistics, as in evaluation


_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def is_compiled(frame: FrameType) -> bool:
    """Is `frame`, the caller of the pack hook, code that torch.compile generated?"""
    if frame.f_code is not _APPLY:
        return False
    return str(frame.f_locals["cls"].__module__).startswith("torch._functorch.")


def call_of(frame: FrameType) -> NormArguments | None:
    """The arguments of the norm call in `frame`, the caller of the pack hook; None if it is no such call."""
    code = frame.f_code
    if code is _WITHOUT:
        return NormArguments(frame.f_locals["eps"], None, False)
    if code not in _WITH_BIAS:
        return None
    arguments = frame.f_locals
    bias = arguments["bias"]
    training = arguments.get("training", arguments.get("use_input_stats", True))
    return NormArguments(arguments["eps"], None if bias is None else bias.detach().clone(), not training)
