"""Whether a tensor is a parameter, and whether two tensors are equal bit for bit."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from leannorm._errors import LeannormError

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RebuildError(LeannormError, RuntimeError):
    """A rebuilt tensor is not the one that the forward pass saved."""


def edited(tensor: str, version: int, expected: int) -> RuntimeError:
    """Autograd's own error of an edit, and what to do."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation:"
        f" [{tensor}] is at version {version}; expected version {expected} instead: edit a copy of it, or"
        " edit it after backward()"
    )


def is_parameter(tensor: Tensor) -> bool:
    """Whether it is a parameter, frozen or not, or a view of one: those exist without autograd too."""
    base = tensor._base
    if base is None:
        base = tensor
    if base.requires_grad and base.is_leaf:
        return True
    return type(base) is not Tensor and isinstance(base, torch.nn.Parameter)


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, so that a NaN equals itself."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()]) if tensor.is_floating_point() else tensor


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def layout(tensor: Tensor) -> tuple[Hashable, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype
