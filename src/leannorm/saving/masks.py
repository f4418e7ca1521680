"""Masks, mostly of dropout, held as one bit a value."""

from __future__ import annotations

from math import prod

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from leannorm.saving.evidence import bits
from leannorm.saving.steps import Step
from leannorm.saving.values import Value

_FIRST = 64  # values that are checked before all others


def mask_as_bits(tensor: Tensor) -> Step | None:
    """A step for a contiguous tensor of at most two values, of which one is 0 or False; None for all others.

    Dropout on a CPU saves a mask of 0 and 1 / (1 - p) in the input's dtype, which it has written in place. A
    tensor of version 0 was not written yet: its operation may fill it later, as rrelu does with its noise.
    """
    if tensor.dtype is torch.bool:
        return _step(pack_bits(tensor), tensor, 1)
    if tensor._version == 0 or not _on_host(tensor):
        return None
    values = bits(tensor.detach()).reshape(-1).numpy()
    if len(np.unique(values[:_FIRST])) > 2:
        return None
    other = values.max()
    kept = values != 0
    if not np.array_equal(np.where(kept, other, values.dtype.type(0)), values):
        return None
    return _step(torch.from_numpy(np.packbits(kept)), tensor, int(other))


def _step(packed: Tensor, tensor: Tensor, other: int) -> Step:
    value = Value(packed, packed._version, name="bits of a mask")
    return Step(_mask, (value,), (), (tuple(tensor.shape), tensor.dtype, other))


def _mask(packed: Tensor, shape: tuple[int, ...], dtype: torch.dtype, other: int) -> Tensor:
    flags = unpack_bits(packed, prod(shape)).reshape(shape)
    if dtype is torch.bool:
        return flags
    integers = bits(torch.empty(0, dtype=dtype)).dtype
    return flags.to(integers).mul_(other).view(dtype)


def pack_bits(flags: Tensor) -> Tensor:
    """Eight booleans a byte, the first one highest."""
    if _on_host(flags):
        return torch.from_numpy(np.packbits(flags.detach().reshape(-1).numpy()))
    octets = F.pad(flags.reshape(-1).view(torch.uint8), (0, -flags.numel() % 8)).view(-1, 8)
    return (octets << _places(flags.device)).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """The first `count` booleans that `pack_bits` packed."""
    if _on_host(packed):
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=count)).view(torch.bool)
    octets = (packed.unsqueeze(1) >> _places(packed.device)) & 1
    return octets.view(-1)[:count].view(torch.bool)


def _on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor)


def _places(device: torch.device) -> Tensor:
    return torch.arange(7, -1, -1, dtype=torch.uint8, device=device)
