"""Norms that run two children, `drop` and `act`, on their output: what timm's norm-and-act layers become.

They hold whatever activation the original held. Where it is one that batch norm computes in the same
pass, batch norm does.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module

from leannorm import nn
from leannorm.nn._leaving import quantized, quantizing
from leannorm.transforms.steps import norm_drop_act


class _ThenAct(Module):
    drop: Module
    act: Module

    def forward(self, input: Tensor) -> Tensor:
        if quantizing(input) and (seen := quantized(self, input)) is not None:
            return seen  # type: ignore[no-any-return]
        y: Tensor = self.act(self.drop(super().forward(input)))
        return y


class BatchNorm2dThenAct(_ThenAct, nn.BatchNorm2d):
    """`act(drop(batch_norm(x)))`, in one pass where nothing is to be dropped and nobody listens."""

    def forward(self, input: Tensor) -> Tensor:
        if quantizing(input) and (seen := quantized(self, input)) is not None:
            return seen  # type: ignore[no-any-return]
        return norm_drop_act(self, input, self.drop, self.act)


class GroupNormThenAct(_ThenAct, nn.GroupNorm):
    """`act(drop(group_norm(x)))`."""


class LayerNormThenAct(_ThenAct, nn.LayerNorm):
    """`act(drop(layer_norm(x)))`."""


class RMSNormThenAct(_ThenAct, nn.RMSNorm):
    """`act(drop(rms_norm(x)))`."""
