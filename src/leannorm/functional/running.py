"""Running statistics: what evaluation reads, and the one place that moves them."""

from __future__ import annotations

import torch
from torch import Tensor

from leannorm._types import Running
from leannorm.ops.backends import REFERENCE, Backend
from leannorm.ops.modes import rebuilding, transformed
from leannorm.ops.select import pick


def running_mean_and_rstd(running_mean: Tensor, running_var: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The constants of evaluation; no gradient goes to them."""
    mean, var = (v.detach() if v.requires_grad else v for v in (running_mean, running_var))
    return _serving(mean, var).constants_of(mean, var, eps)


def _serving(*tensors: Tensor | None) -> Backend:
    """Plain torch where somebody looks inside: a transform, or a compiler, which fuses it with more."""
    if torch.compiler.is_compiling() or transformed(*tensors):
        return REFERENCE
    return pick(*tensors)


def in_the_same_call(
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
) -> Running | None:
    """What the norm's own call moves: all, unless a compiler, a derivative or a repetition has a say.

    Nor with a count of batches that is no int64 (an averaged or cast copy of all buffers).
    """
    if running_mean is None or running_var is None or torch.compiler.is_compiling() or rebuilding():
        return None
    if running_mean.requires_grad or running_var.requires_grad:
        return None
    if num_batches_tracked is not None and num_batches_tracked.dtype is not torch.int64:
        return None
    return running_mean, running_var, num_batches_tracked, momentum


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
    backend = _serving(running_mean, running_var, mean)
    backend.move_running(running_mean, running_var, num_batches_tracked, momentum, mean, m2, count)
