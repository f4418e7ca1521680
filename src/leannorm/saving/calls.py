"""The arguments of a torch norm's call that its node does not keep: eps and the bias.

The pack hook runs inside the call. The frame above it is the Python function that made the call; where that
is a function of `torch.nn.functional`, its local variables are the arguments.
"""

from __future__ import annotations

from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def _codes(*functions: Any) -> set[Any]:
    """By which frames are known; of what others have put in a function's place, perhaps none."""
    return {function.__code__ for function in functions if hasattr(function, "__code__")}


_WITH_BIAS = _codes(F.batch_norm, F.instance_norm, F.group_norm, F.layer_norm)
_WITHOUT = _codes(F.rms_norm)


class NormArguments(NamedTuple):
    """The arguments; `bias` is a copy, since the parameter may change before the backward pass."""

    eps: float | None
    bias: Tensor | None
    reads_buffers: bool  # normalizes by the running statistics, as in evaluation, or has frozen parameters


_SOFTMAXES = _codes(F.cross_entropy, F.log_softmax, F.softmax)


def logits_of(frame: FrameType) -> Tensor | None:
    """The input of the softmax call in `frame`, the caller of the pack hook; None if it is no such call."""
    return frame.f_locals.get("input") if frame.f_code in _SOFTMAXES else None


# `Function.apply` is written in Python; from torch 2.15 on in C, and then the frame is its caller's
_APPLY = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)


def is_compiled(frame: FrameType) -> bool:
    """Is `frame`, the caller of the pack hook, code that torch.compile generated?"""
    if _APPLY is None:
        return str(frame.f_globals.get("__name__")).startswith("torch._functorch.")
    if frame.f_code is not _APPLY:
        return False
    return str(frame.f_locals["cls"].__module__).startswith("torch._functorch.")


def call_of(frame: FrameType) -> NormArguments | None:
    """The arguments of the norm call in `frame`, the caller of the pack hook; None if it is no such call."""
    code = frame.f_code
    if code in _WITHOUT:
        return NormArguments(frame.f_locals["eps"], None, _frozen(frame.f_locals["weight"]))
    if code not in _WITH_BIAS:
        return None
    arguments = frame.f_locals
    bias = arguments["bias"]
    training = arguments.get("training", arguments.get("use_input_stats", True))
    reads_buffers = not training or _frozen(arguments["weight"]) or _frozen(bias)
    return NormArguments(arguments["eps"], None if bias is None else bias.detach().clone(), reads_buffers)


def _frozen(parameter: Tensor | None) -> bool:
    return parameter is not None and not parameter.requires_grad
