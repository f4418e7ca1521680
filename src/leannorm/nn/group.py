"""GroupNorm: torch's layer, computed by leannorm."""

from __future__ import annotations

import torch.nn
from torch import Tensor

from leannorm.functional.group import group_norm
from leannorm.nn._leaving import Leaving, quantized, quantizing


class GroupNorm(Leaving, torch.nn.GroupNorm):
    r"""Normalize each group of channels of each sample; replaces `torch.nn.GroupNorm`, same state_dict.

    .. math:: y = (x - \mathrm{E}[x]) / \sqrt{\mathrm{Var}[x] + \epsilon} \cdot \gamma + \beta

    Mean and biased variance are over a group's channels and all positions of one sample, in training and
    in evaluation. Parameters, defaults and errors are torch's. Input (N, C, *), float32, float64, bfloat16
    or float16, any memory layout (torch's own is wrong on channels_last far from zero); the output has the
    input's dtype and layout. Kept for the backward pass: the input and 16 bytes a group of a sample.
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
