"""From what a forward pass saved to the step that the planner reads: when everything is made, read and freed.

Autograd numbers its nodes, and the backward pass runs them from the last one to the first. So each node is a
moment of the forward pass and, mirrored, one of the backward pass. A node that saved tensors has a number
also where nothing leads to it yet, as that of the loss.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from math import prod
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leannorm.planning.lines import Lines
from leannorm.planning.timeline import Moment, Step, of_stock
from leannorm.planning.timeline import Value as Planned
from leannorm.saving.evidence import is_parameter
from leannorm.saving.graph import ACCUMULATES, kind_of, made_by
from leannorm.saving.narrowed import CHUNK, copy_that, references_when_alone
from leannorm.saving.price import Prices
from leannorm.saving.provenance import sequence_number
from leannorm.saving.recipes.products import CONVOLUTIONS
from leannorm.saving.recipes.views import PARTS, SAME_MEMORY
from leannorm.saving.shards import nbytes_of, storage_of
from leannorm.saving.steps import root_of
from leannorm.saving.values import Value

_Output = tuple[Any, int]  # of a node, by number
_IN_PARTS = {"SelectBackward0", "SliceBackward0", *PARTS}
_SAME_GRADIENT = (SAME_MEMORY - _IN_PARTS) | {"CloneBackward0", "AddBackward0", "CatBackward0"}
"""The gradient that comes in goes out, to inputs of its size; from a concatenation in parts."""
_NO_GRADIENT = {"SumBackward0", "SumBackward1"}  # that takes memory: one number, expanded
_WORKING = {"PowBackward0": 2, "NativeBatchNormBackward0": 1}
"""What a node allocates beside the gradients that it puts out, in times its output's bytes."""


class Read(NamedTuple):
    """A node saved a tensor: its number, the tensor's value, what made the tensor, if a node did, and whether
    the tensor is held `by_caller`, as an input is. `alive`: what running functions' variables hold.
    """

    by: int
    value: weakref.ref[Value]
    made_by: _Output | None
    by_caller: bool
    alive: tuple[_Output, ...] = ()


class Reads:
    """All that nodes have saved in one pass. `frames_around`: the `id`s of the frames around it. For tensors
    of up to `smallest` elements no variables are looked at."""

    def __init__(self, frames_around: frozenset[int], smallest: int) -> None:
        self.made, self._frames_around, self._largest = list[Read](), frames_around, smallest

    def note(self, tensor: Tensor, value: Value, references: int, frame: FrameType) -> None:
        """The node that is being made now saves this tensor. Where it is the largest so far, the variables of
        the running functions are looked at."""
        node = tensor.grad_fn
        made = None if node is None else made_by(node, tensor.output_nr)
        size = 0 if node is None or is_parameter(tensor) else tensor.numel()
        alive = tuple(_named(frame, self._frames_around)) if size > self._largest else ()
        self._largest = max(self._largest, size)
        by_caller = node is None and references > references_when_alone()
        self.made.append(Read(sequence_number() - 1, weakref.ref(value), made, by_caller, alive))


def _named(frame: FrameType | None, frames_around: frozenset[int]) -> Iterator[_Output]:
    """What nodes have made, in the variables of a function and its callers within the pass.

    Python before 3.13 keeps what it shows of a frame's variables until the function returns, so the functions
    around the pass, which may run as long as the training does, are not looked at.
    """
    while frame is not None and id(frame) not in frames_around:
        for held in list(frame.f_locals.values()):
            for one in held if isinstance(held, (tuple, list)) else (held,):
                if isinstance(one, Tensor) and one.grad_fn is not None:
                    yield made_by(one.grad_fn, one.output_nr)
        frame = frame.f_back


def timeline_of(reads: Sequence[Read]) -> Timeline:
    """The timeline of a forward pass that ends now."""
    return Timeline([(r, value) for r in reads if (value := r.value()) is not None], sequence_number())


def _nbytes(output: _Output) -> int:
    metadata = output[0]._input_metadata[output[1]]
    return int(prod(metadata.shape)) * int(metadata.dtype.itemsize)


def _of_convolution(node: Any) -> int:
    """On a CPU the gradients' kernels bring all that they read into a layout of their own."""
    if node._input_metadata[0].device.type != "cpu" or getattr(node, "_saved_groups", 1) > 1:
        return 0
    x, weight, *_ = (0 if edge[0] is None else _nbytes(edge) for edge in node.next_functions)
    return max(weight, x + _nbytes((node, 0)))


class Timeline:
    """The nodes of one forward pass, by number; `memory` is that of all but the values."""

    def __init__(self, reads: Sequence[tuple[Read, Value]], end: int) -> None:
        """`end`: the number of the first node after the pass."""
        self.reads, self.end = reads, end
        self.nodes = self._nodes()
        numbers = sorted({*self.nodes.values(), *(read.by for read, _ in reads)})
        self.at = {number: i for i, number in enumerate(numbers)}
        self.forward, self.whole = len(numbers), 2 * len(numbers)
        known = set(self.nodes.values())
        self.unseen: dict[int, dict[_Output, None]] = defaultdict(dict)
        """Nodes to which nothing leads, and of what they saved that which nodes have made."""
        for read, _ in reads:
            if read.by not in known and read.made_by is not None:
                self.unseen[read.by][read.made_by] = None
        self.lives = self._in_forward()

    def _nodes(self) -> dict[Any, int]:
        numbers: dict[Any, int] = {}
        left = [read.made_by[0] for read, _ in self.reads if read.made_by is not None]
        while left:
            node = left.pop()
            if node not in numbers and kind_of(node) != ACCUMULATES:
                numbers[node] = node._sequence_nr()
                left += [producer for producer, _ in node.next_functions if producer is not None]
        return numbers

    @cached_property
    def memory(self) -> list[int]:
        """Bytes alive at each moment: outputs while the forward pass reads them, and gradients."""
        change = [0] * (self.whole + 1)
        for size, first, last in [*self._outputs(), *_Gradients(self).spans()]:
            change[first] += size
            change[last + 1] -= size
        return list(accumulate(change[: self.whole]))

    def _outputs(self) -> Iterator[tuple[int, int, int]]:
        largest: dict[_Output, int] = defaultdict(int)
        for output, owner in self.owners.items():
            largest[owner] = max(largest[owner], _nbytes(output))
        for owner, size in largest.items():
            yield size, *self.lives[owner]

    def _in_forward(self) -> dict[_Output, tuple[int, int]]:
        """For each output the moments that make its memory and read it last."""
        edited, owners = self._edited(), dict[_Output, _Output]()
        for node in sorted(self.nodes, key=self.nodes.__getitem__):
            shares = kind_of(node) in SAME_MEMORY or node in edited
            source = next(iter(node.next_functions), (None, 0))
            for number in range(len(node._input_metadata)):
                own = node, number
                owners[own] = owners.get(source, own) if shares else own
        self.owners = owners
        made = {owner: self.at[self.nodes[owner[0]]] for owner in owners.values()}
        until = dict(made)
        for output, by in self._readers():
            if output in owners:
                until[owners[output]] = max(until[owners[output]], self.at[by])
        return {output: (made[owner], until[owner]) for output, owner in owners.items()}

    def _edited(self) -> set[Any]:
        """The nodes that worked in place, by the versions of what was saved."""
        edited = set()
        for read, value in self.reads:
            node: Any = None if read.made_by is None else read.made_by[0]
            version = value.version
            while version > 0 and node in self.nodes:
                if kind_of(node) not in SAME_MEMORY:
                    edited.add(node)
                    version -= 1
                node = next(iter(node.next_functions), (None, 0))[0]
        return edited

    def _readers(self) -> Iterator[tuple[_Output, int]]:
        for node, number in self.nodes.items():
            for edge in node.next_functions:
                yield edge, number
        for number, outputs in self.unseen.items():
            for output in outputs:
                yield output, number
        for read, _ in self.reads:
            for output in read.alive:
                yield output, read.by


class _Gradients:
    """The gradients of a backward pass: bytes, and the moments from which and until which they are there."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.made: list[list[int]] = []
        self.of: dict[_Output, list[int]] = {}  # what has come in for an output
        self.weights: set[Any] = set()

    def spans(self) -> list[list[int]]:
        nodes = {number: node for node, number in self.timeline.nodes.items()}
        for moment, number in enumerate(sorted(self.timeline.at, reverse=True), self.timeline.forward):
            if number in nodes:
                self._run(nodes[number], moment)
            else:
                self._run_unseen(number, moment)
        return self.made

    def _new(self, size: int, moment: int) -> list[int]:
        self.made.append([size, moment, moment])
        return self.made[-1]

    def _run(self, node: Any, moment: int) -> None:
        kind, outputs = kind_of(node), range(len(node._input_metadata))
        coming = next((self.of[node, i] for i in outputs if (node, i) in self.of), None)
        size = _nbytes((node, 0))
        self._new(_of_convolution(node) if kind in CONVOLUTIONS else _WORKING.get(kind, 0) * size, moment)
        for edge in node.next_functions:
            if edge[0] is None:
                continue
            out = _nbytes(edge)
            if coming is not None and kind in _SAME_GRADIENT and (out == size or kind == "CatBackward0"):
                self._give(edge, coming, moment)
            else:
                self._give(edge, self._new(0 if kind in _NO_GRADIENT else out, moment), moment)

    def _run_unseen(self, number: int, moment: int) -> None:
        """A node of which only what it saved is known: the loss, or before its mean a power, as a square."""
        outputs = self.timeline.unseen.get(number, {})
        if number + 1 != self.timeline.end:
            self._new((1 + _WORKING["PowBackward0"]) * max(map(_nbytes, outputs), default=0), moment)
        for output in outputs:
            self._give(output, self._new(_nbytes(output), moment), moment)

    def _give(self, to: _Output, gradient: list[int], moment: int) -> None:
        """A weight's gradient stays, unless it is added to one; any other until its node runs."""
        node = to[0]
        if kind_of(node) == ACCUMULATES:
            if node.variable.grad is None and node not in self.weights:
                gradient[2] = self.timeline.whole - 1
            self.weights.add(node)
        elif to not in self.of:
            self.of[to] = gradient
            gradient[2] = max(
                gradient[2], self.timeline.whole - 1 - self.timeline.at[self.timeline.nodes[node]]
            )


class _Group:
    """All values of one memory, a value of the planner. `in_stock`: the bytes that keeping it takes without a
    plan. `places`: its tensors among the packed ones. `copy`: what is kept in its place in fewer bytes."""

    def __init__(self, value: Planned, in_stock: int, copy: _Group | None = None) -> None:
        self.value, self.in_stock, self.copy = value, in_stock, copy
        self.places: set[int] = set()
        self.first = 0  # the moment from which keeping it counts: the forward pass reads it no more

    def planned(self, hooks: float) -> Planned:
        """`hooks`: seconds of the hooks of a tensor that is rebuilt."""
        nbytes, seconds = self.value.nbytes, self.value.seconds
        if nbytes is None and self.places:
            nbytes = self.in_stock
        if seconds is not None:
            seconds += hooks * len(self.places)
        return self.value._replace(nbytes=nbytes, seconds=seconds, made=self.first, until=self.first - 1)


class Groups:
    """The values of a pass, as they are held or rebuilt where everything is rebuilt that can be."""

    def __init__(
        self, timeline: Timeline, storages: dict[int, int], prices: Prices, narrowing: bool = True
    ) -> None:
        """`storages`: the bytes of what is held, parameters aside. Without `narrowing`, what the pass holds
        in a narrower dtype is held whole."""
        self.timeline, self.storages, self.prices, self.narrowing = timeline, storages, prices, narrowing
        self.index: dict[Hashable, int] = {}
        self.made: list[_Group] = []
        self.by_caller = {value for read, value in timeline.reads if read.by_caller}
        self.read = {value for _, value in timeline.reads}
        self.beside = 0  # bytes that are counted as held, and that the step does not allocate

    def lines(self, seconds: float) -> tuple[Lines, tuple[tuple[int, ...], ...]]:
        """The lines of the step, and the tensors behind each value. `seconds`: the price of stock's step."""
        timeline = self.timeline
        reads: dict[int, dict[int, None]] = defaultdict(dict)
        narrow: dict[int, int] = defaultdict(int)
        for read, value in timeline.reads:
            known, at = len(self.made), timeline.at[read.by]
            i = self._of(value)
            group = self.made[i]
            for new in self.made[known:]:
                new.first = at
            if group.copy is not None:  # also there where it is not kept: until what it is made of is found
                narrow[at] += (group.copy.value.nbytes or 0) + min(group.in_stock, 4 * CHUNK)
                group.copy.first = at + 1
            (group.copy or group).places.update([value.place] if value.place >= 0 else ())
            last = timeline.lives.get(read.made_by, (0, at))[1]  # type: ignore[arg-type]
            group.first = max(group.first, last + 1)
            own = read.made_by is not None and timeline.nodes.get(read.made_by[0]) == read.by
            if own or not value.in_rows:  # the loss reads no value of what is rebuilt in rows
                reads[read.by][i] = None
        values = [group.planned(self.prices.rates.rebuild) for group in self.made]
        backward = [Moment(tuple(reads.get(number, ()))) for number in sorted(timeline.at, reverse=True)]
        stock = frozenset(range(len(values)))
        beside = timeline.memory
        step = Step(values, timeline.forward, backward, beside, stock, seconds, self.beside)
        wide = [v._replace(nbytes=g.in_stock) for v, g in zip(values, self.made, strict=True)]
        places = tuple(tuple(sorted(group.places)) for group in self.made)
        in_stock = of_stock(step._replace(values=wide))
        ours = [nbytes + narrow[moment] for moment, nbytes in enumerate(beside)]
        return Lines(step._replace(beside=ours), in_stock), places

    def _of(self, value: Value) -> int:
        root = root_of(value)
        held = root.tensor if root.step is None else None
        key: Hashable = root if held is None else storage_of(held)[0] or root
        if key not in self.index:
            group = self._held(root) if root.is_held else self._rebuilt(root)
            self.made.append(group)
            self.index[key] = len(self.made) - 1
        return self.index[key]

    def _held(self, root: Value) -> _Group:
        """Parameters count nothing; what the caller holds, such as an input, is not allocated by the step."""
        tensor = root.tensor
        if tensor is not None and tensor.layout == torch.strided:
            nbytes = self.storages.get(tensor.untyped_storage()._cdata, 0)
        else:
            nbytes = root.frees if tensor is None else nbytes_of(tensor)
        if root in self.by_caller:
            self.beside, nbytes = self.beside + nbytes, 0
        return _Group(Planned(nbytes, None), nbytes)

    def _rebuilt(self, root: Value) -> _Group:
        step = root.step
        assert step is not None
        if root.from_narrow and not self.narrowing:
            return _Group(Planned(root.nbytes, None), root.nbytes)
        made_of = tuple(dict.fromkeys(self._of(value) for value in step.inputs))
        nbytes, first = root.nbytes, step.inputs[0] if step.inputs else root
        if (step.in_place or root.in_rows) and first.layout is None and first.step and first.users <= 1:
            source = self.made[made_of[0]]  # its memory is used, or it exists in parts alone
            source.value = source.value._replace(again=0)
        seconds = self.prices.of_rebuild(step, root.shape, root.dtype)
        spares = nbytes if root.in_rows else 0  # its gradient takes the place of the one that comes in
        value = Planned(None, seconds, made_of, again=nbytes - spares, spares=spares)
        in_bytes = root.from_narrow or (root.place < 0 and root.layout is None and root in self.read)
        if in_bytes and step.inputs:  # whatever is planned
            narrow = copy_that(step).tensor
            return _Group(value, root.frees + (0 if narrow is None else narrow.nbytes))
        if root.if_held and self.narrowing:
            seconds = max(seconds - self.prices.of_narrowing(root), 0.0)  # then no copy is made
            copy = _Group(value._replace(nbytes=root.if_held, seconds=seconds, again=0, spares=0), 0)
            self.made.append(copy)
            value = value._replace(seconds=0.0, made_of=(len(self.made) - 1,))
            return _Group(value, root.frees or nbytes, copy)
        return _Group(value, max(root.frees, nbytes))
