"""Where the host does not wait for the device: whoever looks at a tensor's values there stalls the step."""

from __future__ import annotations

import torch
from torch import Tensor

from leannorm.ops.modes import capturing as capturing


def asynchronous(tensor: Tensor) -> bool:
    """Would a look at the tensor's values make the host wait?"""
    return tensor.device.type not in ("cpu", "meta")


def synchronize(tensor: Tensor) -> None:
    """Wait until the tensor's device has done all that it was given."""
    if asynchronous(tensor):
        torch.accelerator.synchronize(tensor.device)
