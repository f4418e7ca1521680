"""The one collective: sums over ranks, as a function for eager torch and an operator for compiled graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from leannorm._torch import RELEASE
from leannorm.distributed.call import Call
from leannorm.distributed.group import statistics_group
from leannorm.ops.modes import recording, traced


def add_up(sums: Sequence[Tensor], count: int | Tensor, group: str, call: Call) -> Tensor:
    """The count followed by the float64 sums, each summed over the ranks of the process group named `group`.

    The count is a tensor if the host may not know it.

    The result is a view of the whole message: clone it before keeping it.
    """
    if traced() or recording():
        known, counted = (0, count) if isinstance(count, Tensor) else (count, None)
        total: Tensor = torch.ops.leannorm.add_up_over_ranks(sums, known, group, *call, counted)
        return total
    return statistics_group(group, call, sums[0].device).all_reduce(sums, count, call)


@torch.library.custom_op("leannorm::add_up_over_ranks", mutates_args=())
def _add_up_over_ranks(  # noqa: PLR0913
    sums: Sequence[Tensor],
    count: int,
    group: str,
    layer: str,
    what: str,
    channels: int,
    timeout: float,
    debug: bool,
    eps: float,
    momentum: float | None,
    tracks: bool,
    counted: Tensor | None = None,
) -> Tensor:
    """Opaque to the compiler: a functional collective would lose the checks, which run on the host."""
    call = Call(layer, what, channels, timeout, debug, eps, momentum, tracks)
    of_rank = count if counted is None else counted
    return statistics_group(group, call, sums[0].device).all_reduce(sums, of_rank, call).clone()


@_add_up_over_ranks.register_fake
def _(sums: Sequence[Tensor], *others: Any, **named: Any) -> Tensor:
    return sums[0].new_empty(sum(len(s) for s in sums) + 1)


def _keep_call(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    sums, _, ctx.group, layer, what, *settings, _ = inputs
    ctx.sizes, ctx.call = [len(s) for s in sums], Call(layer, f"gradient of {what}", *settings)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    """The gradient of all ranks' losses: it is summed over the ranks as well."""
    total = torch.ops.leannorm.add_up_over_ranks([gradient[1:].contiguous()], 0, ctx.group, *ctx.call)
    others = len(ctx.needs_input_grad) - 1  # torch leaves out an argument that has its default value
    return list(total[1:].split(ctx.sizes)), *[None] * others


# for graphs that are differentiated again; eager code has `AddUp`
_add_up_over_ranks.register_autograd(_backward, setup_context=_keep_call)


# If no data dependence orders two layers' sums (an empty batch), the compiler may reorder them, differently
# on each rank. An ordered effect prevents that. torch 2.10 fails when it tries to repeat an ordered operator;
# there the header shows the difference.
if RELEASE > (2, 10):
    from torch._library.effects import EffectType

    _add_up_over_ranks.register_effect(EffectType.ORDERED)


def checkpoint_contexts() -> tuple[Any, Any]:
    """For `torch.utils.checkpoint` within `torch.compile`: recompute everything but the sums over the ranks.

    The compiler decides what a backward pass recomputes, and cannot repeat a collective. Passed as
    `context_fn`, this makes it keep the layers' sums, 32 bytes per channel, as eager checkpointing does.

    Raises: nothing.

    >>> import torch
    >>> from torch.utils.checkpoint import checkpoint
    >>> from leannorm import distributed, nn
    >>> layer, x = nn.SyncBatchNorm(4), torch.randn(8, 4, requires_grad=True)
    >>> checkpoint(layer, x, use_reentrant=False, context_fn=distributed.checkpoint_contexts).shape
    torch.Size([8, 4])
    """
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(_policy)
    return contexts


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operator is torch.ops.leannorm.add_up_over_ranks.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
