"""Devices that run asynchronously: reading values there makes the host wait, and streams need an order."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from leannorm.ops.modes import capturing as capturing
from leannorm.saving.shards import PLAIN

streams_used: dict[torch.device, set[torch.Stream]] = {}  # where anything was packed or rebuilt


class _OnDevice(Protocol):
    @property
    def device(self) -> torch.device: ...


def asynchronous(tensor: _OnDevice) -> bool:
    """Does reading the values of the tensor (or of what has this metadata) make the host wait?"""
    return not getattr(tensor, "is_cpu", False) and tensor.device.type not in ("cpu", "meta")


def synchronize(tensor: Tensor) -> None:
    """Wait until the tensor's device has finished all queued work."""
    if asynchronous(tensor):
        torch.accelerator.synchronize(tensor.device)


def stream_of(tensor: Tensor) -> torch.Stream | None:
    """The stream on which this thread queues work for the tensor's device; None if the device has none."""
    if not asynchronous(tensor) or type(tensor) not in PLAIN:
        return None
    try:
        stream = torch.accelerator.current_stream(tensor.device)
    except RuntimeError:  # not the accelerator, but a device such as XLA's
        return None
    streams_used.setdefault(tensor.device, set()).add(stream)
    return stream


def share(tensor: Tensor, made_on: torch.Stream) -> None:
    """Before the current stream reads a tensor that was made, or packed, on the stream `made_on`.

    Autograd orders the gradients of nodes on different streams, not what they read. The current stream waits
    for the other one, and the allocator is told, so that it gives the memory away only after this read. Where
    a device's work is all on one stream, nothing is done.
    """
    here = stream_of(tensor)
    if here is None or len(streams_used[tensor.device]) == 1:
        return
    if here != made_on:
        here.wait_stream(made_on)
    tensor.record_stream(here)
