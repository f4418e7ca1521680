"""One forward pass in `lean()`: sets its hooks, removes them, and stores what later passes need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from leannorm.head import Heads, Told
from leannorm.ops.modes import recording
from leannorm.planning.goal import HALF, Goal
from leannorm.planning.loop import PLAIN
from leannorm.saving import limit, reasons, recorded_pass, small, timing, watched
from leannorm.saving.aside import PassHooks, take_away
from leannorm.saving.ledger import AllKept, Ledger
from leannorm.saving.moved import Hooks
from leannorm.saving.plan import RebuildPlan
from leannorm.saving.plans import Following
from leannorm.saving.policy import Policy
from leannorm.saving.recorded_pass import RecordedPass
from leannorm.saving.small import NEVER_SMALL, Alone, FirstTensor, Seen, nodes_made
from leannorm.saving.timing import TimedPack, Timer
from leannorm.saving.units import Units, is_of_flat
from leannorm.saving.verify import Layers
from leannorm.saving.watched import Watch

_NAMED = 3  # tensors that a reason names
_NEARLY = 1.01


@dataclass(frozen=True)
class Settings:
    """The arguments of `lean()`, checked."""

    policy: Policy
    goal: Goal | None
    hooks: Hooks | Literal["host"] | None
    verify: bool
    head: bool = False

    @cached_property
    def may_be_small(self) -> bool:
        """Whether a small pass may be left as it is, as no setting asks for something else."""
        plain = self.goal in (None, HALF)
        return plain and self.hooks is None and not (self.verify or self.head)

    @property
    def may_be_watched(self) -> bool:
        """Whether the setting allows an overhead in time, which is then measured on the user's own steps."""
        return self.goal is not None and self.goal.promises_time and not (self.hooks or self.verify)


class ForwardPass:
    """One forward pass, from `open` to `end`; `line` identifies the line of the program that opens it."""

    refused: str | None = None  # why no hooks were set
    told: Told | None = None  # notes on logits that are not computed
    plan: RebuildPlan | None = None
    tells_why = False
    """Whether `reasons` says why outputs of operations are kept. It does not if a plan keeps as much as was
    asked for, or if a backward pass has already freed most tensors."""

    # Set in the class, as a pass that is left alone should cost little
    _place: Hashable = None  # set if the pass may be small
    _alone: Alone | None = None  # set if it is left alone, as it was small the last time
    _watch: Watch | None = None  # set if its time is measured
    _limit: limit.Limit | None = None
    _following: Following | None = None
    _recorded: RecordedPass | None = None
    _first: Any = None  # the hook for the first tensor: a `FirstTensor`, or that of the C++ nodes
    _timer: Timer | None = None
    _is_plain = False  # whether it is run to be compared with passes that follow the plan
    _freed_within = False  # whether most of what it saved was freed before it closed
    _of_plans: str | None = None
    _set: PassHooks | None = None
    _closing: tuple[Callable[[], None], ...] = ()
    _number = 0  # of those that this process has opened
    _nodes = 0  # autograd nodes: how many existed when it was opened; from `_close` on, how many it made

    def __init__(self, settings: Settings, ledger: Ledger, line: Hashable) -> None:
        self._settings, self.ledger, self._line = settings, ledger, line
        if line is not NEVER_SMALL and settings.may_be_small:
            self._place = line, settings.policy
            self._alone = small.left_alone(self._place)
        elif line is not NEVER_SMALL and settings.may_be_watched:
            self._watch = watched.watch_of((line, settings.goal))

    def open(self) -> None:
        """Set the hooks, unless `refusal` gives a reason not to."""
        self._number = timing.opened()
        if self._alone is not None:
            self._first = recorded_pass.LOG.record_first(self._look_from_here, self._alone.most)
            if self._first is not None:  # it has set itself
                return
        self.refused = refusal()
        if self.refused is not None:
            return
        asked = None if self._settings.goal is None else self._settings.goal.limit
        if asked is not None:
            self._limit = limit.begin(asked, self._line)
        pack, timed = self._first_hook(), None
        if self._first is None:
            pack = self._begin()
            if self._timer is not None:
                pack = timed = TimedPack(pack, recorded_pass.LOG.record_unpack, self._timer)
        self._set_hooks(pack)
        if timed is not None:
            timed.hooks = self._set
        elif self._first is not None:
            self._first.hooks = self._set
        if self._settings.head:
            self.told, units = Told(self._line), Units()
            heads = Heads(self.told, _no_head, units.gathered)
            heads.open()
            self._closing += (heads.close,)
        self._nodes = nodes_made()

    def _set_hooks(self, pack: Callable[[Tensor], Any]) -> None:
        self._set = PassHooks(pack, recorded_pass.LOG.record_unpack, self._number)
        self._set.__enter__()

    def _first_hook(self) -> Any:
        """The hook for the first tensor of a pass that is left alone, plain, or opened under no_grad; else
        None."""
        least, most = 0.0, -1.0
        if self._watch is not None and torch.is_grad_enabled():
            kind = self._watch.next()
            self._timer, self._is_plain = self._watch.timer(self._number, kind), kind == PLAIN
        if self._alone is not None:
            most = self._alone.most
        elif self._is_plain and self._watch is not None:
            least, most = self._watch.bounds()
        elif torch.is_grad_enabled():
            return None
        self._first = FirstTensor(self._look_from_here, least, most, self._timer)
        return self._first.pack

    def _begin(self, from_here: bool = False) -> Callable[[Tensor], Any]:
        """The pack hook of a pass that is recorded from here on."""
        layers, goal = None, self._settings.goal
        if self._settings.verify:
            layers = Layers()
            self._closing += (layers.close,)
            layers.open()
        is_other = from_here and (self._is_plain or self._alone is not None)  # its plan would begin before
        if goal is not None and goal.limit is None and not is_other:
            self._following = Following(goal, None if self._watch is None else (self._line, goal))
        policy, hooks = self._settings.policy, self._settings.hooks
        self._recorded = RecordedPass(policy, self._following, hooks, layers, self._limit, from_here)
        self.ledger.add(self._recorded.recorded)
        return self._recorded.pack

    def _look_from_here(self) -> bool:
        """Start recording with the next tensor; False if the hooks cannot be replaced."""
        if self._set is None:
            is_removed: bool = self._first.remove()
            if is_removed:
                self._set_hooks(self._begin(from_here=True))
            return is_removed
        if not self._set.is_on_top():
            return False
        self._set.replace(self._begin(from_here=True), recorded_pass.LOG.record_unpack)
        return True

    def end(self, failed: bool) -> list[str]:
        """End the pass, which may have `failed` with an error; returns why no memory, or less than asked, was
        saved. It no longer refers to the tensors that a small pass has kept."""
        if self._alone is not None and self._recorded is None:
            return self._left_alone(self._alone)
        try:
            self._close()
            if failed:
                return []
            self.plan = self._learn()
            is_missed = self._settings.goal is None or self._missed is not None
            self.tells_why = not self._freed_within and is_missed
            return self._reasons()
        finally:
            if self._first is not None:
                self._first.forget()

    def _left_alone(self, alone: Alone) -> list[str]:
        """End a pass that was left alone; returns why."""
        if self._first is None:
            return [] if self.refused is None else [self.refused]
        nodes, saves, is_removed = self._first.close()
        if not is_removed:
            take_away((self._first, recorded_pass.LOG.record_unpack))
        if nodes > alone.most_nodes:
            small.note(self._place, None)
        if not saves:
            return self._nothing_saved()
        self.ledger.add(alone.seen.kept)
        return [reasons.SMALL]

    def _close(self) -> None:
        nodes = nodes_made() - self._nodes
        if self._set is not None:
            self._set.__exit__(None, None, None)
        for close in self._closing:
            close()
        if self._recorded is not None:
            self._recorded.close()
            self._following = self._recorded.following
            self._freed_within = self._recorded.is_mostly_gone
        kept = [] if self._first is None else self._first.kept
        like = None if self._recorded is not None or self._watch is None else self._watch.seen
        if kept and like is not None:
            self.ledger.add(like.kept)
        elif kept:
            self.ledger.add_first(kept)
        self._nodes = nodes

    def _learn(self) -> RebuildPlan | None:
        """Store what later passes need (the size, a plan); returns the plan, if there is one."""
        if self._alone is not None:
            small.note(self._place, None)
            return None
        made, following = self._recorded, self._following
        if self._freed_within or self.refused is not None:  # what is left has neither the size nor a plan
            return None
        if self._watch is not None and self._timer is not None:
            self._watch.timers.append(self._timer)
        if made is None:
            return None if self._watch is None else self._watch.left(self._nodes)
        if self._place is not None and made.seen and small.note(self._place, self._seen()):
            return None  # the next passes are left alone, so that none would follow a plan
        if self._watch is not None:
            self._watch.loop = None if following is None else self._watch.loop
        if following is None or not made.places:  # there is nothing to plan
            return None
        self._of_plans = made.end()
        if self._watch is not None:
            self._note_followed(self._watch, following)
        return following.plan

    def _seen(self) -> Seen:
        ledger = self.ledger
        first = next(iter(ledger.records()), None)
        nbytes = 0 if first is None else first.shape.numel() * first.dtype.itemsize
        all_kept = AllKept(ledger.records, ledger.kept + ledger.rebuilt)
        return Seen(nbytes, ledger.rebuilt, self._nodes, all_kept)

    def _note_followed(self, watch: Watch, following: Following) -> None:
        if following.plan is None or following.loop is None:
            watch.loop = None
            return
        if following.loop is not watch.loop or watch.seen is None:
            watch.loop, watch.seen = following.loop, self._seen()
        following.plan = following.plan._replace(measured=following.loop.measured)
        watch.plan = following.plan._replace(made_for=following.plan.made_for.without_lines())

    @property
    def _missed(self) -> str | None:
        """The reason that the budget, the peak or the limit is out of reach, if it is."""
        goal = self._settings.goal
        if goal is None or self._freed_within:
            return None
        if goal.limit is not None:
            least = 0 if self._recorded is None else self._recorded.missed
            return reasons.of_limit(self._limit, least, self.ledger.largest(_NAMED) if least else [])
        if self.plan is not None:
            chosen = self.plan.chosen
            return None if chosen.reached else reasons.out_of_reach(goal, chosen)
        kept, rebuilt = self.ledger.kept, self.ledger.rebuilt
        ratio = (kept - self.ledger.moved) / max(kept + rebuilt, 1)
        is_least = self._following is None or self._following.whole
        missed = goal.budget is not None and ratio > _NEARLY * goal.budget and is_least
        return reasons.budget_out_of_reach(goal, ratio) if missed else None

    @staticmethod
    def _nothing_saved() -> list[str]:
        return [reasons.NOTHING] if torch.is_grad_enabled() else []

    def _reasons(self) -> list[str]:
        """The causes that concern the whole pass come first."""
        plan, missed = self.plan, self._missed
        counts: Counter[str] = Counter() if self._recorded is None else self._recorded.reasons
        whole = [reason for reason in counts if reason in reasons.OF_THE_PASS]
        if self.refused is not None:
            whole.append(self.refused)
        if self._freed_within:
            unplanned = self._settings.goal is not None
            whole.append(reasons.FREED_BEFORE_PLAN if unplanned else reasons.FREED_WITHIN)
        if self._set is not None and self._set.stepped_aside:
            whole.append(reasons.TRANSFORMED_WITHIN)
        seen_first = self._first is not None and self._first.kept
        seen = seen_first or (self._recorded is not None and self._recorded.seen)
        if not (seen or whole):
            whole += self._nothing_saved()
        if self._watch is not None:
            whole += self._watch.reasons()
            if self._recorded is None and self._is_plain and not self._watch.is_off:
                whole.append(reasons.COMPARED)
        elif plan is not None and plan.is_dear:
            whole.append(reasons.dear(plan.hooks, plan.asked or 0.0))
        goal = self._settings.goal
        recording = None if goal is None or plan is None else reasons.of_recording(goal, plan)
        peak = None if goal is None or plan is None else reasons.of_peak(goal, plan)
        whole += [reason for reason in (recording, missed, self._of_plans, peak) if reason is not None]
        of_tensors = [
            f"{count} tensors: {reason}" if count > 1 else reason
            for reason, count in counts.items()
            if reason not in reasons.OF_THE_PASS
        ]
        return whole + of_tensors


def refusal() -> str | None:
    """Why no hooks may be set here, or None. Hooks that are already set (offloading, checkpointing) win."""
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return reasons.TRANSFORMED
    if recording():  # a tensor that hooks had packed would be detached in the graph
        return reasons.TRACED
    return reasons.HOOKS_AROUND if _others_hooks() else None


def _no_head(weight: Tensor) -> str | None:
    """Why logits of this weight may not wait until they are read."""
    if _others_hooks():
        return reasons.HEAD_IN_HOOKS
    if is_of_flat(weight):
        return reasons.HEAD_OF_FLAT
    return reasons.HEAD_OF_UNITS if Units().rests(weight) else None


def _others_hooks() -> bool:
    """Whether the hooks that are set now are not `lean`'s."""
    top: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and top[1] != recorded_pass.LOG.record_unpack
