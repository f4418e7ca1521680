"""Torch's batch norm with momentum=None as one operator, for the graphs of `program`.

It is here, not in `program`, so that an exported program runs after a bare `import leannorm`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leannorm.functional.declare import declare, like_first


def _torchs_cumulative(
    x: Tensor, mean: Tensor | None, var: Tensor | None, tracked: Tensor, *affine_and_eps: Any
) -> Tensor:
    """A training step of torch's own layer with momentum=None, which reads its counter on the host."""
    weight, bias, eps = affine_and_eps
    tracked.add_(1)
    return torch.nn.functional.batch_norm(x, mean, var, weight, bias, True, 1.0 / float(tracked), eps)


declare(
    "cumulative_batch_norm(Tensor x, Tensor(a!)? running_mean, Tensor(b!)? running_var,"
    " Tensor(c!) num_batches_tracked, Tensor? weight, Tensor? bias, float eps) -> Tensor",
    _torchs_cumulative,
    like_first,
    lambda arguments: True,
)
