"""Batch norm by the statistics of several ranks, as a function."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from leannorm import _checks
from leannorm.autograd.sync import Sharing
from leannorm.distributed.membership import group_in_words, group_of_words
from leannorm.functional.batch import batch_norm_act, tracked_batch_norm
from leannorm.functional.declare import Arguments, declare, in_training, like_first
from leannorm.functional.door import call_operator, hand_over, public
from leannorm.functional.jagged import channels
from leannorm.functional.valid import Lengths

RANKS = (2, 3, 4, 5)


def _operator(arguments: Arguments) -> Any:
    if not arguments["training"]:
        return call_operator("batch_norm_act", arguments)
    return call_operator(
        "sync_batch_norm",
        arguments,
        num_batches_tracked=None,
        ranks=RANKS,
        group=group_in_words(arguments["process_group"]),
        layer=arguments["name"],
        timeout=arguments["timeout"] or 0.0,
        debug=arguments["debug_consistency"],
    )


def _run(*arguments: Any) -> Tensor:
    *of_norm, group, layer, timeout, debug = arguments
    of_norm.append(Sharing("", layer, timeout, debug, asked=group_of_words(group)))
    return tracked_batch_norm(*of_norm)


declare(
    "sync_batch_norm(Tensor x, Tensor(a!)? running_mean, Tensor(b!)? running_var,"
    " Tensor(c!)? num_batches_tracked, Tensor? weight, Tensor? bias, bool training, float? momentum,"
    " float eps, int[] ranks, str act, Tensor? residual, str group, str layer, float timeout, bool debug)"
    " -> Tensor",
    _run,
    like_first,
    in_training,
)


@public(packed=channels, operator=_operator)
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
    mask: Tensor | None = None,
    lengths: Lengths | None = None,
    fill: str = "zero",
) -> Tensor:
    """`batch_norm_act` by the statistics of all ranks' inputs together.

        y = act((x - E[x]) / sqrt(Var[x] + eps) * weight + bias + residual)

    In training E and Var are over the batches of all ranks in `process_group`; groups, cost, `timeout` and
    `debug_consistency` are those of `leannorm.nn.SyncBatchNorm`. Evaluation is `batch_norm_act`. Errors
    between ranks call this use by `name`, and ranks that share statistics must use the same name. Only the
    layer remembers the sums for a pass that checkpointing repeats; this function adds them up again. `mask`,
    `lengths` and `fill` are those of `batch_norm`, for this rank's input.

    Shapes, Dtypes: as `batch_norm_act`.
    Kept: as `batch_norm_act`, and 8 bytes.
    Raises: as `batch_norm`, and `SyncError` if a rank is missing or calls something else.
    Source: as `batch_norm`.

    >>> import torch
    >>> from leannorm import functional as F
    >>> y = F.sync_batch_norm(torch.randn(8, 3, 4, 4), None, None, training=True)
    >>> y.mean((0, 2, 3)).abs().max().item() < 1e-6
    True
    """
    tensors = (input, running_mean, running_var, weight, bias)
    of_ranks = process_group, timeout, debug_consistency, name
    values = *tensors, training, momentum, eps, act, residual, *of_ranks, mask, lengths, fill
    if (y := hand_over(sync_batch_norm, values)) is not None:
        return y
    _checks.timeout(timeout)
    masking: Any = {"mask": mask, "lengths": lengths, "fill": fill}
    if not training:
        return batch_norm_act(*tensors, False, momentum, eps, act=act, residual=residual, **masking)
    _checks.momentum_is_a_number(momentum)
    sharing = Sharing("", name, timeout or 0.0, debug_consistency, asked=process_group)
    tensors_and_count = (*tensors[:3], None, weight, bias)
    settings: Any = (training, momentum, eps, RANKS, act, residual, sharing)
    return tracked_batch_norm(*tensors_and_count, *settings, **masking)
