"""Batch norm, an addition and an activation, rebuilt in one pass where the C++ kernel gives torch's bits.

torch's CPU kernel computes fma(x, scale, shift) for every element. `channel_normalize` does the same with
mean 0, rstd 1, the scale as weight and the shift as bias, and adds and activates in the same pass.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from leannorm.ops.backends import CPU
from leannorm.saving.steps import Step
from leannorm.saving.values import Value

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": torch.relu,
    "hardswish": F.hardswish,
    "relu6": F.relu6,
}


EXACT = "identity", "relu", "relu6"  # which round nothing; of -0.0 each device makes its own


def by_scale_and_shift(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """x * scale + shift by torch's kernel: with mean 0, variance 1 and eps 0 it uses both unchanged."""
    zero, one = _zero_and_one(scale, scale.dtype)
    return torch.native_batch_norm(x, scale, shift, zero, one, False, 0.0, 0.0)[0]


def scale_shift_act(x: Tensor, *rest: Any) -> Tensor:
    """act(x * scale + shift), or act(x * scale + shift + added), in one pass where the C++ kernel gives
    torch's bits."""
    *residual, scale, shift, act = rest
    added = residual[0] if residual else None
    form = torch.contiguous_format if x.is_contiguous() else torch.channels_last
    dense = x.is_contiguous(memory_format=form) and x.numel() > 0 and x.dtype == scale.dtype
    alike = added is None or (added.shape, added.dtype) == (x.shape, x.dtype)
    lies = added is None or added.is_contiguous(memory_format=form)
    if dense and alike and lies and matches_torch(act, scale.dtype):
        return _in_one_pass(x, added, scale, shift, act)
    y = by_scale_and_shift(x, scale, shift)
    return ACTIVATIONS[act](y if added is None else y + added)


def joined(
    step: Step,
    function: Callable[..., Tensor],
    constants: tuple[Hashable, ...],
    added: Value | None,
    then: Callable[..., Step | None],
) -> Step:
    """The step of a norm with what follows it: `function(x[, added], *captured, *constants)`."""
    if added is None:
        return Step(function, step.inputs, step.captured, constants, kind=step.kind)
    inputs = *step.inputs, added
    return Step(function, inputs, step.captured, constants, kind="added norm", then=then)


def _in_one_pass(x: Tensor, added: Tensor | None, scale: Tensor, shift: Tensor, act: str) -> Tensor:
    zero, one = _zero_and_one(scale, torch.float64)
    y: Tensor = torch.ops.leannorm.channel_normalize.default(x, zero, one, scale, shift, added, act)
    return y


@lru_cache
def matches_torch(act: str, dtype: torch.dtype) -> bool:
    """Does the C++ kernel give torch's bits on this machine, also for zeros, infinities and NaN?"""
    if act not in ACTIVATIONS or CPU.why_not():
        return False
    with unset_fake_temporarily(), torch.no_grad():
        x = torch.linspace(-9, 9, 6144, dtype=dtype, device="cpu").view(1, 3, 32, 64).clone()
        x[0, :, 0, :5] = x.new_tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")])
        scale, shift = (x.new_tensor(v) for v in ((1.0, 0.7, 0.5), (0.0, 0.3, -0.0)))
        normalized, added = by_scale_and_shift(x, scale, shift), x.flip(2, 3).contiguous()
        stock = normalized, normalized + added
        ours = (_in_one_pass(x, residual, scale, shift, act) for residual in (None, added))
        return all(same_bits(a, ACTIVATIONS[act](b)) for a, b in zip(ours, stock, strict=True))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """But for NaNs, whose payloads may differ."""
    numbers = ~a.isnan()
    same_places = torch.equal(numbers, ~b.isnan())
    return same_places and torch.equal(a[numbers].view(torch.uint8), b[numbers].view(torch.uint8))


def _zero_and_one(like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if type(like) is Tensor:
        return _constants(len(like), dtype)
    # fake tensors are not cached, since each belongs to a FakeTensorMode
    return torch.zeros_like(like, dtype=dtype), torch.ones_like(like, dtype=dtype)


@lru_cache(maxsize=64)
def _constants(channels: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    with unset_fake_temporarily():
        zeros = torch.zeros(channels, dtype=dtype, device="cpu")
    return zeros, zeros + 1
