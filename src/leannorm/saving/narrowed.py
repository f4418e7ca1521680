"""Integer tensors, such as the indices that max pooling saves, held in a narrower integer dtype."""

from __future__ import annotations

import sys
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from leannorm.saving.values import Step, Value


class _Probe:
    """Counts references as `Packing.pack` does, at the same call depth."""

    references = 0

    def pack(self, tensor: Tensor) -> Tensor:
        self.references = references(tensor)
        return tensor.detach()


def references(tensor: Tensor) -> int:
    """The tensor's reference count, to be called with a pack hook's own argument."""
    return sys.getrefcount(tensor)


@lru_cache
def references_when_alone() -> int:
    """What `references` gives for a tensor that only autograd holds."""
    probe = _Probe()
    with torch.enable_grad(), saved_tensors_hooks(probe.pack, lambda tensor: tensor):
        torch.relu(torch.zeros(1, requires_grad=True))
    return probe.references


def narrowed(tensor: Tensor) -> Step | None:
    """A step from a narrower copy, by the smallest and the largest number; None if no narrower dtype fits."""
    if not tensor.is_contiguous():
        return None
    fake = isinstance(tensor, FakeTensor)  # has no values; nearly all pooling indices fit in int16
    low, high = (0, 0) if fake else (int(v) for v in tensor.aminmax())
    return _in_fewer_bytes(tensor, low, high)


POOLS = {"MaxPool2DWithIndicesBackward0": 2, "MaxPool3DWithIndicesBackward0": 3}  # and their spatial dims


def narrowed_positions(tensor: Tensor, node: Any, axes: int) -> Step | None:
    """The same for a max pooling node's indices, which are bounded by the input's spatial size.

    For devices, where reading the numbers themselves would stall the step.
    """
    producer, number = node.next_functions[0]
    if producer is None:
        return None
    sizes = producer._input_metadata[number].shape[-axes:]
    return _in_fewer_bytes(tensor, 0, prod(sizes) - 1)


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.int64)


def _in_fewer_bytes(tensor: Tensor, low: int, high: int) -> Step | None:
    for dtype in (torch.int16, torch.int32):
        span = torch.iinfo(dtype)
        if span.min <= low and high <= span.max:
            return Step(_widened, (Value(tensor.to(dtype), 0, name="whole numbers"),))
    return None
