"""What autograd nodes in C++ leave to the functions in Python, such as a backward pass that is recorded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from leannorm._types import Channels, Maybe, Rows
from leannorm.autograd.channel import ChannelAffine, ChannelCall, ChannelNorm
from leannorm.autograd.gated import GatedNorm, RowCall
from leannorm.autograd.rows import RowNorm
from leannorm.ops.as_given import CPU_AS_GIVEN, TRITON_AS_GIVEN

# the numbering that C++ uses
_LAYOUTS = {0: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d}


def call_of(node: Any) -> Any:
    """The call that made a node of one of our functions, in Python or in C++."""
    of: Any = type(node)
    return node.call if issubclass(of, BackwardCFunction) else _call(of.__name__, node._saved_how)


def _call(name: str, saved_call: tuple[Any, ...]) -> ChannelCall | RowCall:
    """The call of a node in C++, which stores it."""
    by_triton, *settings = saved_call
    backend = TRITON_AS_GIVEN if by_triton else CPU_AS_GIVEN
    if name in ("RowNormBackward", "GatedNormBackward"):
        return RowCall(backend, Rows(*settings))
    has_bias, act, *settings = settings
    if name == "ChannelAffineBackward":
        return ChannelCall(backend, Channels(act=act, by_batch=False), has_bias=has_bias)
    eps, groups, _ = settings
    return ChannelCall(backend, Channels(groups, eps, act), has_bias=has_bias)


def backward_of_node(
    name: str, saved: list[Maybe], needed: tuple[bool, ...], saved_call: tuple[Any, ...], *gradients: Maybe
) -> tuple[Maybe, ...]:
    """The backward pass of a node in C++, by the Python function that it replaces. `gradients`: of its
    results."""
    x, gate, mean, rstd, weight, bias, residual, scale, out = saved
    ctx = SimpleNamespace(call=_call(name, saved_call), needs_input_grad=(*needed, False, False))
    dy = gradients[0]
    if name == "RowNormBackward":
        ctx.saved_tensors = x if out is None else out, mean, rstd, weight, None, gate, residual, scale, bias
        return RowNorm.backward(ctx, *gradients)[:7]
    assert dy is not None  # of an only result it is zeros
    if name == "GatedNormBackward":
        ctx.saved_tensors = x, gate, rstd, weight
        return GatedNorm.backward(ctx, dy)[:3]
    ctx.saved_tensors = x, mean, rstd, weight, bias, residual, out, None, None
    if name == "ChannelAffineBackward":
        ctx.layout = _LAYOUTS[saved_call[-1]]
        return ChannelAffine.backward(ctx, dy)[:3]
    return ChannelNorm.backward(ctx, dy)[:4]
