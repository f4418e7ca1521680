"""The timeline of a pass, from which a plan is made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leannorm.saving import timeline as told
from leannorm.saving.log.log import Alive, Log
from leannorm.saving.log.price import groups_of, operations
from leannorm.saving.log.values import COPIED, DROPPED, HELD, Call, Value
from leannorm.saving.log.walk import Walk
from leannorm.saving.reasons import Cause, Why

_nodes_made = torch._C._autograd._get_sequence_nr
_WANTS, _HAS_GRADIENT = 1, 2  # bits of a value: it gets a gradient; that is added to an existing one


def reason_of(x: Value) -> Cause:
    """The reason that is given for a value that is kept."""
    if x.why == Why.NOT_AT_HAND and x.cause.why != Why.NONE:
        return x.cause
    return Cause(x.why, x.cause.of if x.why == x.cause.why and x.why != Why.COLLECTIVE else "")


class Times:
    """What is noted in addition to the log in a pass from which a plan is made."""

    def __init__(self) -> None:
        self.saves: list[tuple[Alive, int, int, int]] = []  # the pass, the place, the value, and its call
        self.of_value: dict[int, int] = {}
        self.wants: dict[int, set[int]] = {}  # by call, the reads of tensors that require a gradient
        self.died: list[int] = []  # by memory, the first call that began after it was freed
        self._living: list[int] = []

    def note_gradient(self, v: int, tensor: Tensor) -> None:
        if tensor.requires_grad:
            base = tensor if tensor._base is None else tensor._base
            has = _HAS_GRADIENT if base.is_leaf and base.grad is not None else 0
            self.of_value[v] = self.of_value.get(v, 0) | _WANTS | has

    def made(self, call: Call, number: int, v: int, tensor: Tensor) -> None:
        """Note a result. It has no graph yet, so its call's reads say whether it gets a gradient."""
        if call.grad_mode and number in self.wants and tensor.is_floating_point():
            self.of_value[v] = self.of_value.get(v, 0) | _WANTS

    def read(self, call: int, at: int, v: int, tensor: Tensor) -> None:
        self.note_gradient(v, tensor)
        if tensor.requires_grad:
            self.wants.setdefault(call, set()).add(at)

    def saved(self, log: Log, by: Alive, place: int, v: int, tensor: Tensor) -> None:
        self.note_gradient(v, tensor)
        node, last = tensor.grad_fn, len(log.calls) - 1
        # a node saves arguments before their call is seen, and results after it
        is_result = log.values[v].call == last if node is None else node._sequence_nr() == _nodes_made() - 1
        self.saves.append((by, place, v, last if is_result else last + 1))

    def note_freed(self, log: Log, call: int) -> None:
        """Note the memories that are gone when this call begins."""
        self._living += range(len(self.died), len(log.memories))
        self.died += [-1] * (len(log.memories) - len(self.died))
        gone = [memory for memory in self._living if log.memories[memory].expired()]
        if gone:
            for memory in gone:
                self.died[memory] = call
            self._living = [memory for memory in self._living if self.died[memory] < 0]


def _makes(log: Log, taken: set[int]) -> set[int]:
    """The values that are rebuilt, or could be if a plan kept others: it may also drop a value that was kept
    only because too many calls in a row lead to it. `taken`: values, saved by no node, that are then kept."""
    makes = set[int]()
    for v, x in enumerate(log.values):
        if x.state == DROPPED:
            makes.add(v)
        if x.state != HELD or x.call < 0 or x.copied:
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
    times = Times() if log.times is None else log.times
    start, taken = min(first, len(log.calls)), set[int]()
    before, log.policy = log.policy, log.policy.with_plan()
    makes = _makes(log, taken)
    log.policy = before
    calls, values = list[told.Call](), list[told.Value]()
    for number, call in enumerate(log.calls[start:], start):
        wants = times.wants.get(number, ())
        reads = [
            told.Read(read.value, log.shape_of(read).nbytes, at in wants, read.at)
            for at, read in enumerate(call.reads)
        ]
        costs = operations(log, call), groups_of(call)
        calls.append(told.Call(call.rule.name, *costs, call.grad_mode, reads, list(call.outs)))
    for v, x in enumerate(log.values):
        # what is taken would be copied, as in `add_reader`
        copied = x.copied or (v in taken and x.call < 0 and x.storage_bytes <= COPIED)
        is_needed, dtype, reason = x.refs > 0, x.made.dtype, reason_of(x)
        counts = (is_needed or v in taken) and not x.parameter and (x.saves > 0 or x.call >= 0 or copied)
        values.append(
            told.Value(
                x.memory,
                call=-1 if x.call < start else x.call - start,
                storage=x.storage_bytes,
                coded=x.storage_bytes,
                nbytes=x.made.nbytes,
                itemsize=dtype.itemsize,
                is_floating=dtype.is_floating_point,
                gradient=times.of_value.get(v, 0),
                needed=is_needed,
                makes=v in makes,
                held=x.state != DROPPED,
                counts=counts,
                copied=copied,
                why=reason.why,
                inputs=log.inputs_of(log.calls[x.call]) if v in makes else [],
                of=reason.of,
            )
        )
    last = len(log.calls) - 1
    saves = [
        (place if one is by else -1, v, max(min(call, last) - start, 0))
        for one, place, v, call in times.saves
        if call >= start - 1
    ]
    died = [at if at < 0 else max(at - start, 0) for at in times.died]
    return calls, values, saves, died, others
