"""Batch norm, an addition and an activation, rebuilt in one pass where the C++ kernel gives torch's bits.

torch's CPU kernel computes fma(x, scale, shift) for every element. `channel_normalize` does the same with
mean 0, rstd 1, the scale as weight and the shift as bias, and adds and activates in the same pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from leannorm.ops.backends import CPU

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


def scale_shift_act(x: Tensor, scale: Tensor, shift: Tensor, act: str) -> Tensor:
    """act(x * scale + shift), in one pass where the C++ kernel gives torch's bits."""
    if not _serves(x, scale, act):
        return ACTIVATIONS[act](by_scale_and_shift(x, scale, shift))
    return _in_one_pass(x, None, scale, shift, act)


def scale_shift_add_act(x: Tensor, added: Tensor, scale: Tensor, shift: Tensor, act: str) -> Tensor:
    """act(x * scale + shift + added), as `scale_shift_act`."""
    form = torch.contiguous_format if x.is_contiguous() else torch.channels_last
    alike = added.shape == x.shape and added.dtype == x.dtype and added.is_contiguous(memory_format=form)
    if not (alike and _serves(x, scale, act)):
        return ACTIVATIONS[act](by_scale_and_shift(x, scale, shift) + added)
    return _in_one_pass(x, added, scale, shift, act)


def _serves(x: Tensor, scale: Tensor, act: str) -> bool:
    """Does the kernel take this, and give torch's bits?"""
    dense = x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)
    return matches_torch(act, scale.dtype) and x.dtype == scale.dtype and dense and x.numel() > 0


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
        x = torch.linspace(-9, 9, 6144, dtype=dtype).view(1, 3, 32, 64).clone()
        x[0, :, 0, :5] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")])
        scale, shift = (torch.tensor(v, dtype=dtype) for v in ((1.0, 0.7, 0.5), (0.0, 0.3, -0.0)))
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
    return torch.zeros_like(like, dtype=dtype), torch.ones_like(
        like, dtype=dtype
    )  # fake tensors: not cached, each belongs to a FakeTensorMode


@lru_cache(maxsize=64)
def _constants(channels: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.zeros(channels, dtype=dtype), torch.ones(channels, dtype=dtype)
