"""Memory that a closed log needs and that other code can write: it is copied before that."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from leannorm.saving.log.log import Log
from leannorm.saving.log.tensors import copy_of, is_plain
from leannorm.saving.log.values import DROPPED, HELD, Value


def expose(log: Log) -> None:
    """Find the memory that a closed log needs and that other code can write.

    An edit of what a call's own node has saved is an error in plain PyTorch while the call's result is in
    use, and parameters are edited after the backward pass: neither is watched.
    """
    for number, call in enumerate(log.calls):
        if all(log.values[out].state != DROPPED for out in call.outs):
            continue
        for i, read in enumerate(call.reads):
            v, x = read.value, log.values[read.value]
            if x.state != HELD or x.held is None or x.copied or x.lost or x.weight or x.refs <= x.saves:
                continue
            if log.is_read(call, i) and (v, number) not in log.saved_by and x.owners() > 1:
                log.exposed[v] = x.address()


def copy_exposed(logs: Iterable[Log], written: Iterable[Tensor]) -> None:
    """Copy what these closed logs need of memory that is written next."""
    for tensor in written:
        if not is_plain(tensor, in_any_bits=True):
            continue
        address = tensor.untyped_storage()._cdata
        for log in logs:
            with log:
                for v in [v for v, memory in log.exposed.items() if memory == address]:
                    x, was = log.values[v], log.values[v].held
                    copy_before_write(x)
                    if x.copied and x.elsewhere is None:
                        x.shown = was  # nodes that saved it read the edit, if autograd does not see that
                    log.exposed.pop(v)


def copy_before_write(x: Value) -> None:
    """Copy the value, if others are made from it. A copy to the host that is under way ends first."""
    if x.held is not None and not x.copied and x.refs > x.saves:
        now = x.held if x.elsewhere is None else x.elsewhere.bring(x)
        if x.elsewhere is None or not x.elsewhere.is_other:
            x.held, x.copied, x.state = copy_of(now, x.made), True, HELD
    if x.elsewhere is not None:
        x.elsewhere.settle()
