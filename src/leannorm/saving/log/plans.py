"""How a pass follows a plan, and the timeline of a pass from which a plan is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leannorm.saving.log.log import Log
from leannorm.saving.log.price import groups_of, operations
from leannorm.saving.log.values import COPIED, DROPPED, HELD, Call, Cause, Policy, Value, Why
from leannorm.saving.log.walk import Walk

_nodes_made = torch._C._autograd._get_sequence_nr
_WANTS, _HAS_GRADIENT = 1, 2  # bits of a value: it gets a gradient; that is added to an existing one


class Places:
    """What a plan does with each tensor that a pass saves, in order: drop it, or keep it for a reason, and
    then whether to move it."""

    def __init__(
        self,
        calls: Iterable[tuple[Any, ...]],
        drops: list[bool],
        moves: list[bool],
        whys: list[int],
        of: list[str],
    ) -> None:
        causes = map(Cause, whys, of)
        self.list = list(zip(map(tuple, calls), drops, moves, causes, strict=True))


def by_plan(policy: Policy) -> Policy:
    return policy._replace(sums=1 << 20, row=1 << 20, runs=2048, by_plan=True)


def reason_of(x: Value) -> Cause:
    """The reason that is given for a value that is kept."""
    if x.why == Why.NOT_AT_HAND and x.cause.why != Why.NONE:
        return x.cause
    return Cause(x.why, x.cause.of if x.why == x.cause.why and x.why != Why.COLLECTIVE else "")


class Follower:
    """How one pass follows a plan. If the pass is not as planned, or has no plan, `ask(place, (kind, sizes,
    strides, dtype, number))` decides. It returns whether the tensor is dropped, the plan from here on, why
    the tensor is kept, the operator to which the reason applies, and whether it is moved."""

    def __init__(self, ask: Callable[..., Any] | None, policy: Policy, first: int) -> None:
        self.ask, self.policy, self.first = ask, policy, first
        self.plan: Places | None = None
        self.place = -1  # that of the last tensor
        self.cause = Cause()
        # whether the plan chooses what a pass's `hold` gets, and its choice for the last place
        self.chooses: bool = getattr(getattr(ask, "__self__", None), "moves", False)
        self.moves = True
        self.times: Times | None = None  # set if a plan may be made from the pass
        self.alive = 0  # how many saved tensors of the pass nodes still have
        # how many there were when a backward pass last began within the pass, and how many of these are left
        self.noted = self.alive_then = 0
        self.backward_passes = 0  # how many have begun within the pass
        self.renew: Callable[[], None] | None = None  # begins the pass again, for another step

    def is_over(self) -> bool:
        """Whether a backward pass has freed what was noted: what is saved from then on is another step's."""
        return self.noted > 0 and self.alive_then * 8 < self.noted

    def has_place(self, x: Value, tensor: Tensor) -> bool:
        """Whether a plan may keep or drop the tensor: it is one that `decide` may drop."""
        placed = self.ask is not None and tensor.grad_fn is not None and not x.parameter
        return placed and x.made.numel >= self.policy.smallest

    def drops(self, log: Log, x: Value, tensor: Tensor) -> bool:
        """Whether this value may be dropped. `tensor`: as it is saved now."""
        assert self.ask is not None
        if self.renew is not None and self.is_over():
            self.renew()
        self.place += 1
        name = "" if x.call < 0 else log.calls[x.call].rule.name
        here = name, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, x.number - self.first
        if self.plan is not None and self.place < len(self.plan.list):
            planned, planned_drops, self.moves, self.cause = self.plan.list[self.place]
            if planned == here:
                return planned_drops
        drops: bool
        drops, self.plan, why, of, self.moves = self.ask(self.place, here)
        self.cause = Cause(why, of)
        log.policy = self.policy if self.plan is None else by_plan(self.policy)
        if not self.place and self.plan is not None:
            self.forget_times(log)
        return drops

    def forget_times(self, log: Log) -> None:
        """Stop noting times for this pass; the log goes on if another open pass needs them."""
        self.times = None
        log.times = next((one.follower.times for one in log.passes if one.follower.times is not None), None)


class Save(NamedTuple):
    by: Follower
    place: int
    value: int
    call: int


class Times:
    """What is noted in addition to the log in a pass from which a plan is made."""

    def __init__(self) -> None:
        self.saves: list[Save] = []
        self.of_value: dict[int, int] = {}
        self.wants: dict[int, set[int]] = {}  # by call, the reads of tensors that require a gradient
        self.died: list[int] = []  # by memory, the first call that began after it was freed
        self._living: list[int] = []

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]

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

    def saved(self, log: Log, by: Follower, placed: bool, v: int, tensor: Tensor) -> None:
        self.note_gradient(v, tensor)
        node, last = tensor.grad_fn, len(log.calls) - 1
        # a node saves arguments before their call is seen, and results after it
        is_result = log.values[v].call == last if node is None else node._sequence_nr() == _nodes_made() - 1
        self.saves.append(Save(by, by.place if placed else -1, v, last if is_result else last + 1))

    def note_freed(self, log: Log, call: int) -> None:
        """Note the memories that are gone when this call begins."""
        self._living += range(len(self.died), len(log.memories))
        self.died += [-1] * (len(log.memories) - len(self.died))
        gone = [memory for memory in self._living if log.memories[memory].is_gone]
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
        left = [v]
        while left:
            one = left.pop()
            if one in makes or one in taken or (one != v and log.values[one].held is not None):
                continue
            makes.add(one)
            left += log.inputs_of(log.calls[log.values[one].call])
    return makes


def timeline_of(log: Log, of: Follower, first: int, others: int) -> tuple[Any, ...]:
    """The calls from `first` on, all values, what was saved, and the bytes of `others`, in the form that
    recorded_timeline.py reads."""
    times = of.times
    if times is None:
        return [], [], [], [], others
    start, taken = min(first, len(log.calls)), set[int]()
    before, log.policy = log.policy, by_plan(log.policy)
    makes = _makes(log, taken)
    log.policy = before
    calls, values = list[Any](), list[Any]()
    for number, call in enumerate(log.calls[start:], start):
        wants = times.wants.get(number, ())
        reads = [
            (read.value, log.shape_of(read).nbytes, at in wants, read.at)
            for at, read in enumerate(call.reads)
        ]
        told = operations(log, call), groups_of(call), call.grad_mode, reads, list(call.outs)
        calls.append((call.rule.name, *told))
    for v, x in enumerate(log.values):
        inputs = log.inputs_of(log.calls[x.call]) if v in makes else []
        copied = x.copied or (
            v in taken and x.call < 0 and x.storage_bytes <= COPIED
        )  # or would be copied, as in `need`
        counts = (x.refs > 0 or v in taken) and not x.parameter and (x.saves > 0 or x.call >= 0 or copied)
        maker, whole = -1 if x.call < start else x.call - start, x.storage_bytes
        of_memory = x.memory, maker, whole, whole, x.made.nbytes
        of_dtype = x.made.dtype.itemsize, x.made.dtype.is_floating_point, times.of_value.get(v, 0)
        why = reason_of(x)
        states = x.refs > 0, v in makes, x.state != DROPPED, counts, copied
        values.append((*of_memory, *of_dtype, *states, why.why, inputs, why.of))
    saves = [
        (one.place if one.by is of else -1, one.value, max(min(one.call, len(log.calls) - 1) - start, 0))
        for one in times.saves
        if one.call >= start - 1
    ]
    died = [at if at < 0 else max(at - start, 0) for at in times.died]
    return calls, values, saves, died, others
