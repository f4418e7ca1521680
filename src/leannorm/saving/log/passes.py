"""Opens and closes a pass of the log, and reports what it has saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from leannorm.saving.log.log import Alive, Log
from leannorm.saving.log.moved import hand_over
from leannorm.saving.log.recorder import THREAD, Recorder
from leannorm.saving.log.spent import Spent
from leannorm.saving.log.timeline import reason_of, timeline_of
from leannorm.saving.log.values import DROPPED, HELD, Value
from leannorm.saving.log.watch import expose
from leannorm.saving.policy import Answer, Policy
from leannorm.saving.reasons import Why

if TYPE_CHECKING:
    from leannorm.saving.planned_pass import PlannedPass


class RecordedTensors(list[tuple[Any, ...]]):
    """What a pass keeps when it closes, which can be read even after a backward pass has freed it."""

    @property
    def held(self) -> int:
        return sum(nbytes for _, _, _, nbytes, dropped, *_ in self if not dropped)

    @property
    def dropped(self) -> int:
        return sum(nbytes for _, _, _, nbytes, dropped, *_ in self if dropped)

    def rows(self) -> list[tuple[Any, ...]]:
        return self


def _row(log: Log, x: Value, instead: int = 0) -> tuple[Any, ...]:
    """`instead`: bytes of what is kept instead of it."""
    name, why = "" if x.call < 0 else log.calls[x.call].rule.name, reason_of(x)
    nbytes = max(x.storage_bytes - instead, 0)
    return name, list(x.made.sizes), x.made.dtype, nbytes, x.state == DROPPED, why.why, x.saves > 0, why.of


class _Then(NamedTuple):
    """What a pass had saved when a backward pass began within it."""

    saved: RecordedTensors
    seen: int
    places: int
    timeline: tuple[Any, ...]


class RecordedPass:
    """One pass, recorded from its creation until `close`. All open passes of one thread share a log."""

    def __init__(
        self,
        policy: Policy,
        way: PlannedPass | None,
        layer: Callable[[], str] | None,
        hold: Callable[[Tensor], Any] | None,
        other: Callable[[Tensor], Any],
        subclasses: bool,
    ) -> None:
        self.policy, self.way, self.layer, self.hold, self.other = policy, way, layer, hold, other
        log = THREAD.log
        if log is None or log.closed:
            log = THREAD.log = Log(subclasses)
            if THREAD.recorder is None:
                THREAD.recorder = Recorder()
            THREAD.recorder.start(log)
        self.log, self._is_open, self.met = log, True, 0
        self._noted: _Then | None = None
        with log:
            log.settle()
            hand_over(log)
            self.first_pack, self.alive = log.packs, Alive()
            self._begin(len(log.listed))
            if way is not None and not log.measures:
                log.measures, log.spent = True, Spent()
            log.passes.append(self)

    def _begin(self, first: int) -> None:
        """Begin a step, whose first saved value has this number in the log."""
        log, self.first, self.place = self.log, first, -1  # the place of the last tensor
        log.policy, self.alive.noted = self.policy, 0
        self.first_call, self.first_other = len(log.calls), len(log.others)

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        log = self.log
        with log:
            log.settle()
            hand_over(log)
            self._note_those_alone()
            log.passes.remove(self)
            if log.passes:
                log.policy = log.passes[-1].policy
                return
            expose(log)
            log.closed = True
            log.let_go()
            log.to_move.clear()
            if THREAD.log is log:
                THREAD.log = None
            log.recorder.stop(log)

    def __del__(self) -> None:
        if getattr(self, "_is_open", False):
            self.close()

    def _saved_values(self) -> list[Value]:
        """The values that nodes have saved in this pass, or in its last step."""
        return [self.log.values[v] for v in self.log.listed[self.first :]]

    def _note_those_alone(self) -> None:
        """Note values that no node made and only autograd has, such as the workspace of a recurrent layer."""
        log = self.log
        for x in self._saved_values():
            unsaid = x.saves and x.call >= 0 and x.state == HELD and x.why == Why.NONE and not x.copied
            if not unsaid or x.lost or x.held is None or x.made.dtype == torch.int64:
                continue
            v = log.listed[x.number]
            is_there = x.made.numel >= log.policy.smallest and log.is_there(v)
            if is_there and x.owners() == 1 + log.leaves[v]:
                x.why = Why.ALONE

    def begins_within_a_call(self) -> None:
        """Note that the hook for a tensor that an operator saves has opened the pass."""
        if not self.log.calls:
            self.log.behind = torch._C._autograd._get_sequence_nr()

    # ------------------------------------------------------------ a backward pass within the pass

    @property
    def _then(self) -> _Then | None:
        """What the pass had saved, if a backward pass has freed that since; else None."""
        return self._noted if self.alive.is_over() else None

    def note(self) -> None:
        """Note what the pass has saved, as a backward pass begins within it."""
        self.alive.noted = 0
        self._noted = _Then(self.saved(), self.seen, self.places, self.timeline() if self.may_plan else ())
        self.alive.noted = self.alive.then = self.alive.now
        self.alive.backward_passes += 1

    def _renew(self, way: PlannedPass) -> None:
        """End a step whose saved tensors are all freed, and begin another one in the same pass."""
        then = self._noted
        assert then is not None
        if self.log.spent is not None:
            self.log.spent.is_one = False
        way.renew(self)
        self._begin(min(self.first + then.seen, len(self.log.listed) - 1))

    # ------------------------------------------------------------ plans

    def has_place(self, x: Value, tensor: Tensor) -> bool:
        """Whether a plan may keep or drop the tensor: it is one that `decide` may drop."""
        placed = self.way is not None and tensor.grad_fn is not None and not x.parameter
        return placed and x.made.numel >= self.policy.smallest

    @property
    def chooses(self) -> bool:
        """Whether the plan chooses what `hold` gets; otherwise that is all that is kept."""
        return self.way is not None and self.way.moves

    def drops(self, x: Value, tensor: Tensor) -> Answer:
        """The plan's answer for this value. `tensor`: as it is saved now."""
        log, way = self.log, self.way
        assert way is not None
        if self.alive.is_over():
            self._renew(way)
        self.place += 1
        name = "" if x.call < 0 else log.calls[x.call].rule.name
        sizes, strides = tuple(tensor.shape), tuple(tensor.stride())
        call = name, sizes, strides, tensor.dtype, x.number - self.first
        answer = way.ask(self.place, call)
        log.policy = self.policy.with_plan() if answer.by_plan else self.policy
        return answer

    @property
    def may_plan(self) -> bool:
        """Whether a plan may be made from the step."""
        return self.way is not None and self.way.following.whole

    # ------------------------------------------------------------ reports

    missed = 0  # there is no limit

    @property
    def packed(self) -> bool:
        return self.log.packs > self.first_pack

    @property
    def seen(self) -> int:
        return len(self._saved_values()) if self._then is None else self._then.seen

    @property
    def device(self) -> str:
        """The device of the largest saved tensor, which decides the rates of a plan."""
        saved = self._saved_values()
        return str(max(saved, key=lambda x: x.storage_bytes).made.device) if saved else "cpu"

    @property
    def places(self) -> int:
        return self.place + 1 if self._then is None else self._then.places

    def timeline(self) -> tuple[Any, ...]:
        """The calls, values and saved tensors from which a plan is made."""
        if self._then is not None:
            return self._then.timeline
        with self.log as log:
            log.settle()
            others = sum(nbytes for _, nbytes in self._others())
            return timeline_of(log, self.alive, self.first_call, others)

    def seconds(self) -> list[tuple[str, float]]:
        """Of each call from the first one on, by name; 0: not known."""
        calls = enumerate(self.log.calls[self.first_call :], self.first_call)
        return [(call.rule.name, self.log.seconds.get(i, 0.0)) for i, call in calls]

    @property
    def spent(self) -> Spent | None:
        """What the step is going to take; None in a pass without a goal."""
        return self.log.spent

    def saved(self) -> RecordedTensors:
        """What the pass has saved that is still in memory, or was when the backward pass began that freed
        it."""
        if self._then is not None:
            return self._then.saved
        with self.log as log:
            beside = [
                x for x in log.values if not x.listed and x.held is not None and (x.copied or x.takes_memory)
            ]
            instead = Counter[int]()  # by dropped value, the bytes of what is kept instead
            for x in beside:
                if x.instead >= 0 and x.held is not None:
                    instead[x.instead] += x.held.untyped_storage().nbytes()
            rows = [_row(log, x, instead[log.listed[x.number]]) for x in self._saved_values() if x.refs > 0]
            rows += [_row(log, x) for x in beside]
            for other, nbytes in self._others():
                rows.append(("", list(other.sizes), other.dtype, nbytes, False, Why.NONE, False, ""))
        return RecordedTensors(rows)

    def _others(self) -> Iterator[tuple[Any, int]]:
        """The tensors that the log cannot read, and their bytes; 0 if an earlier one has the same memory."""
        places = {0}
        for reference in self.log.others[self.first_other :]:
            other = reference()
            if other is not None:
                yield other, other.nbytes if other.place == 0 or other.place not in places else 0
                places.add(other.place)


def begin(*given: Any, units: object, **named: Any) -> RecordedPass:
    """A pass, which is recorded from now on. `units` are for C++, which knows what gathers weights."""
    return RecordedPass(*given, **named)
