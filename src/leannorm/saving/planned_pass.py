"""A recorded pass with a goal: which plan it follows, and what its log gives for the next plan."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial
from typing import Any

import torch

from leannorm.saving import cpp_log, host, reasons
from leannorm.saving.plan import Call, Pass, Taken
from leannorm.saving.plans import Following
from leannorm.saving.policy import Answer
from leannorm.saving.rates import Rates, of_table_alone, rates_for
from leannorm.saving.reasons import Cause, Why
from leannorm.saving.timeline import Timeline


class PlannedPass:
    """How one pass follows a plan. `in_cpp`: whether C++ records it, and follows a plan by itself. `moves`:
    what the pass moves to the host. `told`: gets reasons."""

    def __init__(
        self, following: Following, in_cpp: bool, moves: host.Moves | None, told: Counter[str]
    ) -> None:
        self.following, self._in_cpp, self._told = following, in_cpp, told
        # whether a cast may be kept in its source's dtype instead of another value: no price counts that time
        self._narrows = in_cpp and not following.goal.promises_time
        self._moves, self.moves = moves, moves is not None  # whether the plan chooses what is moved
        self._calls: list[Call] = []

    def ask(self, place: int, call: Call) -> Answer:
        """What happens to the tensor that is saved now, at this place."""
        try:
            following, calls = self.following, self.calls(place)
            calls.append(call)
            drops, plan = following.rebuilds(calls), following.plan
            moves, takes = (True, ()) if plan is None else (plan.move[place], plan.take[place])
            return Answer(drops, moves, following.why(place), takes, following.decides, self._followed())
        except Exception:  # a plan is never worth an error in the forward pass
            return Answer(True, True)

    def renew(self, ended: Any) -> None:
        """End a step whose saved tensors a backward pass has freed, and begin another one in the pass."""
        saved, moved = ended.saved(), 0 if self._moves is None else self._moves.nbytes_then
        why = self.end(ended, ended.timeline(), (saved.held - moved) / max(saved.held + saved.dropped, 1))
        self._told.update([] if why is None else [why])
        self.following, self._calls = self.following.for_another_step(), []

    def end(self, ended: Any, timeline: tuple[Any, ...], share: float) -> str | None:
        """Give a step to the plans: the log's pass `ended`, its `timeline`, and the `share` of bytes that it
        kept. Returns a reason if the step is not as planned."""
        try:
            calls, read = self.calls(ended.places), partial(self._passed, ended, timeline)
            return self.following.end(calls, read, share, ended.seconds, ended.spent)
        except Exception as error:  # a plan is never worth an error in the forward pass
            self._told[reasons.no_plan(error)] = 1
            return None

    def calls(self, count: int) -> list[Call]:
        """The tensors that the pass saved at the first `count` places. The log did not ask for those that
        were as planned."""
        if len(self._calls) < count:
            assert self.following.plan is not None
            self._calls += self.following.plan.made_for.calls[len(self._calls) : count]
        return self._calls

    def _followed(self) -> Any:
        """The plan in the form that C++ reads."""
        entry = self.following.entry
        if entry is None or not self._in_cpp:
            return None
        if entry.places is None:
            plan = entry.plan
            causes = [self.following.why(place) for place in range(len(plan.rebuild))]
            whys, of = [int(cause.why) for cause in causes], [cause.of for cause in causes]
            drops, moves = list(plan.rebuild), list(plan.move)
            takes = [list(one) for one in plan.take]
            entry.places = cpp_log.Places(plan.made_for.calls, drops, moves, whys, of, takes)
        return entry.places

    def _passed(self, ended: Any, timeline: tuple[Any, ...]) -> Pass:
        """The step, to make a plan from. Its prices are the times of its calls, or on devices other than CPUs
        what rates say."""
        device = torch.device(ended.device)
        rates, why = rates_for(self.following.goal, device)
        if why is not None:
            self._told[why] = 1
        known = device.type == "cpu" and not of_table_alone()
        taken = [one for _, one in ended.seconds()] if known else []
        may_move = self.moves and host.link_of(device) is not None
        return self._priced(timeline, rates, tuple(self._calls), taken, may_move)

    def _priced(
        self,
        told: tuple[Any, ...],
        rates: Rates,
        calls: tuple[Call, ...],
        seconds: list[float],
        may_move: bool,
    ) -> Pass:
        codes, link = self.following.goal.peak is None, rates.link if may_move else 0.0
        timeline = Timeline(told, rates, self._narrows, seconds, codes, link)
        lines, places, pieces = timeline.lines()
        kept = ((place, timeline.values[value]) for place, value, _ in timeline.saves if place >= 0)
        causes = {place: value.cause for place, value in kept if not value.makes}
        whys = {place: Cause(Why(why), of) for place, (why, of) in causes.items() if why}

        def again(seen: Taken) -> Pass | None:
            """At the prices of the same calls in another pass."""
            if not seconds:
                return None
            later = defaultdict[str, list[float]](list)
            for name, one in reversed(seen[: len(timeline.calls)]):
                later[name].append(one)
            least = [
                min(before, later[call.name].pop()) if later[call.name] else before
                for before, call in zip(seconds, timeline.calls, strict=False)
            ]
            return self._priced(told, rates, calls, least, may_move)

        hooks = rates.hold * len(timeline.saves)
        return Pass(calls, lines, places, pieces, hooks=hooks, whys=whys, again=again)
