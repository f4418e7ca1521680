"""A recorded pass with a goal: which plan it follows, and what its log gives for the next plan."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial
from typing import Any

import torch

from leannorm.saving import cpp_log, host, reasons
from leannorm.saving.plan import Call, Pass, Taken
from leannorm.saving.plans import Following
from leannorm.saving.rates import Rates, of_table_alone, rates_for
from leannorm.saving.reasons import NO_CAUSE, Cause, Why
from leannorm.saving.timeline import Timeline


class PlannedPass:
    """How one pass follows a plan. `narrows`: whether the log can keep a log-softmax's narrower source
    instead, for which a promised time has no price. `moves`: what the pass moves to the host."""

    def __init__(self, following: Following, narrows: bool, moves: host.Moves | None) -> None:
        self.following, self.narrows = following, narrows and not following.goal.promises_time
        self._moves, self.moves = moves, moves is not None  # whether the plan chooses what is moved
        self._calls: list[Call] = []
        self.reasons = Counter[str]()

    def drops(self, call: Call) -> tuple[bool, bool, Cause]:
        """Whether the tensor that is saved now may be dropped; if kept, whether it is moved, and why."""
        try:
            return self._drops(call)
        except Exception:  # a plan is never worth an error in the forward pass
            return True, True, NO_CAUSE

    def ask(self, place: int, call: Call) -> tuple[bool, Any, int, str, bool]:
        """The same for the tensor at this place, for C++, which then follows a plan by itself: the plan from
        here on stands second, and whether the tensor is moved last."""
        try:
            self._reach(place)
            drops, moves, (why, of) = self._drops(call)
            return drops, self._followed(), int(why), of, moves
        except Exception:
            return True, None, 0, "", True

    def _drops(self, call: Call) -> tuple[bool, bool, Cause]:
        following, place = self.following, len(self._calls)
        self._calls.append(call)
        drops = following.rebuilds(self._calls)
        moves = following.plan is None or following.plan.move[place]
        return drops, moves, following.why(place)

    def renew(self, kept: int, rebuilt: int, places: int, timeline: Any, seconds: Taken, device: str) -> None:
        """End a step whose saved tensors a backward pass has freed, and begin another one in the pass."""
        following = self.following
        try:
            read = partial(self.passed, timeline, seconds, places, self.reasons, torch.device(device))
            moved = 0 if self._moves is None else self._moves.nbytes_then
            share = (kept - moved) / max(kept + rebuilt, 1)
            why = following.end(self.calls(places), read, share, lambda: seconds)
            self.reasons.update([] if why is None else [why])
        except Exception as error:  # a plan is never worth an error in the forward pass
            self.reasons[reasons.no_plan(error)] = 1
        self.following, self._calls = following.for_another_step(), []

    def calls(self, count: int) -> list[Call]:
        """All that the pass saved: `count` tensors with a place."""
        self._reach(count)
        return self._calls

    def _reach(self, place: int) -> None:
        """Add the calls since the log asked last, which were as planned."""
        if len(self._calls) < place:
            assert self.following.plan is not None
            self._calls += self.following.plan.made_for.calls[len(self._calls) : place]

    def _followed(self) -> Any:
        """The plan in the form that C++ reads."""
        entry = self.following.entry
        if entry is not None and entry.places is None:
            plan = entry.plan
            causes = [self.following.why(place) for place in range(len(plan.rebuild))]
            whys, of = [int(cause.why) for cause in causes], [cause.of for cause in causes]
            drops, moves = list(plan.rebuild), list(plan.move)
            entry.places = cpp_log.Places(plan.made_for.calls, drops, moves, whys, of)
        return None if entry is None else entry.places

    def passed(
        self,
        told: tuple[Any, ...],
        seconds: Taken,
        count: int,
        said: Counter[str],
        device: torch.device,
    ) -> Pass:
        """The pass that ends now, from its log `told`, to make a plan from. Its prices are what its calls
        took, or on other devices than CPUs their rates."""
        rates, why = rates_for(self.following.goal, device)
        if why is not None:
            said[why] = 1
        calls = tuple(self.calls(count))
        known = device.type == "cpu" and not of_table_alone()
        taken = [one for _, one in seconds] if known else []
        may_move = self.moves and host.link_of(device) is not None
        return self._priced(told, rates, calls, taken, may_move)

    def _priced(
        self,
        told: tuple[Any, ...],
        rates: Rates,
        calls: tuple[Call, ...],
        seconds: list[float],
        may_move: bool,
    ) -> Pass:
        codes, link = self.following.goal.peak is None, rates.link if may_move else 0.0
        timeline = Timeline(told, rates, self.narrows, seconds, codes, link)
        lines, places = timeline.lines()
        kept = ((place, timeline.values[value]) for place, value, _ in timeline.saves if place >= 0)
        whys = {
            place: Cause(Why(value.why), value.of) for place, value in kept if value.why and not value.makes
        }

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
        return Pass(calls, lines, places, hooks=hooks, whys=whys, again=again)
