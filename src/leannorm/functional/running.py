"""Running statistics: what evaluation reads, and the one place that moves them."""

from __future__ import annotations

import torch
from torch import Tensor

from leannorm.ops.backends import reference
from leannorm.ops.modes import rebuilding, transformed
from leannorm.ops.precision import statistics_dtype
from leannorm.ops.select import pick


def running_mean_and_rstd(
    input: Tensor, running_mean: Tensor, running_var: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The constants of evaluation, copied, so that later training may change the buffers."""
    dtype = statistics_dtype(input)
    mean = running_mean.detach().to(dtype, copy=True)
    return mean, torch.rsqrt(running_var.detach().to(dtype) + eps)


def update_running_statistics(
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    mean: Tensor,
    m2: Tensor,
    count: int | Tensor,
) -> None:
    """Move the running statistics towards a batch's, in place, and for what is not None.

    A forward pass that a backward pass repeats, to rebuild what was not kept, does nothing a second time.
    """
    if rebuilding() or (running_mean is None and num_batches_tracked is None):
        return
    buffers = running_mean, running_var, num_batches_tracked
    plain = torch.compiler.is_compiling() or transformed(*buffers, mean)
    backend = reference if plain else pick(running_mean, running_var)
    backend.move_running(*buffers, momentum, mean, m2, count)
