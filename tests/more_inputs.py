"""Layers of one input around norms that take more than it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leannorm import functional, nn


class Summed(torch.nn.Module):
    """A batch norm, plus a residual, through an activation."""

    def __init__(self, act: str, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNormAct2d(channels, act=act)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, x.flip(0))


class RowsOfSum(torch.nn.Module):
    """A row norm of a sum."""

    def __init__(self, features: int, rms: bool = False, **how: Any) -> None:
        super().__init__()
        self.function: Any = functional.add_rms_norm if rms else functional.add_layer_norm
        self.weight, self.how = torch.nn.Parameter(torch.randn(features)), how
        self.bias = None if rms else torch.nn.Parameter(torch.randn(features))

    def forward(self, x: Tensor) -> Tensor:
        parameters = (
            {"weight": self.weight} if self.bias is None else {"weight": self.weight, "bias": self.bias}
        )
        y: Tensor = self.function(x, x.flip(0), self.weight.shape, **parameters, **self.how)[0]
        return y


class Modulated(torch.nn.Module):
    """A norm with a scale, and perhaps a shift, for each sample or token: halves of one parameter's rows."""

    def __init__(self, features: int, *leading: int, rms: bool = False, shifts: bool = True) -> None:
        super().__init__()
        self.function: Any = functional.ada_rms_norm if rms else functional.ada_layer_norm
        self.weight, self.shifts = torch.nn.Parameter(torch.randn(*leading, 2 * features)), shifts

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self.weight[: len(x)].chunk(2, -1)
        return self.function(x, x.shape[-1:], scale, shift=shift if self.shifts else None)


class Gated(torch.nn.Module):
    """An RMS norm, and its gate: the first half of each row of a parameter."""

    def __init__(self, *shape: int, **how: Any) -> None:
        super().__init__()
        *leading, features = shape
        self.norm = nn.RMSNormGated(features, **how)
        self.projected = torch.nn.Parameter(torch.randn(*leading, 2 * features))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, self.projected[: len(x), ..., : x.shape[-1]].to(x.dtype))
