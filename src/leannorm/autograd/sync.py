"""Statistics of several ranks: one sum over the ranks in the forward pass, one in the backward pass.

Gradients are those of the sum of all ranks' losses: the input's gradient needs the other ranks' gradient
sums; the gradients of weight and bias are this rank's share.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from leannorm._errors import SyncError
from leannorm._types import Channels
from leannorm.distributed.call import Call
from leannorm.distributed.collective import add_up
from leannorm.ops.modes import rebuilding, recording


class Shared(NamedTuple):
    """This rank's sums in one forward pass and their total over the ranks, for a recompute of that pass.

    `taken`: whether a recompute has used them.
    """

    sums: Tensor
    total: Tensor
    taken: bool = False


class Sharing(NamedTuple):
    """The ranks that a layer shares its statistics with, its name in errors, and its settings.

    `seen` are the layer's last forward passes, which checkpointing may recompute. `asked` is the layer's
    `process_group`, and `group` the name of the group that this means in this call. The `norm` and whether it
    `tracks` running statistics must be equal on all ranks.
    """

    group: str
    layer: str
    timeout: float = 0.0
    debug: bool = False
    seen: deque[Shared] | None = None
    asked: dist.ProcessGroup | str | None = None
    norm: Channels = Channels()
    tracks: bool = False

    def call(self, what: str, x: Tensor) -> Call:
        groups, eps, _, _, momentum, *_ = self.norm
        statistics = x.shape[0] * groups if groups > 0 else x.shape[1]
        return Call(self.layer, what, statistics, self.timeout, self.debug, eps, momentum, self.tracks)


class AddUp(torch.autograd.Function):
    """`add_up`, differentiable any number of times: its gradient adds up over the ranks as well."""

    @staticmethod
    def forward(sums: Tensor, count: int | Tensor, group: str, call: Call) -> Tensor:
        return add_up((sums,), count, group, call).clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, ctx.group, ctx.call = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        call = ctx.call._replace(what=f"gradient of {ctx.call.what}")
        return AddUp.apply(gradient[1:].contiguous(), 0, ctx.group, call)[1:], None, None, None


def added_up(sums: Tensor, count: int | Tensor, group: str, call: Call) -> Tensor:
    """`add_up`, differentiable: by `AddUp`; in a tracer's graph the operator itself has the derivative."""
    if recording():
        return add_up((sums,), count, group, call)
    total: Tensor = AddUp.apply(sums, count, group, call)
    return total


def shared(sums: Tensor, count: int | Tensor, sharing: Sharing, x: Tensor) -> Tensor:
    """The sums over the ranks; a recompute of a forward pass gets the sums of that pass."""
    call = sharing.call("training forward", x)
    if sharing.seen is None:
        return add_up((sums,), count, sharing.group, call)
    with _disable_current_modes():  # selective checkpointing must see equal operations in both passes
        if not rebuilding():
            total = add_up((sums,), count, sharing.group, call)
            sharing.seen.append(Shared(sums, total.clone()))
            return total
        repeated = _repeated(sharing.seen, sums)
        if repeated is not None:
            return repeated
    raise SyncError(
        f"{call}: a backward pass repeats a forward pass that is not among the last "
        f"{len(sharing.seen)} of this layer, or not with the same input; make what is checkpointed "
        "deterministic, or run the backward passes sooner"
    )


def _repeated(passes: deque[Shared], sums: Tensor) -> Tensor | None:
    """The total of the pass that had these sums; if several had, one after the other, the last pass first, as
    backward passes run."""
    taken = list[int]()
    for i in reversed(range(len(passes))):
        if torch.equal(passes[i].sums.view(torch.int64), sums.view(torch.int64)):  # equal NaNs too
            if not passes[i].taken:
                passes[i] = passes[i]._replace(taken=True)
                return passes[i].total
            taken.append(i)
    for i in taken[1:]:  # all have been used: start again
        passes[i] = passes[i]._replace(taken=False)
    return passes[taken[0]].total if taken else None


def gradient_sums_of_all(sums: tuple[Tensor, Tensor], sharing: Sharing, x: Tensor, twice: bool) -> Tensor:
    """The gradient sums of all ranks after a header; with `twice` they can be differentiated again."""
    call = sharing.call("backward", x)
    if twice:
        return added_up(torch.cat(sums), 0, sharing.group, call)
    return add_up(sums, 0, sharing.group, call)


def may_be_repeated() -> bool:
    """Whether a checkpoint may recompute this forward pass.

    Reentrant checkpoints run it under no_grad, the others under saved-tensor hooks, which other hooks may
    hide: any hook counts. Call this outside of an autograd.Function, whose forward runs under no_grad.
    """
    return (
        not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    )


def repeatable(sharing: Sharing) -> Sharing:
    """`sharing`, which records this forward pass only if it may be recomputed."""
    if sharing.seen is not None and not (rebuilding() or may_be_repeated()):
        sharing = sharing._replace(seen=None)
    return sharing
