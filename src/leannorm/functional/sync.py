"""Batch norm by the statistics of several ranks, as a function."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.overrides import has_torch_function_variadic

from leannorm import _checks
from leannorm.autograd.sync import Sharing
from leannorm.functional.batch import batch_norm_act, tracked_batch_norm
from leannorm.functional.overridden import hand_over


def sync_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    act: str = "identity",
    residual: Tensor | None = None,
    process_group: dist.ProcessGroup | str | None = None,
    timeout: float | None = None,
    debug_consistency: bool = False,
    name: str = "sync_batch_norm",
) -> Tensor:
    r"""`batch_norm_act` over the batches of all ranks in `process_group` together.

    .. math:: y = \mathrm{act}\big((x - \mathrm{E}[x]) / \sqrt{\mathrm{Var}[x] + \epsilon} \cdot \gamma
        + \beta + r\big)

    Shapes, dtypes, errors on inputs and what is kept: as `batch_norm_act`. Groups, cost, and errors between
    ranks: as `leannorm.nn.SyncBatchNorm`, which remembers in addition what checkpointing repeats. Evaluation
    is `batch_norm_act`. `name` is what errors between ranks call this use; ranks that meet must be in uses
    of one name.
    Source: Ioffe and Szegedy, 2015, arXiv:1502.03167.

    >>> import torch
    >>> from leannorm import functional as F
    >>> y = F.sync_batch_norm(torch.randn(8, 3, 4, 4), None, None, training=True)
    >>> y.mean((0, 2, 3)).abs().max().item() < 1e-6
    True
    """
    if has_torch_function_variadic(input, running_mean, running_var, weight, bias, residual):
        return hand_over(sync_batch_norm, locals())
    _checks.timeout(timeout)
    if not training:
        return batch_norm_act(
            input, running_mean, running_var, weight, bias, False, momentum, eps, act=act, residual=residual
        )
    _checks.momentum_is_a_number(momentum)
    sharing = Sharing("", name, timeout or 0.0, debug_consistency, asked=process_group)
    tensors = (input, running_mean, running_var, None, weight, bias)
    return tracked_batch_norm(*tensors, training, momentum, eps, (2, 3, 4, 5), act, residual, sharing)
