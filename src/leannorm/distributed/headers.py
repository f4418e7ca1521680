"""The header of a sum on its way from the device, if the host does not wait for it."""

from __future__ import annotations

import torch
from torch import Tensor

from leannorm.distributed.call import HEADER


class Arriving:
    """A message's header, copied to the host after the sum, on the stream of the message's own device."""

    def __init__(self, message: Tensor) -> None:
        self.device = message.device
        self._header = torch.empty(HEADER, dtype=message.dtype, pin_memory=True)
        self._header.copy_(message.narrow(0, 0, HEADER), non_blocking=True)
        self._event = torch.Event(device=self.device)
        # an event without a stream uses the current device, which may be another one
        self._event.record(torch.accelerator.current_stream(self.device))

    def is_there(self) -> bool:
        there: bool = self._event.query()
        return there

    def values(self) -> list[float]:
        """Waits for the device until the header has arrived."""
        self._event.synchronize()
        values: list[float] = self._header.tolist()
        return values
