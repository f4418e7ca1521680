"""Passes with an `overhead`: their steps are timed, and the plan is corrected until they take what was asked.

Passes that follow the plan alternate with plain ones (`planning/loop.py`), which keep everything, as without
`lean()`. Nothing is measured unless twice the memory of a plain pass is free.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial

import torch

from leannorm._errors import InputError
from leannorm.autograd.nodes import NODES
from leannorm.planning.loop import PLAN, Loop
from leannorm.saving import limit, reasons
from leannorm.saving.plan import RebuildPlan
from leannorm.saving.shards import has_ranks
from leannorm.saving.small import Seen
from leannorm.saving.timing import Timer

_NEAR = 0.75, 4 / 3  # of the first tensor's size: a pass in between is one of those that are measured
_MAX_PLACES = 4096


@dataclass
class Watch:
    """The passes at one place. `loop`: chooses the plans of the last pass's kind; None if it followed none.
    `seen`: that pass."""

    loop: Loop | None = None
    plan: RebuildPlan | None = None
    seen: Seen | None = None
    timers: list[Timer] = field(default_factory=list)  # those whose time is not known yet
    unmeasured: str | None = None  # why steps are not measured

    @property
    def is_off(self) -> bool:
        """Whether every pass is plain, as even the smallest rebuild takes too long."""
        return self.loop is not None and self.loop.is_off

    def next(self) -> str:
        """Which kind the pass that opens now should be: plain, or by the plan."""
        self.timers = [timer for timer in self.timers if not timer.ask()][-4:]
        loop = self.loop
        if loop is None:
            return PLAN
        if loop.is_measuring and self.plan is not None:
            more = self.plan.chosen.stock.peak - self.plan.chosen.point.peak
            free = free_bytes()
            self.unmeasured = None
            if free is not None and more > free / 2:
                self.unmeasured = reasons.unmeasured(more, free)
                return PLAN
        return loop.next()

    def timer(self, number: int, kind: str) -> Timer | None:
        """A timer for the pass that opens now, if its time counts; else None."""
        if self.loop is None or not self.loop.is_timed:
            return None
        return Timer(number, partial(_note, self.loop, kind, self.loop.at))

    def bounds(self) -> tuple[float, float]:
        """The fewest and the most bytes that the first tensor of a plain pass may have."""
        first = 0 if self.seen is None else self.seen.first
        return _NEAR[0] * first, _NEAR[1] * first

    def left(self, nodes: int) -> RebuildPlan | None:
        """The plan, after a plain pass with so many nodes. The next one follows a plan if that was not one of
        those that are measured."""
        if self.seen is not None and nodes > 2 * self.seen.nodes:
            self.loop = None
        return self.plan

    def reasons(self) -> list[str]:
        """Why steps are not measured, or take more than was asked."""
        told = [] if self.unmeasured is None else [self.unmeasured]
        if self.loop is not None and self.loop.is_off:
            told.append(reasons.off(self.loop.asked, self.loop.measured))
        return told


def _note(loop: Loop, kind: str, at: float, timer: Timer, seconds: float) -> None:
    if timer.size:
        loop.note(kind, seconds / timer.size, at)


WATCHED: dict[Hashable, Watch] = {}


def watch_of(place: Hashable) -> Watch | None:
    """What is known of the passes at this place. None with several ranks: each waits for the others, so times
    say little."""
    if has_ranks():
        return None
    if len(WATCHED) >= _MAX_PLACES:
        WATCHED.clear()
    return WATCHED.setdefault(place, Watch())


def free_bytes() -> int | None:
    """Memory that this process could still take: on its GPU if it uses one, else on the machine or in its
    container; None on a system that does not say."""
    if torch.cuda.is_initialized():
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    in_use = 0 if NODES is None else NODES.bytes_in_use()
    try:
        return limit.device_bytes(in_use) - in_use
    except InputError:
        return None
