"""Norms that apply two children, `drop` and `act`, to their output: timm's norm-and-act layers become these.

They keep the original's activation. Batch norm computes it in the same pass, if its kernels have it.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module

from leannorm import nn
from leannorm.nn._layer import quantized, quantizing
from leannorm.transforms.fusing.steps import norm_drop_act


class _ThenAct(Module):
    drop: Module
    act: Module

    def forward(self, input: Tensor) -> Tensor:
        if quantizing(input) and (seen := quantized(self, input)) is not None:
            return seen  # type: ignore[no-any-return]
        y: Tensor = self.act(self.drop(super().forward(input)))
        return y


class BatchNorm2dThenAct(_ThenAct, nn.BatchNorm2d):
    """`act(drop(batch_norm(x)))`, in one pass if `drop` is an identity and no hooks are set."""

    def forward(self, input: Tensor) -> Tensor:  # type: ignore[override]
        if quantizing(input) and (seen := quantized(self, input)) is not None:
            return seen  # type: ignore[no-any-return]
        return norm_drop_act(self, input, self.drop, self.act)


class GroupNormThenAct(_ThenAct, nn.GroupNorm):  # type: ignore[misc]
    """`act(drop(group_norm(x)))`."""


class LayerNormThenAct(_ThenAct, nn.LayerNorm):  # type: ignore[misc]
    """`act(drop(layer_norm(x)))`."""


class RMSNormThenAct(_ThenAct, nn.RMSNorm):  # type: ignore[misc]
    """`act(drop(rms_norm(x)))`."""
