"""The log of a pass as the step that the planner reads: when everything is made, read and freed.

Each call is a moment of the forward pass and, in reverse order, one of the backward pass. Memory is alive
from the call that made it until the log saw that it was gone. A gradient is alive from the moment of its
value's last reader, which comes first in the backward pass, to that of the call that made the value.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from leannorm.planning.lines import Lines
from leannorm.planning.outcome import of_stock
from leannorm.planning.timeline import Moment, Step
from leannorm.planning.timeline import Value as Planned
from leannorm.saving.gradients import Gradients
from leannorm.saving.logged import UNKNOWN, WANTS, Call, Read, Value
from leannorm.saving.pieces import Pieces
from leannorm.saving.rates import Rates
from leannorm.saving.unbuilt import MAY_WAIT, READ_ROWS

# the time of a batch norm with given statistics, as a share of that with its own: torch's, ours
_NORMALIZES = {"aten": 0.35, "leannorm": 0.7}
_PASSES = 2.5  # how often a step moves a call's arguments and results: once forward, the rest backward


class Timeline:
    """One pass, and its backward pass."""

    def __init__(
        self,
        told: tuple[Any, ...],
        rates: Rates,
        narrows: bool = False,
        seconds: Sequence[float] = (),
        codes: bool = True,
        link: float = 0.0,
    ) -> None:
        """`narrows`: whether a cast may be kept in its source's dtype instead of what is made of it.
        `seconds`: what each call took; none on a device that runs behind its host. `codes`: whether what is
        kept counts in the fewer bytes that it gets some time later. `link`: bytes per second to the host; 0
        if nothing is moved there."""
        # by memory, the first call without it in the program; the bytes that the log cannot read
        calls, values, self.saves, self._died, self._others = told
        self.calls = [Call(*call)._replace(reads=[Read(*read) for read in call[4]]) for call in calls]
        whole = [Value(*value) for value in values]
        self.values = whole if codes else [value._replace(coded=value.storage) for value in whole]
        self.rates, self._link = rates, link
        self.taken = [*seconds[: len(self.calls)], *[0.0] * (len(self.calls) - len(seconds))]
        self.forward = max(len(self.calls), 1)
        self.born: dict[int, int] = {}  # by memory, the call that made it; -1 if it was there before
        self.size: dict[int, int] = defaultdict(int)
        for value in self.values:
            self.born.setdefault(value.memory, value.call)
            self.size[value.memory] = max(self.size[value.memory], value.storage)
        self.read_last, self.read_first = dict[int, int](), dict[int, int]()
        for number, call in enumerate(self.calls):
            for read in call.reads:
                self.read_last[read.value] = number
                self.read_first.setdefault(read.value, number)
        self.pieces = Pieces(self, narrows)

    def mirrored(self, call: int) -> int:
        """The moment of a call's backward pass; for -1, memory that was there before, the last moment."""
        return 2 * self.forward - 1 - max(call, 0)

    @cached_property
    def until(self) -> dict[int, int]:
        """By memory, the last moment of the forward pass at which the program has it."""
        until = dict[int, int]()
        for i, value in enumerate(self.values):
            last = max(self.read_last.get(i, 0), value.call)
            until[value.memory] = max(until.get(value.memory, 0), last)
        for memory, last in until.items():
            died = self._died[memory]
            if died != UNKNOWN:
                until[memory] = max(last, died - 1 if died >= 0 else self.forward - 1)
        return until

    @cached_property
    def wanted(self) -> set[int]:
        """The values that get a gradient. Within a user's `autograd.Function` autograd is off, so what its
        calls make on the way counts, too."""
        wanted = {i for i, value in enumerate(self.values) if value.gradient & WANTS}
        for call in reversed(self.calls):
            if not call.grad_mode and any(out in wanted for out in call.outs):
                wanted |= {read.value for read in call.reads if self.values[read.value].is_floating}
        return wanted

    def differentiated(self, call: Call) -> list[Read]:
        """The arguments that get a gradient from this call."""
        if not any(out in self.wanted for out in call.outs):
            return []
        return [r for r in call.reads if r.wants or (not call.grad_mode and r.value in self.wanted)]

    # ------------------------------------------------------------ prices

    def price_of(self, value: Value) -> float:
        """Seconds that a rebuild takes to make this value's call again: what it took, if that is known."""
        read = sum(self.values[i].nbytes for i in value.inputs if i != value.follows)
        if value.follows >= 0:
            return self.slower * read / self.rates.memory
        by_result = self.is_by_result(value)
        if self.taken[value.call] > 0:
            space = self.calls[value.call].name.partition("::")[0]
            return self.taken[value.call] * (_NORMALIZES[space] if by_result else 1.0)
        return self.slower * self._by_rates(self.calls[value.call], read, not by_result)

    def is_by_result(self, value: Value) -> bool:
        """Whether it is rebuilt from other results of its call."""
        return any(i in self.calls[value.call].outs for i in value.inputs)

    def _by_rates(self, call: Call, read: int, computes: bool = True) -> float:
        """Seconds of a call that reads so many bytes, by the rates of the device."""
        rate, written = self.rates, sum(self.values[i].nbytes for i in call.outs)
        seconds = rate.call + (written + read) / rate.memory
        if call.operations and computes:
            seconds += call.operations / rate.operations(self.values[call.outs[0]].itemsize, call.groups)
        return seconds

    def _of_forward(self, call: Call) -> float:
        return self._by_rates(call, sum(read.nbytes for read in call.reads))

    @cached_property
    def slower(self) -> float:
        """How many times as long as by the rates it takes to move bytes. A norm moves them several times."""
        norms = {value.call for value in self.values if value.makes and self.is_by_result(value)}
        calls = enumerate(self.calls)
        moving = [i for i, call in calls if self.taken[i] > 0 and not call.operations and i not in norms]
        by_rates = sum(self._of_forward(self.calls[i]) for i in moving)
        return sum(self.taken[i] for i in moving) / by_rates if moving else 1.0

    @cached_property
    def seconds(self) -> float:
        """The price of the step without a plan."""
        return sum(map(self._of_both, range(len(self.calls))))

    def _of_both(self, number: int) -> float:
        """Seconds of a call and of its backward pass; 0 if it has none."""
        call, rate = self.calls[number], self.rates
        gets = self.differentiated(call)
        if not gets:
            return 0.0
        factors = [read for read in call.reads if read.nbytes and self.values[read.value].is_floating]
        first = 1 if len(factors) == 3 and call.groups == 0 else 0  # skips what is added to a product
        frozen = any(read not in gets for read in factors[first : first + 2])
        item = self.values[call.outs[0]].itemsize
        seconds = (2 if frozen else 3) * call.operations / rate.operations(item, call.groups)
        moved = sum(read.nbytes for read in gets) + sum(self.values[i].nbytes for i in call.outs)
        seconds += 2 * rate.call + _PASSES * moved / rate.memory
        if self.taken[number] > 0:  # the backward pass takes as much longer as the forward pass did
            seconds *= self.taken[number] / self._of_forward(call)
        return seconds

    def _of_moments(self) -> list[float]:
        """Seconds of each moment of both passes, behind which copies are hidden."""
        seconds = [0.0] * (2 * self.forward)
        for number, call in enumerate(self.calls):
            seconds[number] = self.taken[number] or self._of_forward(call)
            seconds[self.mirrored(number)] = max(self._of_both(number) - seconds[number], 0.0)
        return seconds

    # ------------------------------------------------------------ memory other than the values

    @cached_property
    def memory(self) -> list[int]:
        """Bytes alive at each moment: results of the forward pass, gradients, and what their kernels need."""
        change = [0] * (2 * self.forward + 1)
        for size, first, last in [*self._outputs(), *Gradients(self).spans()]:
            change[first] += size
            change[max(last, first) + 1] -= size
        return list(accumulate(change[:-1]))

    def _outputs(self) -> Iterator[tuple[int, int, int]]:
        for memory, born in self.born.items():
            if born >= 0:
                yield self.size[memory], born, self.until[memory]

    # ------------------------------------------------------------ the step

    @cached_property
    def in_rows(self) -> set[int]:
        """The log-softmaxes that the backward pass, if it makes them again, makes some rows at a time."""
        whole = {i for value in self.values if value.makes for i in value.inputs}
        whole |= {value for _, value, call in self.saves if self.calls[call].name not in READ_ROWS}
        return {i for i, value in enumerate(self.values) if value.in_rows and value.makes and i not in whole}

    @cached_property
    def fused(self) -> set[int]:
        """Values that their only reader computes: casts in front of such a log-softmax, and what is made in
        one call with a norm."""
        users = Counter([value for _, value, _ in self.saves])
        users.update(i for value in self.values if value.makes for i in value.inputs)
        sources = (i for one in self.in_rows for i in self.values[one].inputs)
        casts = {i for i in sources if users[i] == 1 and self.name_of(self.values[i]) == "aten::_to_copy"}
        return casts | {value.follows for value in self.values if value.follows >= 0}

    @cached_property
    def spares(self) -> dict[int, int]:
        """By value, the bytes that its last reader saves if the value is made again only for that reader."""
        last = dict[int, int]()
        for _, value, call in self.saves:
            last[value] = min(last.get(value, call), call)
        waits = (i for i in last if self.values[i].waits and self._may_wait(self.calls[last[i]]))
        spared = {i: self.values[i].nbytes for i in waits if i in self.wanted}
        return spared | {i: self.values[i].nbytes for i in self.in_rows}

    @staticmethod
    def _may_wait(call: Call) -> bool:
        """Whether a stand-in saves memory in the call's backward pass. In a product of factors of two sizes
        it does not, as a gradient there is summed to the size of the smaller factor."""
        return call.name in MAY_WAIT and (
            call.name != "aten::mul" or len({r.nbytes for r in call.reads}) == 1
        )

    def name_of(self, value: Value) -> str:
        """The operator that made it."""
        return self.calls[value.call].name if value.call >= 0 else ""

    def lines(self) -> tuple[Lines, tuple[tuple[int, ...], ...], dict[int, tuple[tuple[int, int], ...]]]:
        """The lines of the step; for each value, the places of tensors in its memory; and `Pass.pieces`."""
        saved, places = {value for _, value, _ in self.saves}, defaultdict[int, set[int]](set)
        ready: dict[int, int] = {}  # by value that may be moved: when it was first saved
        for place, value, call in self.saves:
            places[value].update([place] if place >= 0 else ())
            if place >= 0 and self._link:
                ready.setdefault(value, call)
        index, planned, behind = dict[int, int](), list[Planned](), list[tuple[int, ...]]()
        held = self._others
        wider: dict[int, int] = {}  # what plain PyTorch keeps in more bytes
        runs: dict[int, int] = {}  # by call: a value for the call itself, if it rebuilds several results
        results: dict[int, int] = defaultdict(int)
        for value in self.values:
            results[value.call] += value.makes
        for i in self._in_order():
            value, own = self.values[i], tuple(sorted(places[i]))
            first = self.until[value.memory] + 1 if self.born[value.memory] >= 0 else 0
            is_piece = i in self.pieces.readers
            if is_piece:
                first = self.pieces.kept_from(i, first)
            if not value.makes:
                before = self.born[value.memory] < 0 and not value.copied
                held += value.storage if value.counts and before else 0
                counted = value.counts and not before
                moves = ready.get(i, -1) if counted else -1
                made = Planned(value.coded if counted else 0, None, ready=moves)
            else:
                made_of = tuple(dict.fromkeys(index[s] for s in value.inputs))
                by_result, seconds = self.is_by_result(value), self.price_of(value)
                if results[value.call] > 1 and not by_result:
                    if value.call not in runs:
                        runs[value.call] = len(planned)
                        planned.append(Planned(None, seconds, made_of))
                        behind.append(())
                    seconds, made_of = 0.0, (runs[value.call],)
                seconds += self.rates.rebuild * len(own)
                nbytes = self.pieces.nbytes(i) if is_piece else value.coded if i in saved else None
                in_rows = i in self.in_rows
                made = Planned(
                    nbytes,
                    seconds,
                    made_of,
                    again=0 if in_rows else value.nbytes,
                    fused=i in self.fused,
                    whole=not in_rows and value.follows < 0,
                    spares=self.spares.get(i, 0),
                    ready=ready.get(i, -1),
                )
            if made.nbytes == value.coded:
                wider[len(planned)] = value.storage
            index[i] = len(planned)
            planned.append(made._replace(made=first, until=first - 1))
            behind.append(own)
        reads: dict[int, dict[int, None]] = defaultdict(dict)
        for _, value, call in self.saves:
            reads_no_number = value in self.in_rows and self.calls[call].name != "aten::_log_softmax"
            if value in index and not reads_no_number:
                reads[self.mirrored(call)][index[value]] = None
        backward = [Moment(tuple(reads.get(moment, ()))) for moment in range(self.forward, 2 * self.forward)]
        stock = frozenset(range(len(planned)))
        taken = self._of_moments() if self._link else ()
        times = self.seconds, held, taken, self._link
        step = Step(planned, self.forward, backward, self.memory, stock, *times)
        whole = [value._replace(nbytes=wider.get(i, value.nbytes)) for i, value in enumerate(planned)]
        lines = Lines(step, of_stock(replace(step, values=whole)))
        kept_at = {
            index[i]: tuple((place, position) for user, position in users for place in places[user])
            for i, users in self.pieces.readers.items()
            if i in index
        }
        return lines, tuple(behind), kept_at

    def _in_order(self) -> list[int]:
        """All values that the backward pass needs, each after those that it is made of."""
        order = dict[int, None]()
        left = [i for i, value in enumerate(self.values) if value.needed][::-1]
        while left:
            i = left[-1]
            missing = [s for s in self.values[i].inputs if s not in order] if self.values[i].makes else []
            if missing and i not in order:
                left += missing
                continue
            left.pop()
            order[i] = None
        return list(order)
