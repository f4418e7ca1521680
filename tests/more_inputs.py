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
    """A norm with a scale, and perhaps a shift, for each sample or token: parts of one parameter's rows.

    `of` may be "sum" or "gated sum"; with `affine`, the norm has a weight, and a layer norm a bias.
    """

    def __init__(
        self,
        features: int,
        *leading: int,
        rms: bool = False,
        shifts: bool = True,
        affine: bool = False,
        of: str = "x",
    ) -> None:
        super().__init__()
        name = f"ada_{'rms' if rms else 'layer'}_norm"
        self.function: Any = getattr(functional, name if of == "x" else f"add_{name}")
        self.weight, self.shifts, self.of = (
            torch.nn.Parameter(torch.randn(*leading, 3 * features)),
            shifts,
            of,
        )
        names = ("weight", "bias")[: affine * (2 - rms)]
        self.affine = torch.nn.ParameterDict({name: torch.randn(features) for name in names})

    def forward(self, x: Tensor) -> Tensor:
        scale, shift, gate = self.weight[: len(x)].chunk(3, -1)
        how = {"shift": shift if self.shifts else None, **self.affine}
        if self.of == "x":
            return self.function(x, x.shape[-1:], scale, **how)  # type: ignore[no-any-return]
        gate = gate if self.of == "gated sum" else None
        y: Tensor = self.function(x, x.flip(0), gate, x.shape[-1:], scale, **how)[0]
        return y


class Gated(torch.nn.Module):
    """An RMS norm, and its gate: the first half of each row of a parameter."""

    def __init__(self, *shape: int, **how: Any) -> None:
        super().__init__()
        *leading, features = shape
        self.norm = nn.RMSNormGated(features, **how)
        self.projected = torch.nn.Parameter(torch.randn(*leading, 2 * features))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, self.projected[: len(x), ..., : x.shape[-1]].to(x.dtype))


def modulated_and_gated(samples: int, rows: int, tokens: int, features: int) -> dict[str, Any]:
    """Functions that make such norms of an input with this shape, by name."""
    sizes = features, samples, rows
    return {
        "modulated, middle axis": lambda: Modulated(*sizes, 1),
        "modulated, tokens": lambda: Modulated(*sizes, tokens),
        "modulated, weight and bias": lambda: Modulated(features, samples, affine=True),
        "modulated, tokens, weight and bias": lambda: Modulated(*sizes, tokens, affine=True),
        "modulated, rms, weight": lambda: Modulated(*sizes, 1, rms=True, affine=True),
        "modulated, of a sum": lambda: Modulated(features, samples, of="sum"),
        "modulated, of a gated sum": lambda: Modulated(*sizes, of="gated sum"),
        "modulated, of a gated sum, weight": lambda: Modulated(*sizes, rms=True, affine=True, of="gated sum"),
        "gated": lambda: Gated(samples, rows, tokens, features),
        "gated, behind": lambda: Gated(samples, rows, tokens, features, act="gelu", norm_before_gate=False),
        "gated, no weight": lambda: Gated(samples, rows, tokens, features, elementwise_affine=False),
    }
