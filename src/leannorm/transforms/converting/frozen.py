"""What torchvision's `FrozenBatchNorm2d` becomes: the same buffers, in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leannorm.functional.batch import batch_norm
from leannorm.nn._layer import Layer


class FrozenBatchNorm2d(Layer, torch.nn.Module):
    """Batch norm by four buffers, of which none ever moves; its input is not kept for the backward pass."""

    _has_name_of_another = True
    eps: float
    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """`input` (N, C, H, W), normalized by the buffers."""
        return batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *more: Any) -> None:
        """From a state_dict of `BatchNorm2d` too."""
        state_dict.pop(f"{prefix}num_batches_tracked", None)
        super()._load_from_state_dict(state_dict, prefix, *more)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
