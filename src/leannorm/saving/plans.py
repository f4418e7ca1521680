"""All plans of this process, and which of them a forward pass follows, by what it has saved so far."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

from leannorm.planning.goal import Goal
from leannorm.planning.loop import Loop
from leannorm.saving import reasons
from leannorm.saving.alike import Alike
from leannorm.saving.plan import Call, Pass, RebuildPlan, Taken, plan, rungs, size, structure
from leannorm.saving.reasons import Cause, Why

_PLANNED = Cause(Why.PLANNED)
_MAX_PLANS = 256
_ANEW = 16  # passes until a plan is made again, as a later pass may rebuild what the first could not
_MORE = 4  # after each of these plans, this many times as many passes until the next
_TRIES = 3  # passes without a plan, since one that no plan fitted may come again only after others
_SELDOM = 32  # passes for each step that making a further plan takes
_MOST_EQUAL = 16  # passes like the one before them after which a plan is made, however long that takes
_PER_VALUE = 5e-4  # seconds: making a plan takes about as many for each value of the step
_NEAR = 0.75, 4 / 3  # between so many times the sizes that a plan was made for, its choice is still good
_PROMISED = 1.05, 0.02  # factor and addend of the planned share: a pass that keeps more has missed its plan
_MISSES = 2
_MOST_FOLLOWS = 8  # a plan whose passes all have other sizes stays at its first prices
_LEAST_SHARE = 0.01  # of a step: rebuilds that take less do not show how wrong their prices are
_WRONG = 4.0  # how many times too high or low prices may be; beyond that the measurement was disturbed
_STEPS = 3  # measured steps: one of them may have waited for something else


class Spent(Protocol):
    """What the step of a pass has taken."""

    def shares(self) -> tuple[float, float] | None:
        """The times of its rebuilds and of recording, as shares of the rest of the step; None if they are
        not known."""


@dataclass
class _Made:
    """What all plans that were made from one pass share. `calls`: the calls of that pass.

    `settled`: whether the plans keep to a budget or a peak, as a pass without a plan might not. `anew`: the
    number of passes until other plans are made. `follows`: how many passes followed these plans. `misses`:
    how many of them kept more than planned; `missed`: whether the last one did. `rungs`: the plans for all
    overheads, if steps are measured; `loop` chooses one. `again`: as in `Pass`, until a second pass has given
    its prices, since the first calls of a process take longer. `priced`: the pass at these prices, until some
    steps that follow its plan have ended. `spent`: what the last such step took, and its planned overhead.
    `times`: for each such step, how many times the planned overhead its rebuilds took. `recording`: the share
    of each that recording took.
    """

    calls: tuple[Call, ...]
    anew: int
    settled: bool = False
    follows: int = 0
    misses: int = 0
    missed: bool = False
    rungs: tuple[RebuildPlan, ...] = ()
    again: Callable[[Taken], Pass | None] | None = None
    priced: Pass | None = None
    spent: tuple[Spent | None, float] = None, 0.0
    times: list[float] = field(default_factory=list)
    recording: list[float] = field(default_factory=list)
    loop: Loop | None = None

    def rung(self) -> RebuildPlan | None:
        """The plan that the loop chooses now."""
        if self.loop is None or not self.rungs:
            return None
        at = bisect_right(self.rungs, self.loop.at + 1e-9, key=lambda one: one.chosen.overhead)
        return self.rungs[max(at - 1, 0)]

    @property
    def is_old(self) -> bool:
        """Whether another plan is to be made."""
        stays = self.settled and not self.misses
        return self.missed or (self.follows >= self.anew and not stays)


@dataclass(eq=False)
class _Entry:
    """A plan for tensors of certain sizes. `next`: the plan of the pass that came after the last one
    to follow this plan. `places`: the plan as C++ reads it.
    """

    plan: RebuildPlan
    made: _Made
    next: _Entry | None = None
    places: Any = None

    def turn(self) -> None:
        """Replace the plan by the one that the loop chooses now."""
        rung = self.made.rung()
        if rung is not None and rung.chosen is not self.plan.chosen:
            self.plan, self.places = rung._replace(made_for=self.plan.made_for), None

    def begins_with(self, calls: tuple[Call, ...]) -> bool:
        """Whether a pass of this plan begins with exactly these calls, in these sizes."""
        return self.plan.made_for.calls[: len(calls)] == calls


@dataclass
class _Known:
    """The plans of passes with similar first tensors. `whole`: how many passes will follow no plan, so that
    one can be made from them. `wholes`, `seen`: how many passes there were of that kind, and in all. `dear`:
    the steps that making a plan takes. `stray`: the last pass that no plan fitted, and `equal` how many there
    were like it in a row. `varies`: whether it has missed the goal, as it followed the plan of another one;
    then `Alike` decides in the next ones from their first tensor on.
    """

    entries: list[_Entry] = field(default_factory=list)
    whole: int = 0
    wholes: int = 0
    seen: int = 0
    dear: float = 1.0
    stray: tuple[Call, ...] = ()
    equal: int = 0
    varies: bool = False
    strays: int = 0  # passes in a row that no plan fitted
    last: _Entry | None = None

    def begins(self) -> bool:
        """Note that a pass begins; returns whether it follows no plan, so that one is made from it."""
        self.seen, self.wholes = self.seen + 1, self.wholes + bool(self.whole)
        return self.whole > 0

    def strayed(self, calls: tuple[Call, ...], missed: bool) -> None:
        """Note that no plan fitted a pass, and whether it `missed` the goal."""
        self.last, self.strays, self.varies = None, self.strays + 1, self.varies or missed
        self.equal, self.stray = self.equal + 1 if calls == self.stray else 0, calls
        few = self.wholes * self.dear <= self.seen / _SELDOM + _TRIES
        by_turn = few and self.strays.bit_count() == 1  # the 1st, 2nd, 4th ...: sizes may never repeat
        if by_turn or self.equal >= min(self.dear, _MOST_EQUAL):
            self.whole = _TRIES

    def ended(self, entry: _Entry) -> None:
        """Note that a pass followed this plan."""
        if self.last is not None:
            self.last.next = entry
        self.last, self.varies = entry, False

    def in_sizes_of(self, calls: tuple[Call, ...], made: _Made) -> _Entry | None:
        """The plan of `made` for exactly the sizes of these calls, if there is one."""
        return next((one for one in self.entries if one.made is made and one.begins_with(calls)), None)


KNOWN: dict[tuple[Goal, Hashable, Hashable], _Known] = {}
"""The plans, by place and the structure of the first tensor."""


class Following:
    """One pass, which follows a plan as long as its tensors are those of the plan's pass, in about its sizes.

    A plan for the same sizes is preferred. If no plan fits any more, `Alike` decides by the plan that the
    pass has followed; if a peak was asked for, all is rebuilt that can be. A later pass follows no plan,
    so that one is made from it; so does the next one after a pass that kept more than planned.
    """

    def __init__(self, goal: Goal, place: Hashable = None) -> None:
        """`place`: identifies the passes whose steps are measured together; None: steps are not measured."""
        self.goal, self._place = goal, place
        self.plan: RebuildPlan | None = None
        self.entry: _Entry | None = None  # the plan that is followed now
        self._sized = False
        self._old: _Made | None = None  # the plans that this pass replaces, so that it follows none
        self.whole = True  # whether the pass followed no plan from its first tensor on
        self._strayed = False  # whether no plan fitted any more
        self._alike: Alike | None = None  # then, unless a peak was asked for
        self._most = 1.0  # then, the share of the bytes to keep: the budget, or more if the plan could not
        self._began_as_another = False  # whether its first tensors followed another pass's plan

    def for_another_step(self) -> Following:
        """A new `Following` for another step of the same pass."""
        return Following(self.goal, self._place)

    def rebuilds(self, calls: Sequence[Call]) -> bool:
        """Whether the tensor that was packed last may be rebuilt. `calls`: all of the pass so far."""
        last, entry = len(calls) - 1, self.entry
        if not last:
            known = self._known(calls)
            best = None if known.begins() else self._best(known, calls)
            self._old = best.made if best is not None and best.made.is_old else None
            if best is not None and known.varies:
                self._stray(best, ())
            self._follow(None if self._old is not None or self._strayed else best)
            self.whole = self.plan is None and not self._strayed
        elif entry is not None and not self._fits(entry, calls, last):
            known, self._began_as_another = self._known(calls), True
            self._follow(self._best(known, calls))
            if self.entry is None:
                self._stray(entry, calls[:-1])
        elif entry is not None and not self._sized and entry.plan.made_for.calls[last] != calls[last]:
            self._sized = True  # a plan of these sizes is searched for only once
            self._follow(self._known(calls).in_sizes_of(tuple(calls), entry.made) or entry)
        if self._alike is not None:
            return self._alike.rebuilds(calls[last])
        return self.plan is None or self.plan.rebuild[last]

    @property
    def decides(self) -> bool:
        """Whether a plan decides on the tensor that was packed last, not only what can be rebuilt."""
        return self.plan is not None or self._alike is not None

    def why(self, place: int) -> Cause:
        """Why a tensor is kept that the plan does not rebuild."""
        return _PLANNED if self.plan is None else self.plan.made_for.whys.get(place, _PLANNED)

    def end(
        self,
        calls: Sequence[Call],
        read: Callable[[], Pass],
        share: float,
        seconds: Callable[[], Taken],
        spent: Spent | None = None,
    ) -> str | None:
        """Make a plan from a pass that followed none, or note which one it followed; a reason, if it missed.

        `calls`: all of the pass. `read()`: its sizes and prices, which take time to compute. `share`: what it
        kept of plain PyTorch's bytes. `seconds()`: what the calls of its log took. `spent`: what its step is
        going to take.
        """
        if not calls:
            return None
        known, entry = self._known(calls), self.entry
        missed = False
        if entry is not None and len(entry.made.calls) != len(calls):
            self._stray(entry)
            missed = self.goal.peak is not None  # whether the pass kept to that is not known
        if self._strayed:
            missed = missed or _exceeds(share, self._most)
            self._follow(None)
            known.strayed(tuple(calls), missed)
            if self.goal.budget is not None:
                return reasons.BEGAN_AS_ANOTHER if missed else None
        elif entry is not None:
            why = self._followed(known, entry, tuple(calls), share)
            if entry.made.calls == tuple(calls) == entry.plan.made_for.calls:
                self._price_again(entry, seconds, spent)
            elif entry.made.follows >= _MOST_FOLLOWS:
                entry.made.again = None
            return why
        elif self.whole:
            self._make(known, tuple(calls), read)
        return reasons.STRAYED if self._strayed else None

    def _followed(self, known: _Known, entry: _Entry, calls: tuple[Call, ...], share: float) -> str | None:
        made, ratio = entry.made, entry.plan.ratio
        made.follows += 1
        told = None
        if _exceeds(share, ratio) and not entry.plan.is_dear:
            if self._began_as_another:
                told = reasons.BEGAN_AS_ANOTHER
            elif made.calls != calls:  # these sizes need a plan of their own
                known.whole = max(known.whole, 1)
            else:
                made.misses += 1
                made.missed = made.misses <= _MISSES
                told = reasons.missed(share, ratio, made.missed)
        elif entry.plan.made_for.calls != calls:  # from now on C++ may follow it in these sizes
            there = known.in_sizes_of(calls, made)
            if there is None:
                sized = entry.plan._replace(made_for=entry.plan.made_for._replace(calls=calls))
                there = self._add(known, _Entry(sized, made))
            entry = there
        known.ended(entry)
        known.strays = 0
        return told

    def _price_again(self, entry: _Entry, seconds: Callable[[], Taken], spent: Spent | None) -> None:
        """Correct the prices of a new plan. The first pass that follows it shows what calls take when they
        are not the first of the process. The next ones show, when they have ended, which share of their steps
        the rebuilds take."""
        made = entry.made
        if made.again is not None:
            made.priced, made.again = made.again(seconds()), None
            if made.priced is not None:
                self._choose(entry, made.priced)
            return
        if made.priced is None:
            return
        planned = entry.plan.chosen.overhead / (median(made.times) if made.times else 1.0)
        (last, of_last), made.spent = made.spent, (spent, planned)
        shares = None if last is None else last.shares()
        if shares is not None and of_last >= _LEAST_SHARE:
            made.times.append(min(max(shares[0] / of_last, 1 / _WRONG), _WRONG))
            made.recording.append(shares[1])
            passed = made.priced.rebuilding_in(median(made.times))
            self._choose(entry, passed._replace(recording=median(made.recording)))
        if planned < _LEAST_SHARE or len(made.times) == _STEPS:
            made.priced, made.spent = None, (None, 0.0)

    def _choose(self, entry: _Entry, passed: Pass) -> None:
        """Choose another plan for the entry, from the same pass at other prices."""
        full = plan(self.goal, passed)
        entry.made.settled = full.chosen.reached and not self.goal.promises_time
        entry.plan, entry.places = full._replace(made_for=full.made_for.without_lines()), None

    def _make(self, known: _Known, calls: tuple[Call, ...], read: Callable[[], Pass]) -> None:
        known.whole = max(known.whole - 1, 0)
        before = next((one for one in known.entries if one.plan.made_for.calls == calls), None)
        if before is not None and not before.made.is_old:
            known.ended(before)
            return  # this pass has a plan: `whole` waits for one that has none
        passed = read()
        if not passed.lines.stock.held:
            return
        old = before.made if before is not None and before.made.calls == calls else self._old
        made = _Made(calls, _ANEW)
        if old is not None and self._near(old.calls, calls):
            made.anew, made.misses = old.anew * (1 if old.missed else _MORE), old.misses
            known.entries = [one for one in known.entries if one.made is not old]
        step = passed.lines.step
        known.dear = max(1.0, _PER_VALUE * len(step.values) / max(step.seconds, 1e-9))
        full = plan(self.goal, passed)
        made.settled = full.chosen.reached and not self.goal.promises_time
        made.again = passed.again if self._place is None else None
        if self._place is not None:
            made.loop = Loop(self.goal.overhead or 0.0) if old is None or old.loop is None else old.loop
            made.rungs = rungs(full)
            made.loop.take([one.chosen.overhead for one in made.rungs], full.chosen.overhead)
            full = (made.rung() or full)._replace(made_for=full.made_for)
        entry = self._add(known, _Entry(full._replace(made_for=full.made_for.without_lines()), made))
        known.whole = 0
        known.ended(entry)
        self.entry, self.plan = entry, full

    def _add(self, known: _Known, entry: _Entry) -> _Entry:
        known.entries.insert(0, entry)
        if sum(len(one.entries) for one in KNOWN.values()) > _MAX_PLANS:  # sizes that never repeat
            most = max(KNOWN.values(), key=lambda one: len(one.entries))
            most.entries.pop()
        return entry

    def _stray(self, entry: _Entry, calls: Sequence[Call] | None = None) -> None:
        """Note that no plan fits the pass, which has followed this one: for these calls, if it goes on."""
        self._strayed = True
        if self.goal.budget is not None:
            self._most = max(self.goal.budget, entry.plan.ratio)
        if calls is not None and self.goal.peak is None:
            self._alike = Alike(entry.plan, calls, self._most)

    def _follow(self, entry: _Entry | None) -> None:
        if entry is not None:
            entry.turn()
        self.entry, self.plan = entry, None if entry is None else entry.plan

    @property
    def loop(self) -> Loop | None:
        """The loop that chooses among the plans of this pass by the time that steps take."""
        return None if self.entry is None else self.entry.made.loop

    def _known(self, calls: Sequence[Call]) -> _Known:
        if len(KNOWN) > _MAX_PLANS:
            KNOWN.clear()
        return KNOWN.setdefault((self.goal, self._place, structure(calls[0])), _Known())

    def _best(self, known: _Known, calls: Sequence[Call]) -> _Entry | None:
        """The first plan that fits so far: if possible for the same sizes, else the one that came next
        when passes alternated before."""
        fitting = [one for one in known.entries if self._fits(one, calls, 0)]
        if known.last is not None and known.last.next in fitting:
            fitting.insert(0, known.last.next)
        so_far = tuple(calls)
        equal = (one for one in fitting if one.begins_with(so_far))
        return next(equal, fitting[0] if fitting else None)

    def _fits(self, entry: _Entry, calls: Sequence[Call], first: int) -> bool:
        """Whether the calls from `first` on are those of the plan's pass, in about its sizes."""
        planned = entry.made.calls
        return len(planned) >= len(calls) and self._near(planned[first : len(calls)], calls[first:])

    def _near(self, planned: Sequence[Call], calls: Sequence[Call]) -> bool:
        if len(planned) != len(calls):
            return False
        return all(a == b or self._is_near(a, b) for a, b in zip(planned, calls, strict=True))

    def _is_near(self, planned: Call, call: Call) -> bool:
        most = 1.0 if isinstance(self.goal.peak, int) else _NEAR[1]  # a peak in bytes allows no larger sizes
        return (
            structure(planned) == structure(call) and _NEAR[0] <= size(call) / max(size(planned), 1) <= most
        )


def _exceeds(share: float, promised: float) -> bool:
    """Whether a pass that keeps this share of its bytes has missed the promised one."""
    return share > _PROMISED[0] * promised + _PROMISED[1]
