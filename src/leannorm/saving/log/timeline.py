"""The timeline of a pass, from which a plan is made."""

from __future__ import annotations

from typing import Any

from leannorm.saving import logged as told
from leannorm.saving.log.log import Alive, Log
from leannorm.saving.log.price import groups_of, operations
from leannorm.saving.log.values import COPIED, DROPPED, HELD, Value
from leannorm.saving.log.walk import Walk
from leannorm.saving.reasons import Cause, Why


def reason_of(x: Value) -> Cause:
    """The reason that is given for a value that is kept."""
    if x.why == Why.NOT_AT_HAND and x.cause.why != Why.NONE:
        return x.cause
    return Cause(x.why, x.cause.of if x.why == x.cause.why and x.why != Why.COLLECTIVE else "")


def _makes(log: Log, taken: set[int]) -> set[int]:
    """The values that are rebuilt, or could be if a plan kept others: it may also drop a value that was kept
    only because too many calls in a row lead to it. `taken`: values, saved by no node, that are then kept."""
    makes = set[int]()
    for v, x in enumerate(log.values):
        if x.state == DROPPED:
            makes.add(v)
        if x.state != HELD or x.is_outside or x.copied:
            continue
        if x.saves and x.why not in (Why.TOO_DEEP, Why.NOT_AT_HAND, Why.CHECKPOINTED):
            continue
        was, x.held = x.held, None
        walk = Walk(log, v, 0, x.number) if x.saves else Walk(log, v, 0)
        can = walk.is_available(v)
        x.held = was
        if not can:
            continue
        taken.update(walk.taken)
        makes |= set(log.made_again_for(v, makes | taken))
    return makes


def timeline_of(log: Log, by: Alive, first: int, others: int) -> tuple[Any, ...]:
    """The calls from `first` on, all values, what the pass saved that counts its tensors in `by`, and the
    bytes of `others`, in the form that saving/timeline.py reads."""
    start, taken = min(first, len(log.calls)), set[int]()
    before, log.policy = log.policy, log.policy.with_plan()
    makes = _makes(log, taken)
    log.policy = before
    calls, values = list[told.Call](), list[told.Value]()
    for call in log.calls[start:]:
        reads = [told.Read(read.value, log.shape_of(read).nbytes, read.wants, read.at) for read in call.reads]
        costs = operations(log, call), groups_of(call)
        calls.append(told.Call(call.rule.name, *costs, call.grad_mode, reads, list(call.outs)))
    for v, x in enumerate(log.values):
        # what is taken would be copied, as in `add_reader`
        copied = x.copied or (v in taken and x.is_outside and x.storage_bytes <= COPIED)
        is_needed, dtype = x.refs > 0, x.made.dtype
        counts = (is_needed or v in taken) and not x.parameter and (x.saves > 0 or x.takes_memory or copied)
        values.append(
            told.Value(
                x.memory,
                call=-1 if x.call < start else x.call - start,
                storage=x.storage_bytes,
                coded=x.storage_bytes,
                nbytes=x.made.nbytes,
                itemsize=dtype.itemsize,
                is_floating=dtype.is_floating_point,
                gradient=x.gradient,
                needed=is_needed,
                makes=v in makes,
                held=x.state != DROPPED,
                counts=counts,
                copied=copied,
                cause=reason_of(x),
                inputs=log.inputs_of(log.calls[x.call]) if v in makes else [],
            )
        )
    last = len(log.calls) - 1
    saves = [
        (place if one is by else -1, v, max(min(call, last) - start, 0))
        for one, place, v, call in log.saved
        if call >= start - 1
    ]
    held = {x.memory for x in log.values if x.held is not None}
    died = [
        max(memory.died - start, 0) if memory.died >= 0 else told.UNKNOWN if i in held else told.ALIVE
        for i, memory in enumerate(log.memories)
    ]
    return calls, values, saves, died, others
