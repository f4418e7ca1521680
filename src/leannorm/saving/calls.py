"""What a norm of torch was called with, where its node does not keep it: eps, and the bias.

While a node saves its tensors, the frame of the Python function that called it is one step up. Where that is
torch's own function (`torch.nn.functional`), its arguments are there to be read.
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
    """The arguments; `bias` is a copy, as nobody else keeps what it holds now."""

    eps: float | None
    bias: Tensor | None
    reads_buffers: bool  # running statistics, as in evaluation, or what is frozen


_SOFTMAXES = {F.cross_entropy.__code__, F.log_softmax.__code__, F.softmax.__code__}


def logits_of(frame: FrameType) -> Tensor | None:
    """What a softmax is taken of, if `frame` belongs to one of torch's functions that take one."""
    return frame.f_locals["input"] if frame.f_code in _SOFTMAXES else None


_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def is_compiled(frame: FrameType) -> bool:
    """Does `frame`, which is saving tensors now, run what torch.compile has made of a model?"""
    if frame.f_code is not _APPLY:
        return False
    return str(frame.f_locals["cls"].__module__).startswith("torch._functorch.")


def call_of(frame: FrameType) -> NormArguments | None:
    """The call that is saving tensors now, if `frame` belongs to one of these functions."""
    code = frame.f_code
    if code is _WITHOUT:
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
