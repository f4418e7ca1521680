"""Opens and closes a pass of the log, and reports what it has saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leannorm.saving.flags import Flags
from leannorm.saving.log.hooks import PYTHON
from leannorm.saving.log.log import Log
from leannorm.saving.log.moved import hand_over
from leannorm.saving.log.plans import Follower, Times, reason_of, timeline_of
from leannorm.saving.log.recorder import THREAD, Recorder, push, remove
from leannorm.saving.log.rules import RULES, TABLE, VARYING, Row
from leannorm.saving.log.spent import Spent
from leannorm.saving.log.values import DROPPED, HELD, Policy, Value, Why


class RecordedTensors:
    """What a pass keeps when it closes, which can be read even after a backward pass has freed it."""

    def __init__(self) -> None:
        self.held = self.dropped = 0
        self._rows: list[tuple[Any, ...]] = []

    def add(self, log: Log, x: Value, instead: int) -> None:
        """`instead`: bytes of what is kept instead of it."""
        dropped = x.state == DROPPED
        nbytes = x.storage_bytes - min(instead, x.storage_bytes)
        name, why = "" if x.call < 0 else log.calls[x.call].rule.name, reason_of(x)
        self._rows.append(
            (name, list(x.made.sizes), x.made.dtype, nbytes, dropped, why.why, x.saves > 0, why.of)
        )
        self.dropped += nbytes * dropped
        self.held += nbytes * (not dropped)

    def add_other(self, sizes: Iterable[int], dtype: torch.dtype, nbytes: int) -> None:
        self._rows.append(("", list(sizes), dtype, nbytes, False, Why.NONE, False, ""))
        self.held += nbytes

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self) -> list[tuple[Any, ...]]:
        return self._rows


class _Then(NamedTuple):
    """What a pass had saved when a backward pass began within it."""

    saved: RecordedTensors
    seen: int
    places: int
    timeline: tuple[Any, ...] | None


class RecordedPass:
    """One pass, recorded from its creation until `close`. All open passes of one thread share a log."""

    def __init__(
        self,
        products: bool,
        everything: bool,
        sums: int,
        runs: int,
        row: int,
        flags: Flags,
        ask: Callable[..., Any] | None,
        layer: Callable[[], str] | None,
        hold: Callable[[Tensor], Any] | None,
        owns: Callable[[Tensor], int] | None,
        other: Callable[[Tensor], Any],
        subclasses: bool,
        gathers: bool,
        smallest: int,
    ) -> None:
        """`flags` are for C++, which reads them once per pass; here each call has its own."""
        self.layer, self.hold, self.other = layer, hold, other
        log = THREAD.log
        if log is None or log.closed:
            log = THREAD.log = Log()
            log.subclasses = subclasses
            log.recorder = Recorder(log)
            push(log.recorder)
        self.log, self._is_open, self._met = log, True, 0
        self._noted: _Then | None = None
        with log:
            log.settle()
            hand_over(log)
            log.policy = Policy(products, everything, sums, runs, row, smallest=smallest)
            self.first, self.first_call, self.first_pack = len(log.listed), len(log.calls), log.packs
            self.first_other = len(log.others)
            self.follower = Follower(ask, log.policy, self.first)
            self.follower.renew = self._renew
            if ask is not None and not log.measures:
                log.measures, log.spent = True, Spent()
            if ask is not None:
                log.times = self.follower.times = Times() if log.times is None else log.times
            log.passes.append(self)

    def meet(self, what: int) -> None:
        self._met |= what

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
            self.follower.forget_times(log)
            if log.passes:
                log.policy = log.passes[-1].follower.policy
                return
            remove(log.recorder)
            log.recorder = None
            log.closed = True
            log.let_go()
            log.to_move.clear()
            if THREAD.log is log:
                THREAD.log = None

    def __del__(self) -> None:
        if getattr(self, "_is_open", False):
            self.close()

    def _note_those_alone(self) -> None:
        """Note values that no node made and only autograd has, such as the workspace of a recurrent layer."""
        log = self.log
        for v in log.listed[self.first :]:
            x = log.values[v]
            unsaid = (
                x.saves
                and x.call >= 0
                and x.state == HELD
                and x.why == Why.NONE
                and not x.copied
                and not x.lost
            )
            if (
                not unsaid
                or x.made.numel < log.policy.smallest
                or x.made.dtype == torch.int64
                or x.held is None
            ):
                continue
            owners = 1 + log.leaves.get(v, 0)
            storage = x.held.untyped_storage()
            if log.is_there(v) and torch._C._storage_Use_Count(storage._cdata) == owners + 1:
                x.why = Why.ALONE

    def begins_within_a_call(self) -> None:
        """Note that the hook for a tensor that an operator saves has opened the pass."""
        if not self.log.calls:
            self.log.behind = torch._C._autograd._get_sequence_nr()

    @property
    def _then(self) -> _Then | None:
        """What the pass had saved, if a backward pass has freed that since; else None."""
        return self._noted if self.follower.is_over() else None

    def note(self) -> None:
        """Note what the pass has saved, as a backward pass begins within it."""
        self.follower.noted = 0
        timeline = None if self.follower.times is None else self.timeline()
        self._noted = _Then(self.saved(), self.seen(), self.places(), timeline)
        self.follower.noted = self.follower.alive_then = self.follower.alive
        self.follower.backward_passes += 1

    def _renew(self) -> None:
        """End a step whose saved tensors are all freed, and begin another one in the same pass."""
        then, log, follower = self._noted, self.log, self.follower
        assert then is not None
        if log.spent is not None:
            log.spent.is_one = False
        way: Any = getattr(follower.ask, "__self__", None)
        held, dropped = then.saved.held, then.saved.dropped
        way.renew(held, dropped, then.places, then.timeline, self.seconds(), self.device())
        self.first = min(self.first + then.seen, len(log.listed) - 1)
        self.first_call, self.first_other = len(log.calls), len(log.others)
        follower.first, follower.noted, follower.place, follower.plan = self.first, 0, -1, None
        log.policy = follower.policy
        log.times = follower.times = Times() if log.times is None else log.times

    def packed(self) -> bool:
        return self.log.packs > self.first_pack

    def seen(self) -> int:
        then = self._then
        return max(len(self.log.listed) - self.first, 0) if then is None else then.seen

    def met(self) -> int:
        return self._met

    def missed(self) -> int:
        return 0

    def device(self) -> str:
        """The device of the largest saved tensor, which decides the rates of a plan."""
        saved = [self.log.values[v] for v in self.log.listed[self.first :]]
        return str(max(saved, key=lambda x: x.storage_bytes).made.device) if saved else "cpu"

    def places(self) -> int:
        then = self._then
        return self.follower.place + 1 if then is None else then.places

    def timeline(self) -> tuple[Any, ...]:
        """The calls, values and saved tensors from which a plan is made."""
        then = self._then
        if then is not None:
            return then.timeline or ()
        with self.log as log:
            log.settle()
            others = sum(other.nbytes for other, counts in self._others() if counts)
            return timeline_of(log, self.follower, self.first_call, others)

    def seconds(self) -> list[tuple[str, float]]:
        """Of each call from the first one on, by name; 0: not known."""
        calls = enumerate(self.log.calls[self.first_call :], self.first_call)
        return [(call.rule.name, self.log.seconds.get(i, 0.0)) for i, call in calls]

    def spent(self) -> Spent | None:
        """What the step is going to take; None in a pass without a goal."""
        return self.log.spent

    def calls(self) -> list[str]:
        return [call.rule.name for call in self.log.calls]

    def saved(self) -> RecordedTensors:
        """What the pass has saved that is still in memory, or was when the backward pass began that freed
        it."""
        then = self._then
        if then is not None:
            return then.saved
        made = RecordedTensors()
        with self.log as log:
            beside = [
                x for x in log.values if not x.listed and x.held is not None and (x.call >= 0 or x.copied)
            ]
            instead: dict[int, int] = {}  # by dropped value, the bytes of what is kept instead
            for x in beside:
                if x.instead >= 0 and x.held is not None:
                    instead[x.instead] = instead.get(x.instead, 0) + x.held.untyped_storage().nbytes()
            for v in log.listed[self.first :]:
                if log.values[v].refs > 0:
                    made.add(log, log.values[v], instead.get(v, 0))
            for x in beside:
                made.add(log, x, 0)
            for other, counts in self._others():
                made.add_other(other.sizes, other.dtype, other.nbytes if counts else 0)
        return made

    def _others(self) -> Iterator[tuple[Any, bool]]:
        places = {0}
        for reference in self.log.others[self.first_other :]:
            other = reference()
            if other is not None:
                yield other, other.place == 0 or other.place not in places
                places.add(other.place)


def set_operator(
    name: str,
    kind: int,
    formula: int,
    writes: list[int],
    gate: int,
    fills: bool,
    moves: bool,
    instead: str,
    sources: list[tuple[int, int]],
) -> None:
    TABLE[name] = Row(kind, formula, writes, gate, fills, moves, instead, sources)
    RULES.clear()


def set_varying(names: list[str]) -> None:
    VARYING.update(names)
    RULES.clear()


def set_recorded(others: Any, local: Any, spec: Any, shared: Any, compare: Any) -> None:
    """Set the functions that saving/recorded.py passes to the log."""
    PYTHON.others, PYTHON.local, PYTHON.spec = others, local, spec
    PYTHON.shared, PYTHON.compare = shared, compare
