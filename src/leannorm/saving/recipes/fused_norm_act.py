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

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": torch.relu,
    "hardswish": F.hardswish,
    "relu6": F.relu6,
}


def by_scale_and_shift(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """x * scale + shift by torch's kernel: with mean 0, variance 1 and eps 0 it uses both unchanged."""
    zero, one = _zero_and_one(scale, scale.dtype)
    return torch.native_batch_norm(x, scale, shift, zero, one, False, 0.0, 0.0)[0]


def scale_shift_act(x: Tensor, scale: Tensor, shift: Tensor, act: str) -> Tensor:
    """act(x * scale + shift), in one pass where the C++ kernel gives torch's bits."""
    return _in_one_pass(x, None, scale, shift, act)


def scale_shift_add_act(x: Tensor, added: Tensor, scale: Tensor, shift: Tensor, act: str) -> Tensor:
    """act(x * scale + shift + added), as `scale_shift_act`."""
    return _in_one_pass(x, added, scale, shift, act)


def _in_one_pass(x: Tensor, added: Tensor | None, scale: Tensor, shift: Tensor, act: str) -> Tensor:
    given = [x] if added is None else [x, added]
    contiguous = all(v.is_contiguous() for v in given)
    dense = contiguous or all(v.is_contiguous(memory_format=torch.channels_last) for v in given)
    alike = all(v.dtype == scale.dtype and v.shape == x.shape for v in given)
    if not (matches_torch(act, scale.dtype) and alike and dense and x.numel()):
        y = by_scale_and_shift(x, scale, shift)
        return _ACTIVATIONS[act](y if added is None else y + added)
    zero, one = _zero_and_one(scale, torch.float64)
    made: Tensor = torch.ops.leannorm.channel_normalize.default(x, zero, one, scale, shift, added, act)
    return made


@lru_cache
def matches_torch(act: str, dtype: torch.dtype) -> bool:
    """Does the C++ kernel give torch's bits on this machine, also for zeros, infinities and NaN?"""
    if act not in _ACTIVATIONS or CPU.why_not():
        return False
    with unset_fake_temporarily(), torch.no_grad():
        x = torch.linspace(-9, 9, 6144, dtype=dtype).view(1, 3, 32, 64).clone()
        x[0, :, 0, :5] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")])
        scale, shift = (torch.tensor(v, dtype=dtype) for v in ((1.0, 0.7, 0.5), (0.0, 0.3, -0.0)))
        zero, one = _zero_and_one(scale, torch.float64)
        normalized = by_scale_and_shift(x, scale, shift)
        for added in (None, x.flip(2, 3).contiguous()):
            ours = torch.ops.leannorm.channel_normalize(x, zero, one, scale, shift, added, act)
            stock = _ACTIVATIONS[act](normalized if added is None else normalized + added)
            numbers = ~stock.isnan()  # NaN payloads may differ
            if not torch.equal(numbers, ~ours.isnan()):
                return False
            if not torch.equal(ours[numbers].view(torch.uint8), stock[numbers].view(torch.uint8)):
                return False
        return True


def _zero_and_one(like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if type(like) is Tensor:
        return _constants(len(like), dtype)
    return torch.zeros_like(like, dtype=dtype), torch.ones_like(
        like, dtype=dtype
    )  # fake tensors: not cached, each belongs to a FakeTensorMode


@lru_cache(maxsize=64)
def _constants(channels: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.zeros(channels, dtype=dtype), torch.ones(channels, dtype=dtype)
