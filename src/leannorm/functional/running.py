"""Running statistics: what evaluation reads, and the one place that updates them."""

from __future__ import annotations

import torch
from torch import Tensor

from leannorm._types import Maybe, Moments, Pool, Running
from leannorm.ops.backends import REFERENCE, Backend
from leannorm.ops.modes import rebuilding, traced, transformed
from leannorm.ops.running import merge_into
from leannorm.ops.select import pick


def running_mean_and_rstd(mean: Maybe, var: Maybe, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and rstd of evaluation, as constants: running statistics get no gradient. They must be given."""
    if mean is None or var is None:
        raise AssertionError("evaluation has been checked to have running statistics")
    if mean.requires_grad or var.requires_grad:
        mean, var = mean.detach(), var.detach()
    constants: tuple[Tensor, Tensor] = _serving(mean, var).constants_of(mean, var, eps)
    return constants


def _serving(*tensors: Tensor | None) -> Backend:
    """Plain torch under a transform or a compiler, which fuses it with its neighbours; otherwise a
    backend."""
    if traced() or transformed(*tensors):
        return REFERENCE
    return pick(*tensors)


def may_be_fused(running: Running) -> bool:
    """Whether the norm's own kernel may update them; otherwise `update_running_statistics` does.

    The kernel may not do so in compiled code, if a buffer needs a gradient, in a recompute, and if the count
    of batches is not int64 (an averaged or cast copy of all buffers).
    """
    mean, var, num_batches, _ = running
    if mean is None or var is None or traced() or rebuilding():
        return False
    if mean.requires_grad or var.requires_grad:
        return False
    return num_batches is None or num_batches.dtype is torch.int64


def update_running_statistics(running: Running, moments: Moments, pool: Pool | None = None) -> None:
    """Update the running statistics that are not None with a batch's, in place, or add the batch to a pool.

    Does nothing in a recompute: the first forward pass has updated them.
    """
    if rebuilding() or (running.mean is None and running.num_batches is None):
        return
    if pool is None:
        _serving(running.mean, running.var, moments.mean).move_running(running, moments)
    else:
        merge_into(pool, moments)
        pool.used = True
