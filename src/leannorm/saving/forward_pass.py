"""One forward pass in `lean()`: sets its hooks, removes them, and stores what later passes need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leannorm.autograd.nodes import NODES
from leannorm.head import Heads, Told
from leannorm.ops.modes import recording
from leannorm.planning.goal import Goal
from leannorm.saving import limit, memo, packing, reasons, small
from leannorm.saving.aside import PassHooks
from leannorm.saving.ledger import Ledger
from leannorm.saving.moved import Hooks
from leannorm.saving.packing import Packing
from leannorm.saving.plan import RebuildPlan
from leannorm.saving.plans import Following
from leannorm.saving.policy import Policy
from leannorm.saving.recorded import RecordedPass, serves
from leannorm.saving.small import NEVER_SMALL, SmallPass, note, was_small
from leannorm.saving.units import Units
from leannorm.saving.unpacking import unpack
from leannorm.saving.verify import Layers

_NEARLY = 1.01


class Settings(NamedTuple):
    """The arguments of `lean()`, checked."""

    policy: Policy
    goal: Goal | None
    hooks: Hooks | None
    verify: bool
    head: bool = False

    @property
    def may_be_small(self) -> bool:
        """May a small pass be left as it is? Not if a setting asks for something else."""
        return self.goal is None and self.hooks is None and not self.verify

    @property
    def may_be_dear(self) -> bool:
        """May the hooks alone take more time than was allowed?"""
        return self.goal is not None and self.goal.overhead is not None and not (self.hooks or self.verify)


class ForwardPass:
    """One forward pass, from `open` to `close`; `line` identifies the line of the program that opens it, and
    `frames_around` are the `id`s of the frames of the functions that run then."""

    def __init__(
        self, settings: Settings, ledger: Ledger, line: Hashable, frames_around: frozenset[int]
    ) -> None:
        self._settings, self.ledger, self._frames_around, self._line = settings, ledger, frames_around, line
        self._place: Hashable = None  # of passes that may be small
        if settings.may_be_small and line is not NEVER_SMALL:
            self._place = line, settings.policy
        elif settings.may_be_dear:
            self._place = line, settings.goal
        self._stack = ExitStack()
        self._limit: limit.Limit | None = None
        planned = settings.goal is not None and settings.goal.limit is None
        self._following = Following(settings.goal) if planned and settings.goal is not None else None
        self._packing: Packing | None = None
        self._recorded: RecordedPass | None = None
        self._unpack = unpack
        self._hook: Any = None
        self._small: SmallPass | None = None
        self.refused: str | None = None  # why no hooks were set
        self._freed_within = False  # did a backward pass run before this one closed?
        self._of_plans: str | None = None
        self._set: PassHooks | None = None
        self.told: Told | None = None  # of logits that are not computed

    def open(self) -> None:
        """Set the hooks, unless `_refusal` has a reason against it."""
        self.refused = _refusal()
        if self.refused is not None:
            return
        if self._limit_asked is not None and serves():
            self._limit = limit.begin(self._limit_asked, self._line)
        most = None if self._place is None else was_small(self._place)
        if most is None and not torch.is_grad_enabled():
            most = -1  # the search begins with the first tensor that is saved, if any is
        if most is not None:
            self._small = SmallPass(self._search_from_here, most)
        if serves():
            self._unpack = NODES.record_unpack
        pack = self._begin() if self._small is None else self._small.pack
        self._set = self._stack.enter_context(PassHooks(pack, self._unpack))
        if self._settings.head:
            self.told = Told(self._line)
            heads = Heads(self.told, _no_head)
            heads.open()
            self._stack.callback(heads.close)

    def _begin(self, from_here: bool = False) -> Callable[[Tensor], Any]:
        """The pack hook that searches steps; `from_here`: they read outputs of nodes that come after this."""
        layers = None
        if self._settings.verify:
            layers = Layers()
            self._stack.callback(layers.close)
            layers.open()
        policy, hooks = self._settings.policy, self._settings.hooks
        if self._unpack is not unpack:
            self._recorded = RecordedPass(policy, self._following, hooks, layers, self._limit)
            self.ledger.add(self._recorded.recorded)
            return self._recorded.pack
        around, following = self._frames_around, self._following
        place = None if following or from_here or layers or hooks else self._place
        self._packing = Packing(policy, self.ledger, following, around, layers, hooks, from_here, place)
        self._packing.search.leaves.begin(self._line)
        self._stack.callback(self._packing.edits.close)
        self._hook = memo.hook_of(self._packing, packing.SMALLEST, from_here)
        pack: Callable[[Tensor], Any] = self._hook.pack
        return pack

    def _search_from_here(self) -> bool:
        """From the next tensor on; False if that could not be."""
        return self._set is not None and self._set.replace(partial(self._begin, from_here=True))

    def close(self) -> None:
        """Remove the hooks and close the ledger."""
        self._stack.close()
        if self._recorded is not None:
            self._recorded.close()
            self._freed_within = self._recorded.is_mostly_gone
        if self._packing is not None:
            self._packing.seen = self._hook.seen
            self._packing.search.leaves.forget()
            self._packing.recent.clear()
            self._packing.last = -1, None
            self._packing.vain.close()
            self._freed_within = self.ledger.is_mostly_gone()
        kept = [] if self._small is None else self._small.kept
        self.ledger.close(kept if self._packing is None else [*kept, *self._packing.kept])

    def forget(self) -> None:
        """Let go of the nodes that prices were read from, and of what a small pass has held."""
        if self._packing is not None:
            self._packing.reads.made.clear()
            self._packing.kept.clear()
        if self._recorded is not None:
            self._recorded.forget()
        if self._small is not None:
            self._small.forget()

    @property
    def _limit_asked(self) -> int | str | None:
        return None if self._settings.goal is None else self._settings.goal.limit

    @property
    def _looking(self) -> Packing | RecordedPass | None:
        """Who looks at what is saved."""
        return self._packing or self._recorded

    def learn(self) -> RebuildPlan | None:
        """Store what later passes need (the size, a plan); returns the plan, if there is one."""
        looking, following = self._looking, self._following
        nbytes = self.ledger.all_bytes()
        saved = looking.seen if looking is not None else self._small is not None and self._small.kept
        if self._freed_within:  # what is left tells neither the size of the pass nor a plan
            return None
        seen = self._place is not None and bool(saved) and self.refused is None
        if seen and self._settings.may_be_small:
            note(self._place, nbytes, small.SMALL)
        if following is None or looking is None:
            return None
        if not looking.calls:  # there is nothing to plan
            if seen and self._settings.may_be_dear:
                note(self._place, nbytes, 2 * nbytes)
            return None
        try:
            before = 0 if self._small is None else self._small.nbytes  # the search, which no plan knows of
            share = (self.ledger.kept() - before) / max(nbytes - before, 1)
            self._of_plans = following.end(looking.calls, looking.passed, share)
        except Exception as error:  # a plan is never worth an error in the forward pass
            looking.reasons[reasons.no_plan(error)] = 1
            return None
        if seen and following.plan is not None:
            note(self._place, nbytes, 2 * nbytes if following.plan.is_dear else -1)
        return following.plan

    def _missed(self, plan: RebuildPlan | None) -> str | None:
        """That the budget, the peak or the limit is out of reach, if it is."""
        goal = self._settings.goal
        if goal is None or self._freed_within:
            return None
        if goal.limit is not None:
            return reasons.of_limit(self._limit, 0 if self._recorded is None else self._recorded.missed)
        if plan is not None:
            return None if plan.chosen.reached else reasons.out_of_reach(goal, plan.chosen)
        kept, stock = self.ledger.kept(), self.ledger.all_bytes()
        ratio = kept / max(stock, 1)
        missed = goal.budget is not None and ratio > _NEARLY * goal.budget
        return reasons.budget_out_of_reach(goal.budget or 0.0, ratio) if missed else None

    def tells_why(self, plan: RebuildPlan | None) -> bool:
        """Is it told why operations' outputs are held? Not where a plan holds as much as was asked for, nor
        of the little that a backward pass has left."""
        return not self._freed_within and (self._settings.goal is None or self._missed(plan) is not None)

    def reasons(self, plan: RebuildPlan | None) -> list[str]:
        """Why nothing, or less than asked, was saved: first the causes that concern the whole pass."""
        counts: Counter[str] = Counter() if self._looking is None else self._looking.reasons
        whole = [reason for reason in counts if reason in reasons.OF_THE_PASS]
        if self.refused is not None:
            whole.append(self.refused)
        if self._freed_within:
            unplanned = self._settings.goal is not None
            whole.append(reasons.BACKWARD_BEFORE_PLAN if unplanned else reasons.BACKWARD_WITHIN)
        if self._set is not None and self._set.stepped_aside:
            whole.append(reasons.TRANSFORMED_WITHIN)
        seen_by_small = self._small is not None and self._small.kept
        seen = seen_by_small or (self._looking is not None and self._looking.seen)
        if not (seen or whole) and torch.is_grad_enabled():
            whole.append(reasons.NOTHING)
        if seen_by_small and self._looking is None:
            whole.append(reasons.SMALL if self._settings.goal is None else reasons.DEAR)
        elif plan is not None and plan.is_dear:
            whole.append(reasons.dear(plan.hooks, plan.asked or 0.0))
        goal = self._settings.goal
        peak = None if goal is None or plan is None else reasons.of_peak(goal, plan)
        whole += [reason for reason in (self._missed(plan), self._of_plans, peak) if reason is not None]
        of_tensors = [
            f"{count} tensors: {reason}" if count > 1 else reason
            for reason, count in counts.items()
            if reason not in reasons.OF_THE_PASS
        ]
        return whole + of_tensors


def _refusal() -> str | None:
    """Why no hooks may be set here, or None. Hooks that are already set (offloading, checkpointing) win."""
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return reasons.TRANSFORMED
    if recording():  # a saved tensor that hooks have had is detached in the graph
        return reasons.TRACED
    return reasons.HOOKS_AROUND if _others_hooks() else None


def _no_head() -> str | None:
    """Why logits may not wait until they are read."""
    if _others_hooks():
        return reasons.HEAD_IN_HOOKS
    return reasons.HEAD_OF_UNITS if Units().exist else None


def _others_hooks() -> bool:
    """Are the hooks that are set now another's?"""
    top: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and top[1] not in (unpack, getattr(NODES, "record_unpack", unpack))
