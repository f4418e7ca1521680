"""AdaLayerNorm, AdaRMSNorm and RMSNormGated: torch's layers with further inputs.

The names are those of the field: diffusers calls the norms of its transformers AdaLayerNorm and its variants,
mamba_ssm, fla and transformers end the gated one's in RMSNormGated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leannorm import _checks
from leannorm.functional.gated import gated_rms_norm
from leannorm.functional.modulated import ada_layer_norm, ada_rms_norm
from leannorm.nn.layer import LayerNorm, RMSNorm
from leannorm.ops.activation import lists_activations


class AdaLayerNorm(LayerNorm):
    """Layer norm with a scale and a shift per sample or token, which are passed with the input.

        layer(x, scale, shift) = layer_norm(x) * (1 + scale) + shift

    It is only the norm: the model computes scale and shift itself, as in DiT's `modulate(norm(x), shift,
    scale)`. Arguments are those of `torch.nn.LayerNorm`, but by default it has no weight and bias of its own,
    since scale and shift replace them.

    Shapes: as `functional.ada_layer_norm`.
    Dtypes: as `functional.ada_layer_norm`.
    Kept: as `functional.ada_layer_norm`.
    Raises, Source: as `functional.ada_layer_norm`.

    >>> import torch
    >>> from leannorm import nn
    >>> x, (scale, shift) = torch.randn(2, 5, 8), torch.randn(2, 16).chunk(2, dim=-1)
    >>> nn.AdaLayerNorm(8)(x, scale, shift).shape
    torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)

    def forward(self, input: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """norm(input) * (1 + scale) + shift; scale and shift are broadcast over the axes after their own."""
        shape, weight, bias = self.normalized_shape, self.weight, self.bias
        return ada_layer_norm(input, shape, scale, shift, self.eps, weight, bias)


class AdaRMSNorm(RMSNorm):
    """RMS norm with a scale (and a shift) per sample or token, which are passed with the input.

        layer(x, scale, shift) = rms_norm(x) * (1 + scale) + shift

    Arguments are those of `torch.nn.RMSNorm`; it has a weight of its own by default, as in Lumina.

    Shapes: as `functional.ada_layer_norm`.
    Dtypes: as `functional.ada_layer_norm`.
    Kept: as `functional.ada_rms_norm`.
    Raises, Source: as `functional.ada_layer_norm`.

    >>> import torch
    >>> from leannorm import nn
    >>> nn.AdaRMSNorm(8)(torch.randn(2, 5, 8), torch.randn(2, 8)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    def forward(self, input: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """norm(input) * (1 + scale) + shift; scale and shift are broadcast over the axes after their own."""
        return ada_rms_norm(input, self.normalized_shape, scale, self.eps, self.weight, shift)


@lists_activations
class RMSNormGated(RMSNorm):
    """RMS norm times an activated gate, which is passed with the input.

        layer(x, gate) = rms_norm(x) * act(gate)      or, with norm_before_gate=False, rms_norm(x * act(gate))

    `act` is one of <activations>. The other arguments are those of `RMSNorm` and `functional.gated_rms_norm`,
    the state_dict is that of `torch.nn.RMSNorm`.

    Shapes: as `functional.gated_rms_norm`.
    Dtypes: as `functional.gated_rms_norm`.
    Kept: as `functional.gated_rms_norm`.
    Raises, Source: as `functional.gated_rms_norm`.

    >>> import torch
    >>> from leannorm import nn
    >>> nn.RMSNormGated(8)(torch.randn(2, 5, 8), torch.randn(2, 5, 8)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        act: str = "silu",
        norm_before_gate: bool = True,
        cast: str = "after",
    ) -> None:
        _checks.activation(act)
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype, cast=cast)
        self.activation, self.norm_before_gate = act, norm_before_gate

    def forward(self, input: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        """The norm of `input` and the activated `gate`, which have one shape, in the order of
        `norm_before_gate`."""
        settings = self.eps, self.activation, self.norm_before_gate
        return gated_rms_norm(input, gate, self.normalized_shape, self.weight, *settings, cast=self.cast)

    def extra_repr(self) -> str:
        behind = "" if self.norm_before_gate else ", norm_before_gate=False"
        return f"{super().extra_repr()}, act={self.activation}{behind}"
