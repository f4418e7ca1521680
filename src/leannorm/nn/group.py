"""GroupNorm: torch's layer, computed by leannorm."""

from __future__ import annotations

import torch.nn
from torch import Tensor

from leannorm.functional.group import group_norm
from leannorm.nn._leaving import Leaving, quantized, quantizing


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

    def forward(self, input: Tensor) -> Tensor:
        """`input` (N, C, ...), normalized for each sample and group of channels."""
        if quantizing(input) and (seen := quantized(self, input)) is not None:
            return seen  # type: ignore[no-any-return]
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps)
