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
    if name == "RowNormBackward":
        return RowCall(backend, Rows(*settings[1:]))
    if name == "GatedNormBackward":
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
    x, mean, rstd, weight, bias, residual, out = saved
    need_x, need_weight, need_bias, need_residual = needed
    ctx, dy = SimpleNamespace(call=_call(name, saved_call)), gradients[0]
    if name == "RowNormBackward" and out is not None:  # a sum was normalized
        ctx.saved_tensors = out, mean, rstd, weight, *(None,) * 5
        ctx.needs_input_grad = *needed[:2], False, False, False, *needed[2:], False, False
        dx, dresidual, _, _, _, dweight, dbias, _, _ = RowNorm.backward(ctx, *gradients)
        return dx, dresidual, dweight, dbias
    assert dy is not None  # of an only result it is zeros
    if name == "RowNormBackward":
        is_scale, parts, none = saved_call[1], (need_weight, need_bias), (False, False)
        of_weight = (None, None, None, None, weight, None) if is_scale else (weight, *(None,) * 5)
        ctx.saved_tensors = x, mean, rstd, *of_weight
        ctx.needs_input_grad = need_x, *none, *((*parts, *none) if is_scale else (*none, *parts)), *none
        dx, _, _, dscale, dshift, dweight, dbias, _, _ = RowNorm.backward(ctx, dy)
        return (dx, dscale, dshift) if is_scale else (dx, dweight, dbias)
    if name == "GatedNormBackward":
        assert mean is not None  # the gate
        ctx.saved_tensors, ctx.needs_input_grad = (x, mean, rstd, weight), needed
        return GatedNorm.backward(ctx, dy)[:3]
    ctx.saved_tensors = x, mean, rstd, weight, bias, residual, out, None, None
    ctx.needs_input_grad = need_x, need_weight, need_bias, need_residual, False
    if name == "ChannelAffineBackward":
        ctx.layout = _LAYOUTS[saved_call[-1]]
        return ChannelAffine.backward(ctx, dy)[:3]
    return ChannelNorm.backward(ctx, dy)[:4]
