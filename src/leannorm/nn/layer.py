"""LayerNorm and RMSNorm: torch's layers, on leannorm's functions, over any axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from leannorm import _checks
from leannorm.autograd import fast
from leannorm.functional.layer import layer_norm, rms_norm
from leannorm.functional.valid import Lengths
from leannorm.nn._layer import RowLayer, parameter_of


class LayerNorm(RowLayer, torch.nn.LayerNorm):
    """Normalize every row to mean 0 and variance 1, then scale and shift it; replaces `torch.nn.LayerNorm`.

        y = (x - E[x]) / sqrt(Var[x] + eps) * weight + bias

    E and the biased Var are over the normalized axes: the last ones, whose sizes are `normalized_shape` (an
    int: only the last one), or with `dim` that single axis. `LayerNorm(C, dim=1)` takes (N, C, H, W) in any
    layout, moves no axis, and loads the checkpoints of a `LayerNorm2d`. All other arguments are torch's.

    Shapes: any input; output as input, in its layout if it is dense.
    Dtypes: as `functional.layer_norm`.
    Kept: the input (4 bytes per element in float32) and 8 bytes per row (16 in float64).
    Raises: as `functional.layer_norm`.
    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016, arXiv:1607.06450.

    >>> import torch
    >>> from leannorm import nn
    >>> nn.LayerNorm(3, dim=1)(torch.rand(2, 3, 4, 4)).mean(1).abs().max().item() < 1e-6
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

    def _fast(self, input: Tensor) -> Tensor | None:
        weight, bias = parameter_of(self, "weight"), parameter_of(self, "bias")
        shape = self.normalized_shape
        y: Tensor | None = fast.row_norm(input, weight, bias, shape, self.eps, False, self.dim)
        return y

    def _normalize(self, input: Tensor, mask: Tensor | None, lengths: Lengths | None) -> Tensor:
        of_layer = self.normalized_shape, parameter_of(self, "weight"), parameter_of(self, "bias"), self.eps
        return layer_norm(input, *of_layer, dim=self.dim, mask=mask, lengths=lengths)

    def extra_repr(self) -> str:
        return super().extra_repr() + _dim_repr(self.dim)


class RMSNorm(RowLayer, torch.nn.RMSNorm):
    """Divide every row by its root mean square, then scale it; replaces `torch.nn.RMSNorm`.

        y = x / sqrt(E[x^2] + eps) * (weight + weight_offset)

    E is over the normalized axes, which are those of `LayerNorm`. `eps=None` is the machine epsilon of the
    arithmetic, as in torch. `weight_offset` (1.0 is Gemma's; a new weight is then 0) and `cast` ("before" is
    Llama's) are those of `functional.rms_norm`. All other arguments are torch's.

    Shapes: as `LayerNorm`.
    Dtypes: as `functional.rms_norm`.
    Kept: the input (4 bytes per element in float32) and 4 bytes per row (8 in float64).
    Raises: as `functional.rms_norm`.
    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, arXiv:1910.07467.

    >>> import torch
    >>> from leannorm import nn
    >>> round(nn.RMSNorm(4)(torch.full((2, 4), 3.0)).mean().item(), 4)
    1.0
    """

    dim: int | None = None
    weight_offset: float = 0.0
    cast: str = "after"

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        dim: int | None = None,
        weight_offset: float = 0.0,
        cast: str = "after",
    ) -> None:
        if eps is not None:
            _checks.non_negative_eps(eps)
        _checks.weight_offset(weight_offset)
        _checks.cast(cast)
        self.weight_offset, self.cast = weight_offset, cast  # the first is read while the parameters are made
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        _checks.single_axis(self.normalized_shape, dim)
        self.dim = dim

    def _fast(self, input: Tensor) -> Tensor | None:
        weight, form = parameter_of(self, "weight"), (self.dim, self.weight_offset, self.cast)
        shape = self.normalized_shape
        y: Tensor | None = fast.row_norm(input, weight, None, shape, self.eps, True, *form)
        return y

    def _normalize(self, input: Tensor, mask: Tensor | None, lengths: Lengths | None) -> Tensor:
        of_layer = self.normalized_shape, parameter_of(self, "weight"), self.eps
        of_form: Any = {"dim": self.dim, "weight_offset": self.weight_offset, "cast": self.cast}
        return rms_norm(input, *of_layer, **of_form, mask=mask, lengths=lengths)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.elementwise_affine and self.weight_offset:
            torch.nn.init.constant_(self.weight, 1 - self.weight_offset)

    def extra_repr(self) -> str:
        offset = f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        cast = "" if self.cast == "after" else f", cast={self.cast!r}"
        return super().extra_repr() + _dim_repr(self.dim) + offset + cast


def _dim_repr(dim: int | None) -> str:
    return "" if dim is None else f", dim={dim}"
