"""The log of a pass as the step that the planner reads: when everything is made, read and freed.

Each call is a moment of the forward pass and, in reverse order, one of the backward pass. Memory is alive
from the call that made it until the log saw that it was gone. A gradient is alive from the moment of its
value's last reader, which comes first in the backward pass, to that of the call that made the value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from leannorm.planning.lines import Lines
from leannorm.planning.timeline import Moment, Step, of_stock
from leannorm.planning.timeline import Value as Planned
from leannorm.saving.operators import OPERATORS
from leannorm.saving.rates import Rates

_SAME_GRADIENT = {"aten::add", "aten::add_", "aten::clone", "aten::cat", "aten::copy_"}
"""Their arguments of the result's size get the incoming gradient itself; those of `cat` get parts of it."""
_NO_GRADIENT = {"aten::sum"}  # whose gradient takes no memory: it is one number, expanded
_WORKING = {"aten::pow": 2, "aten::native_batch_norm": 1}
"""What the backward pass of a call allocates in addition to gradients, in multiples of its result's bytes."""
_PASSES = 2.5  # how often a step moves a call's arguments and results: once forward, the rest backward
WANTS, HAS_GRADIENT = 1, 2  # as `Gradient` in values.h


class Read(NamedTuple):
    """A tensor that a call reads: its bytes as read, whether it requires a gradient, and its argument."""

    value: int
    nbytes: int
    wants: bool
    at: int


class Call(NamedTuple):
    """One call of an operator. `operations` and `groups` are 0 unless it is a product or a convolution."""

    name: str
    operations: int
    groups: int
    grad_mode: bool
    reads: list[Read]
    outs: list[int]


class Value(NamedTuple):
    """One version of a memory. `storage`: the memory's bytes; `coded`: those that keeping it takes.
    `gradient`: bits of values.h. `needed`: whether the backward pass reads it or rebuilds others from it.
    `makes`: whether it is rebuilt, or could be if others were kept. `held`: whether this pass does not
    rebuild it. `counts`: whether its bytes count as kept or rebuilt. `cause`: why it is kept."""

    memory: int
    call: int
    storage: int
    coded: int
    nbytes: int
    itemsize: int
    is_floating: bool
    gradient: int
    needed: bool
    makes: bool
    held: bool
    counts: bool
    copied: bool
    cause: tuple[int, str]
    inputs: list[int]


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
        """`narrows`: whether a cast's source may be kept instead of the log-softmax that is made of it.
        `seconds`: what each call took; none on a device that runs behind its host. `codes`: whether what is
        kept counts in the fewer bytes that it gets some time later. `link`: bytes per second to the host; 0
        if nothing is moved there."""
        calls, values, self.saves, self._died, self._others = told  # the last: bytes that the log cannot read
        self.calls = [Call(*call)._replace(reads=[Read(*read) for read in call[4]]) for call in calls]
        whole = [Value(*value) for value in values]
        self.values = whole if codes else [value._replace(coded=value.storage) for value in whole]
        self.rates, self._narrows, self._link = rates, narrows, link
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

    def mirrored(self, call: int) -> int:
        """The moment of a call's backward pass; for -1, memory that was there before, the last moment."""
        return 2 * self.forward - 1 - max(call, 0)

    @cached_property
    def until(self) -> dict[int, int]:
        """By memory, the last moment of the forward pass at which the program has it."""
        held = {value.memory for value in self.values if value.needed and value.held}
        until = dict[int, int]()
        for i, value in enumerate(self.values):
            last = max(self.read_last.get(i, 0), value.call)
            until[value.memory] = max(until.get(value.memory, 0), last)
        for memory, last in until.items():
            died = self._died[memory] if memory < len(self._died) else -1
            if memory not in held:  # the pass keeps such memory longer than the program
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

    def price_of(self, number: int, inputs: list[int], by_result: bool) -> float:
        """Seconds that a rebuild takes to make this call again: what it took, if that is known."""
        if self.taken[number] > 0 and not by_result:
            return self.taken[number]
        read = sum(self.values[i].nbytes for i in inputs)
        return self.slower * self._by_rates(self.calls[number], read, not by_result)

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
        """How many times as long as by the rates it takes to move bytes."""
        moving = [i for i, call in enumerate(self.calls) if self.taken[i] > 0 and not call.operations]
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
        for size, first, last in [*self._outputs(), *_Gradients(self).spans()]:
            change[first] += size
            change[max(last, first) + 1] -= size
        return list(accumulate(change[:-1]))

    def _outputs(self) -> Iterator[tuple[int, int, int]]:
        for memory, born in self.born.items():
            if born >= 0:
                yield self.size[memory], born, self.until[memory]

    # ------------------------------------------------------------ the step

    @cached_property
    def narrow(self) -> dict[int, int]:
        """By widening cast, the log-softmax that is made of it, instead of which its source may be kept."""
        saved, narrow = {value for _, value, _ in self.saves}, dict[int, int]()
        for i, value in enumerate(self.values if self._narrows else []):
            if not value.makes or len(value.inputs) != 1 or self._name(value) != "aten::_log_softmax":
                continue
            cast = self.values[value.inputs[0]]
            if cast.makes and self._name(cast) == "aten::_to_copy" and value.inputs[0] not in saved:
                narrow[value.inputs[0]] = i
        return narrow

    def _name(self, value: Value) -> str:
        return self.calls[value.call].name if value.call >= 0 else ""

    def lines(self) -> tuple[Lines, tuple[tuple[int, ...], ...]]:
        """The lines of the step, and for each of its values the places of the tensors in its memory."""
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
        instead, beside = set(self.narrow.values()), set[int]()
        for i in self._in_order():
            value, own = self.values[i], tuple(sorted(places[i]))
            by_place = () if i in instead else tuple(sorted(places[self.narrow.get(i, i)]))
            first = self.until[value.memory] + 1 if self.born[value.memory] >= 0 else 0
            if not value.makes:
                before = self.born[value.memory] < 0 and not value.copied
                held += value.storage if value.counts and before else 0
                counted = value.counts and not before
                moves = ready.get(i, -1) if counted else -1
                made = Planned(value.coded if counted else 0, None, ready=moves)
            else:
                maker, made_of = self.calls[value.call], tuple(dict.fromkeys(index[s] for s in value.inputs))
                by_result = any(s in maker.outs for s in value.inputs)
                seconds = self.price_of(value.call, value.inputs, by_result)
                if results[value.call] > 1 and not by_result:
                    if value.call not in runs:
                        runs[value.call] = len(planned)
                        planned.append(Planned(None, seconds, made_of))
                        behind.append(())
                    seconds, made_of = 0.0, (runs[value.call],)
                seconds += self.rates.rebuild * len(own)
                nbytes = value.coded if i in saved else None
                if i in self.narrow:
                    nbytes = maker.reads[0].nbytes
                    beside.add(len(planned))
                moves = -1 if i in self.narrow or i in instead else ready.get(i, -1)
                made = Planned(nbytes, seconds, made_of, again=value.nbytes, ready=moves)
            if made.nbytes == value.coded:
                wider[len(planned)] = value.storage
            index[i] = len(planned)
            planned.append(made._replace(made=first, until=first - 1))
            behind.append(by_place)
        reads: dict[int, dict[int, None]] = defaultdict(dict)
        for _, value, call in self.saves:
            if value in index:
                reads[self.mirrored(call)][index[value]] = None
        backward = [Moment(tuple(reads.get(moment, ()))) for moment in range(self.forward, 2 * self.forward)]
        stock = frozenset(range(len(planned))) - beside
        taken = self._of_moments() if self._link else ()
        times = self.seconds, held, taken, self._link
        step = Step(planned, self.forward, backward, self.memory, stock, *times)
        whole = [value._replace(nbytes=wider.get(i, value.nbytes)) for i, value in enumerate(planned)]
        return Lines(step, of_stock(step._replace(values=whole))), tuple(behind)

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


class _Gradients:
    """The gradients of a backward pass: for each its bytes, and its first and last moment."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.made: list[list[int]] = []
        self.of: dict[int, list[int]] = {}  # by value, the gradient that has come in
        self.later: dict[int, list[int]] = defaultdict(list)  # by moment: values with gradients in parts

    def spans(self) -> list[list[int]]:
        timeline = self.timeline
        for number in range(len(timeline.calls) - 1, -1, -1):
            self._run(timeline.calls[number], timeline.mirrored(number))
            for value in self.later.pop(timeline.mirrored(number), ()):
                self._give(value, timeline.values[value].nbytes, None, timeline.mirrored(number))
        return self.made

    def _new(self, size: int, moment: int) -> list[int]:
        self.made.append([size, moment, moment])
        return self.made[-1]

    def _run(self, call: Call, moment: int) -> None:
        timeline, gets = self.timeline, self.timeline.differentiated(call)
        if not gets:
            return
        coming = next((self.of[out] for out in call.outs if out in self.of), None)
        size = max(timeline.values[out].nbytes for out in call.outs)
        self._new(self._working(call, gets, size), moment)
        for read in gets:
            whole = timeline.values[read.value].nbytes
            same = call.name in _SAME_GRADIENT and (read.nbytes == size or call.name == "aten::cat")
            gradient = coming if same else None
            if gradient is None:
                gradient = self._new(0 if call.name in _NO_GRADIENT else read.nbytes, moment)
            if read.nbytes == whole:
                self._give(read.value, whole, gradient, moment)
            elif read.nbytes > whole:
                self._give(read.value, whole, None, moment)
            else:  # a part of the value's gradient, which stays until all parts are there
                at = timeline.mirrored(timeline.read_first[read.value])
                gradient[2] = max(gradient[2], at)
                self.later[at] += [] if read.value in self.later[at] else [read.value]

    def _working(self, call: Call, gets: list[Read], size: int) -> int:
        row = OPERATORS.get(call.name)
        if row is not None and row.formula == "convolution":
            # on a CPU the gradients' kernels copy all that they read into their own layout
            x, weight = (sum(read.nbytes for read in gets if read.at == at) for at in (0, 1))
            return 0 if call.groups > 1 else max(weight, x + size)
        return _WORKING.get(call.name, 0) * size

    def _give(self, value: int, size: int, gradient: list[int] | None, moment: int) -> None:
        """Note a value's gradient. A weight's stays, unless it is added to one; others stay until the
        backward pass of the call that made the value."""
        timeline, of = self.timeline, self.timeline.values[value]
        if value in self.of or (of.call < 0 and of.gradient & HAS_GRADIENT):
            return
        if gradient is None:
            gradient = self._new(size, moment)
        self.of[value] = gradient
        gradient[2] = max(gradient[2], timeline.mirrored(of.call))
