"""The one collective: sums over ranks, as a function for eager torch and an operator for compiled graphs."""

from __future__ import annotations

import torch
from torch import Tensor

from leannorm.distributed.call import Call
from leannorm.distributed.group import statistics_group


def add_up(sums: Tensor, count: int, group: str, call: Call) -> tuple[Tensor, Tensor]:
    """(C,) float64 sums and the count, added up over the ranks of the process group named `group`."""
    if torch.compiler.is_compiling():
        total: Tensor = torch.ops.leannorm.add_up_over_ranks(sums, count, group, *call)
    else:
        total = statistics_group(group, call).all_reduce(sums, count, call)
    return total[1:], total[0].clone()  # what is kept for long shall not keep the whole message


@torch.library.custom_op("leannorm::add_up_over_ranks", mutates_args=())
def _add_up_over_ranks(
    sums: Tensor,
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
    sums: Tensor,
    count: int,
    group: str,
    layer: str,
    what: str,
    channels: int,
    timeout: float,
    debug: bool,
) -> Tensor:
    return sums.new_empty(len(sums) + 1)


# Without data between them (an empty batch) the compiler may put the layers' sums in another order than on
# the other ranks. torch has no such order to ask for in its earlier versions; there the header tells.
if hasattr(_add_up_over_ranks, "register_effect"):
    from torch._library.effects import EffectType

    _add_up_over_ranks.register_effect(EffectType.ORDERED)
