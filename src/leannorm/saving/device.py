"""Where the host does not wait for the device: whoever looks at a tensor's values there stalls the step."""

from __future__ import annotations

import torch
from torch import Tensor

from leannorm._errors import InputError
from leannorm.ops.modes import capturing


def asynchronous(tensor: Tensor) -> bool:
    """Would a look at the tensor's values make the host wait?"""
    return tensor.device.type not in ("cpu", "meta")


def synchronize(tensor: Tensor) -> None:
    """Wait until the tensor's device has done all that it was given."""
    if asynchronous(tensor):
        torch.accelerator.synchronize(tensor.device)


def check_not_capturing(tensor: Tensor, what: str) -> None:
    """Raises InputError while a CUDA graph is captured."""
    if capturing(tensor):
        raise InputError(
            f"lean() tries every kind of step once, by a look at its values, and {what} was not met before "
            "this CUDA graph's capture: run a forward and backward pass under lean() with the same settings "
            "and shapes before the capture"
        )
