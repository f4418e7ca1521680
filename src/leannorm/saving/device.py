"""Devices that run asynchronously: reading a tensor's values there makes the host wait."""

from __future__ import annotations

import torch
from torch import Tensor

from leannorm.ops.modes import capturing as capturing


def asynchronous(tensor: Tensor) -> bool:
    """Does reading the tensor's values make the host wait?"""
    return tensor.device.type not in ("cpu", "meta")


def synchronize(tensor: Tensor) -> None:
    """Wait until the tensor's device has finished all queued work."""
    if asynchronous(tensor):
        torch.accelerator.synchronize(tensor.device)
