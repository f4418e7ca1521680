"""Whole numbers, such as a pooling window's positions, held in as few bytes as they need."""

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
    """Counts as `Packing.pack` would, and in the same depth of calls."""

    references = 0

    def pack(self, tensor: Tensor) -> Tensor:
        self.references = references(tensor)
        return tensor.detach()


def references(tensor: Tensor) -> int:
    """How many hold the tensor, where a pack hook hands on what it was given."""
    return sys.getrefcount(tensor)


@lru_cache
def references_when_alone() -> int:
    """The same for a tensor that no variable of the caller's holds."""
    probe = _Probe()
    with torch.enable_grad(), saved_tensors_hooks(probe.pack, lambda tensor: tensor):
        torch.relu(torch.zeros(1, requires_grad=True))
    return probe.references


def narrowed(tensor: Tensor) -> Step | None:
    """By the numbers themselves."""
    if not tensor.is_contiguous():
        return None
    fake = isinstance(tensor, FakeTensor)  # of a window's positions, by far the most fit in two bytes
    low, high = (0, 0) if fake else (int(v) for v in tensor.aminmax())
    return _in_fewer_bytes(tensor, low, high)


POOLS = {"MaxPool2DWithIndicesBackward0": 2, "MaxPool3DWithIndicesBackward0": 3}  # and their windows' axes


def narrowed_positions(tensor: Tensor, node: Any, axes: int) -> Step | None:
    """The same of a pooling node's own positions, which say by the input's size what they need.

    For devices, where a look at the numbers themselves would stall the step.
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
