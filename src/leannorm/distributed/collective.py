"""The one collective: sums over ranks, as a function for eager torch and an operator for compiled graphs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leannorm.distributed.call import Call
from leannorm.distributed.group import statistics_group


def add_up(sums: Sequence[Tensor], count: int, group: str, call: Call) -> Tensor:
    """The count, and behind it the float64 sums, added up over the ranks of the process group named `group`.

    A view of the whole message: whoever keeps it for long, copies it.
    """
    if torch.compiler.is_compiling():
        total: Tensor = torch.ops.leannorm.add_up_over_ranks(sums, count, group, *call)
        return total
    return statistics_group(group, call).all_reduce(sums, count, call)


@torch.library.custom_op("leannorm::add_up_over_ranks", mutates_args=())
def _add_up_over_ranks(
    sums: Sequence[Tensor],
    count: int,
    group: str,
    layer: str,
    what: str,
    channels: int,
    timeout: float,
    debug: bool,
) -> Tensor:
    """Opaque to the compiler, which would drop the checks on the host from a functional collective."""
    call = Call(layer, what, channels, timeout, debug)
    return statistics_group(group, call).all_reduce(sums, count, call).clone()


@_add_up_over_ranks.register_fake
def _(
    sums: Sequence[Tensor],
    count: int,
    group: str,
    layer: str,
    what: str,
    channels: int,
    timeout: float,
    debug: bool,
) -> Tensor:
    return sums[0].new_empty(sum(len(s) for s in sums) + 1)


# Without data between them (an empty batch) the compiler may put the layers' sums in another order than on
# the other ranks. torch has no such order to ask for in its earlier versions; there the header tells.
if hasattr(_add_up_over_ranks, "register_effect"):
    from torch._library.effects import EffectType

    _add_up_over_ranks.register_effect(EffectType.ORDERED)
