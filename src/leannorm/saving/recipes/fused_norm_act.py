"""Batch norm and its activation rebuilt in one pass by the C++ kernel, where its bits are torch's.

torch's CPU kernel computes fma(x, scale, shift) for every element; so does `channel_normalize`, given
mean 0, rstd 1, the scale as weight and the shift as bias, and it activates the result while it has it.
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
    """As torch's kernel does: with mean 0, variance 1 and eps 0 it takes scale and shift as they are."""
    zero, one = _zero_and_one(scale, scale.dtype)
    return torch.native_batch_norm(x, scale, shift, zero, one, False, 0.0, 0.0)[0]


def scale_shift_act(x: Tensor, scale: Tensor, shift: Tensor, act: str) -> Tensor:
    """act(x * scale + shift), in one pass where the kernel's bits are torch's."""
    dense = x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)
    if not (exact(act, scale.dtype) and x.dtype == scale.dtype and dense and x.numel()):
        return _ACTIVATIONS[act](by_scale_and_shift(x, scale, shift))
    zero, one = _zero_and_one(scale, torch.float64)
    y: Tensor = torch.ops.leannorm.channel_normalize(x, zero, one, scale, shift, None, act)
    return y


@lru_cache
def exact(act: str, dtype: torch.dtype) -> bool:
    """Do the kernels give torch's bits on this machine, on ordinary numbers and on the ends of the range?"""
    if act not in _ACTIVATIONS or CPU.why_not():
        return False
    with unset_fake_temporarily(), torch.no_grad():
        x = torch.linspace(-9, 9, 6144, dtype=dtype).view(1, 3, 32, 64).clone()
        x[0, :, 0, :5] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")])
        scale, shift = (torch.tensor(v, dtype=dtype) for v in ((1.0, 0.7, 0.5), (0.0, 0.3, -0.0)))
        zero, one = _zero_and_one(scale, torch.float64)
        ours = torch.ops.leannorm.channel_normalize(x, zero, one, scale, shift, None, act)
        stock = _ACTIVATIONS[act](by_scale_and_shift(x, scale, shift))
        numbers = ~stock.isnan()  # one NaN is as good as another
        return torch.equal(numbers, ~ours.isnan()) and torch.equal(
            ours[numbers].view(torch.uint8), stock[numbers].view(torch.uint8)
        )


def _zero_and_one(like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if type(like) is Tensor:
        return _constants(len(like), dtype)
    return torch.zeros_like(like, dtype=dtype), torch.ones_like(like, dtype=dtype)  # fakes are of a mode


@lru_cache(maxsize=64)
def _constants(channels: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.zeros(channels, dtype=dtype), torch.ones(channels, dtype=dtype)
