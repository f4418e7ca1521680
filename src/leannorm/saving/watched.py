"""Passes of an `overhead`: what their steps take is measured, and the plan corrected until it is as asked.

Plain passes alternate with those that follow the plan (`planning/loop.py`). They keep everything, as without
`lean()`: where there is not twice the memory that this takes, nothing is measured.
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
from leannorm.saving.small import AllKept
from leannorm.saving.timing import Timer

_NEAR = 0.75, 4 / 3  # of the first tensor's size: there a pass is one of those that are measured
_MAX_PLACES = 4096


@dataclass
class Watch:
    """The passes at one place. `loop`: of those that the last pass was one of; None: it followed no plan.

    `first`: bytes of its first tensor. `nodes`: that it has made. `kept`: what all of them would keep.
    """

    loop: Loop | None = None
    plan: RebuildPlan | None = None
    first: int = 0
    nodes: int = 0
    kept: AllKept | None = None
    timers: list[Timer] = field(default_factory=list)  # whose time is not known yet
    unmeasured: str | None = None  # why not

    @property
    def is_off(self) -> bool:
        """Is every pass plain, as the least that can be rebuilt takes too long?"""
        return self.loop is not None and self.loop.is_off

    def next(self) -> str:
        """What the pass is to be that is opened now."""
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
        """For the pass that is opened now, if its time counts."""
        if self.loop is None or not self.loop.is_timed:
            return None
        return Timer(number, partial(_note, self.loop, kind, self.loop.at))

    def bounds(self) -> tuple[float, float]:
        """Bytes of the first tensor of a plain pass."""
        return _NEAR[0] * self.first, _NEAR[1] * self.first

    def reasons(self) -> list[str]:
        """What was measured, where it is not what was asked."""
        told = [] if self.unmeasured is None else [self.unmeasured]
        if self.loop is not None and self.loop.is_off:
            told.append(reasons.off(self.loop.asked, self.loop.measured))
        return told


def _note(loop: Loop, kind: str, at: float, timer: Timer, seconds: float) -> None:
    if timer.size:
        loop.note(kind, seconds / timer.size, at)


_WATCHED: dict[Hashable, Watch] = {}


def watch_of(place: Hashable) -> Watch | None:
    """What is known of the passes at this place. With several ranks nothing is measured, as each waits for
    the others."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return None
    if len(_WATCHED) >= _MAX_PLACES:
        _WATCHED.clear()
    return _WATCHED.setdefault(place, Watch())


def free_bytes() -> int | None:
    """Memory that this process could still take: of the GPU that is used, or of the machine, or of its
    container; None where nobody says."""
    if torch.cuda.is_initialized():
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    in_use = 0 if NODES is None else NODES.bytes_in_use()
    try:
        return limit.device_bytes(in_use) - in_use
    except InputError:
        return None
