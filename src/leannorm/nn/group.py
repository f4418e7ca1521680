"""GroupNorm: torch's layer, computed by leannorm."""

from __future__ import annotations

from typing import Any

import torch.nn
from torch import Tensor

from leannorm import _checks
from leannorm.autograd import fast
from leannorm.functional.group import group_norm, group_norm_act
from leannorm.functional.valid import Lengths
from leannorm.nn._base import parameter_of, without_bias
from leannorm.nn._leaving import Leaving, quantized, quantizing
from leannorm.ops.activation import lists_activations


class GroupNorm(Leaving, torch.nn.GroupNorm):
    """Normalize each group of channels of each sample; replaces `torch.nn.GroupNorm`, same state_dict.

        y = (x - E[x]) / sqrt(Var[x] + eps) * weight + bias

    E and the biased Var are over a group's channels and all positions of one sample, in training and in
    evaluation. Parameters and defaults are torch's. (On channels_last far from zero torch's result is wrong.)

    Shapes: input (N, C, *), in any memory layout; output as input.
    Dtypes: as `functional.batch_norm`.
    Kept: the input (4 bytes an element in float32) and 16 bytes a group of a sample.
    Raises: as `functional.group_norm`.
    Source: Wu and He, 2018, arXiv:1803.08494.

    >>> import torch
    >>> from leannorm import nn
    >>> nn.GroupNorm(2, 6)(torch.randn(4, 6, 8, 8)).shape
    torch.Size([4, 6, 8, 8])
    """

    def forward(
        self,
        input: Tensor,
        *,
        mask: Tensor | None = None,
        lengths: Lengths | None = None,
        fill: str = "zero",
    ) -> Tensor:
        """`input` (N, C, ...), normalized for each sample and group of channels.

        `mask` or `lengths` leave out padding, as in `functional.group_norm`.
        """
        weight, bias = parameter_of(self, "weight"), parameter_of(self, "bias")
        if mask is None and lengths is None and fill == "zero":
            y = fast.group_norm(input, weight, bias, self.eps, "identity", self.num_groups)
            if y is not None:
                return y
            if quantizing(input) and (seen := quantized(self, input)) is not None:
                return seen  # type: ignore[no-any-return]
        of_layer = self.num_groups, weight, bias, self.eps
        return group_norm(input, *of_layer, mask=mask, lengths=lengths, fill=fill)

    def _normalize(self, input: Tensor, act: str = "identity") -> Tensor:
        """With an activation that another layer computes."""
        return group_norm_act(input, self.num_groups, self.weight, self.bias, self.eps, act=act)


@lists_activations
class GroupNormAct(GroupNorm):
    """Group norm and an activation as one layer, in one pass.

        layer(x) = act(group_norm(x))

    `act` is one of <activations>. All other arguments and the state_dict keys are those of `GroupNorm`. The
    name is timm's; its layer has the channels first, and reads drop layers too.

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

    def forward(
        self,
        input: Tensor,
        *,
        mask: Tensor | None = None,
        lengths: Lengths | None = None,
        fill: str = "zero",
    ) -> Tensor:
        """act(norm(input)) in one pass; `input` is (N, C, ...), `mask` and `lengths` leave out padding."""
        of_layer = self.num_groups, parameter_of(self, "weight"), parameter_of(self, "bias"), self.eps
        masking: Any = {"mask": mask, "lengths": lengths, "fill": fill}
        return group_norm_act(input, *of_layer, act=self.activation, **masking)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, act={self.activation}"
