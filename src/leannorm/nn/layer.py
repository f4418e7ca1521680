"""LayerNorm and RMSNorm: torch's layers, on leannorm's functions, over any axis."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leannorm import _checks
from leannorm.functional.layer import layer_norm, rms_norm
from leannorm.nn._leaving import Leaving, quantized, quantizing


class LayerNorm(Leaving, torch.nn.LayerNorm):
    """Normalize every row to mean 0 and variance 1, then scale and shift it; drop-in for torch's.

    y = (x - E[x]) / sqrt(Var[x] + eps) * weight + bias, with E and the biased Var over the normalized axes.

    Args:
        normalized_shape: the sizes of the last axes (an int: of the last one), normalized together.
        eps: added to the variance.
        elementwise_affine: learn a weight (starts at 1) and a bias (starts at 0) of `normalized_shape`.
        bias: False leaves out the bias alone.
        dim: normalize this single axis instead: `LayerNorm(C, dim=1)` takes (N, C, H, W) in any layout,
            moves nothing, and loads the checkpoints of a `LayerNorm2d`.

    Shapes: any input in, the same shape, dtype and layout out. Kept for the backward pass: the input,
    two statistics a row (8 bytes), the weight. Errors: those of `functional.layer_norm`.

    Source: Ba, Kiros, Hinton, "Layer Normalization", 2016; `torch.nn.LayerNorm`.

    >>> LayerNorm(3, dim=1)(torch.rand(2, 3, 4, 4)).mean(1).abs().max().item() < 1e-6
    True
    """

    dim: int | None = None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        dim: int | None = None,
    ) -> None:
        _checks.non_negative_eps(eps)
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        _checks.single_axis(self.normalized_shape, dim)
        self.dim = dim

    def forward(self, input: Tensor) -> Tensor:
        """`input`, normalized for each row over `normalized_shape`."""
        if quantizing(input) and (seen := quantized(self, input)) is not None:
            return seen  # type: ignore[no-any-return]
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, dim=self.dim)

    def extra_repr(self) -> str:
        return super().extra_repr() + _dim_repr(self.dim)


class RMSNorm(Leaving, torch.nn.RMSNorm):
    """Divide every row by its root mean square, then scale it; drop-in for torch's.

    y = x / sqrt(E[x^2] + eps) * weight, with E over the normalized axes.

    Args:
        normalized_shape: the sizes of the last axes (an int: of the last one), normalized together.
        eps: added to the mean square; None is the machine epsilon of the arithmetic, as in torch.
        elementwise_affine: learn a weight (starts at 1) of `normalized_shape`.
        dim: normalize this single axis instead, without moving it.

    Shapes: any input in, the same shape, dtype and layout out. Kept for the backward pass: the input,
    two statistics a row (8 bytes), the weight. Errors: those of `functional.rms_norm`.

    Source: Zhang, Sennrich, "Root Mean Square Layer Normalization", 2019; `torch.nn.RMSNorm`.

    >>> round(RMSNorm(4)(torch.full((2, 4), 3.0)).mean().item(), 4)
    1.0
    """

    dim: int | None = None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        dim: int | None = None,
    ) -> None:
        if eps is not None:
            _checks.non_negative_eps(eps)
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        _checks.single_axis(self.normalized_shape, dim)
        self.dim = dim

    def forward(self, input: Tensor) -> Tensor:
        """`input`, divided for each row by its root mean square over `normalized_shape`."""
        if quantizing(input) and (seen := quantized(self, input)) is not None:
            return seen  # type: ignore[no-any-return]
        return rms_norm(input, self.normalized_shape, self.weight, self.eps, dim=self.dim)

    def extra_repr(self) -> str:
        return super().extra_repr() + _dim_repr(self.dim)


def _dim_repr(dim: int | None) -> str:
    return "" if dim is None else f", dim={dim}"
