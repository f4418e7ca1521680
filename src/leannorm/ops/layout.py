"""How a tensor lies in memory."""

from __future__ import annotations

import torch
from torch import Tensor


def memory_format(x: Tensor) -> torch.memory_format:
    """channels_last(_3d) where x lies so, else contiguous."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if last is None or x.is_contiguous() or not x.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last
