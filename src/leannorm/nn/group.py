"""GroupNorm: torch's layer, with leannorm's kernels."""

from __future__ import annotations

from typing import Any

import torch.nn
from torch import Tensor

from leannorm import _checks
from leannorm.autograd import fast
from leannorm.functional.group import group_norm, group_norm_act
from leannorm.functional.valid import UNMASKED, Masking
from leannorm.nn._base import without_bias
from leannorm.nn._layer import MaskedLayer, parameter_of
from leannorm.ops.activation import lists_activations


class GroupNorm(MaskedLayer, torch.nn.GroupNorm):
    """Normalize each group of channels of each sample; replaces `torch.nn.GroupNorm`, same state_dict.

        y = (x - E[x]) / sqrt(Var[x] + eps) * weight + bias

    E and the biased Var are over a group's channels and all positions of one sample, in training and in
    evaluation. Parameters and defaults are torch's. (On channels_last far from zero torch's result is wrong.)

    Shapes: input (N, C, *), in any memory layout; output as input.
    Dtypes: as `functional.batch_norm`.
    Kept: the input (4 bytes per element in float32) and 16 bytes per group of a sample.
    Raises: as `functional.group_norm`.
    Source: Wu and He, 2018, arXiv:1803.08494.

    >>> import torch
    >>> from leannorm import nn
    >>> nn.GroupNorm(2, 6)(torch.randn(4, 6, 8, 8)).shape
    torch.Size([4, 6, 8, 8])
    """

    activation: str = "identity"

    def _fast(self, input: Tensor, act: str | None = None) -> Tensor | None:
        try:
            weight, bias = self._parameters["weight"], self._parameters["bias"]
        except KeyError:  # with a parametrization, or in a replica, they are elsewhere
            weight, bias = self.weight, self.bias
        norm = self.num_groups, self.eps, act or self.activation, True, None, True, False
        return fast.group_norm((input, weight, bias, None, None, None, None, None), norm)

    def _normalize(self, input: Tensor, act: str | None = None, masking: Masking = UNMASKED) -> Tensor:
        """`act`: an activation that follows the layer and is fused into this call."""
        of_layer = self.num_groups, parameter_of(self, "weight"), parameter_of(self, "bias"), self.eps
        named: Any = dict(zip(("mask", "lengths", "fill"), masking, strict=True))
        act = act or self.activation
        if act == "identity":
            return group_norm(input, *of_layer, **named)
        return group_norm_act(input, *of_layer, act=act, **named)


@lists_activations
class GroupNormAct(GroupNorm):
    """Group norm and an activation as one layer, in one pass.

        layer(x) = act(group_norm(x))

    `act` is one of <activations>. All other arguments and the state_dict keys are those of `GroupNorm`. The
    name is timm's; its layer takes the channels first, and also a drop layer.

    Shapes: as `GroupNorm`.
    Dtypes: as `functional.group_norm_act`.
    Kept: as `GroupNorm`; two layers keep the activation's input as well.
    Raises: as `functional.group_norm_act`.
    Source: as `GroupNorm`.

    >>> import torch
    >>> from leannorm import nn
    >>> bool((nn.GroupNormAct(2, 6, act="relu")(torch.randn(4, 6, 8, 8)) >= 0).all())
    True
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        act: str = "silu",
    ) -> None:
        _checks.activation(act)
        super().__init__(num_groups, num_channels, eps, affine, device, dtype, **without_bias(bias))
        self.activation = act

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, act={self.activation}"
