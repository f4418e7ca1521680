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


class Call(NamedTuple):
    """The arguments; `bias` is a copy, as nobody else keeps what it holds now."""

    eps: float | None
    bias: Tensor | None
    reads_buffers: bool  # of running statistics, as in evaluation


# `Function.apply` is written in Python; from torch 2.15 on in C, and then the frame is its caller's
_APPLY = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)


def is_compiled(frame: FrameType) -> bool:
    """Does `frame`, which is saving tensors now, run what torch.compile has made of a model?"""
    if _APPLY is None:
        return str(frame.f_globals.get("__name__")).startswith("torch._functorch.")
    if frame.f_code is not _APPLY:
        return False
    return str(frame.f_locals["cls"].__module__).startswith("torch._functorch.")


def call_of(frame: FrameType) -> Call | None:
    """The call that is saving tensors now, if `frame` belongs to one of these functions."""
    code = frame.f_code
    if code is _WITHOUT:
        return Call(frame.f_locals["eps"], None, False)
    if code not in _WITH_BIAS:
        return None
    arguments = frame.f_locals
    bias = arguments["bias"]
    training = arguments.get("training", arguments.get("use_input_stats", True))
    return Call(arguments["eps"], None if bias is None else bias.detach().clone(), not training)
