"""From what a forward pass saved to the step that the planner reads: when what is made, read and freed.

Autograd numbers its nodes, and the backward pass runs them from the last one to the first. So each node is a
moment of the forward pass and, mirrored, one of the backward pass. A node that saved tensors has a number
also where nothing leads to it, such as that of the loss.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leannorm.planning.lines import Lines
from leannorm.planning.timeline import Moment, Step, of_stock
from leannorm.planning.timeline import Value as Planned
from leannorm.saving.graph import ACCUMULATES, kind_of
from leannorm.saving.graph import made_by as made_by_node
from leannorm.saving.narrowed import copy_that, references_when_alone
from leannorm.saving.price import Prices
from leannorm.saving.provenance import sequence_number
from leannorm.saving.recipes.views import ALIASES
from leannorm.saving.values import Value

_Output = tuple[Any, int]  # of a node
_SAME_MEMORY = ALIASES | {"ReshapeAliasBackward0", "UnsafeViewBackward0", "TBackward0"}
_PARTS = {"SelectBackward0", "SliceBackward0", "UnbindBackward0", "SplitBackward0", "SplitWithSizesBackward0"}
_SAME_GRADIENT = (_SAME_MEMORY - _PARTS) | {"CloneBackward0", "AddBackward0", "CatBackward0"}
"""The gradient that comes in goes out, as it is or in parts, where it has the size."""
_NO_GRADIENT = {"SumBackward0", "SumBackward1"}  # that takes memory: an expanded number
_WORKING = {"PowBackward0": 2.0}
"""What a node allocates beside the gradients it puts out, over the bytes of its first input."""


class Read(NamedTuple):
    """A node saved a tensor: its number, the tensor's value, and what made the tensor, or None."""

    by: int
    value: weakref.ref[Value]
    made_by: _Output | None
    given: bool


def read_of(tensor: Tensor, value: Value, references: int) -> Read:
    """The node that is being made now saves this tensor."""
    node = tensor.grad_fn
    made_by = None if node is None else made_by_node(node, tensor.output_nr)
    given = node is None and references > references_when_alone()
    return Read(sequence_number() - 1, weakref.ref(value), made_by, given)


def nbytes_of(metadata: Any) -> int:
    return int(prod(metadata.shape)) * int(metadata.dtype.itemsize)


class Timeline:
    """Reads one forward pass; `lines` gives what was read."""

    def __init__(self, reads: Sequence[Read], storages: dict[int, int], end: int, prices: Prices) -> None:
        """`storages`: the bytes of those that are held. `end`: the number of the first node after the pass."""
        self.storages, self.prices = storages, prices
        alive = [(read, value) for read in reads if (value := read.value()) is not None]
        self.reads = [(read.by, value, read.made_by) for read, value in alive]
        self.given = {id(value) for read, value in alive if read.given}
        self.nodes = self._nodes()
        numbers = {*self.nodes.values(), *(by for by, _, _ in self.reads)}
        self.forward = len(numbers)
        self.at = {number: i for i, number in enumerate(sorted(numbers))}
        self.end = end
        self.unseen: dict[int, dict[_Output, None]] = {}  # nodes to which nothing leads, and what they read
        known = set(self.nodes.values())
        for by, _, made in self.reads:
            if by not in known:
                outputs = self.unseen.setdefault(by, {})
                if made is not None:
                    outputs[made] = None

    def _nodes(self) -> dict[Any, int]:
        found: dict[Any, int] = {}
        left = [made[0] for _, _, made in self.reads if made is not None]
        while left:
            node = left.pop()
            if node not in found and kind_of(node) != ACCUMULATES:
                found[node] = node._sequence_nr()
                left += [p for p, _ in node.next_functions if p is not None]
        return found

    # ------------------------------------------------ the forward pass

    def _in_forward(self) -> dict[_Output, tuple[int, int]]:
        """For each output of a node the moments that make its memory and read it last."""
        edited = self._edited()
        under: dict[_Output, _Output] = {}
        for node in sorted(self.nodes, key=self.nodes.__getitem__):
            shares = kind_of(node) in _SAME_MEMORY or node in edited
            source = next(iter(node.next_functions), (None, 0))
            for output in range(len(node._input_metadata)):
                own = node, output
                under[own] = under.get(source, own) if shares else own
        self.under = under
        made = {own: self.at[self.nodes[own[0]]] for own in under.values()}
        until = dict(made)
        for output, by in self._readers():
            own = under.get(output)
            if own is not None:
                until[own] = max(until[own], self.at[by])
        return {output: (made[own], until[own]) for output, own in under.items()}

    def _edited(self) -> set[Any]:
        """The nodes that worked in place, by the versions of what was saved."""
        found = set()
        for _, value, made in self.reads:
            node, version = (None, 0) if made is None else (made[0], value.version)
            while node is not None and version > 0 and node in self.nodes:
                if kind_of(node) not in _SAME_MEMORY:
                    found.add(node)
                    version -= 1
                node = next(iter(node.next_functions), (None, 0))[0]
        return found

    def _readers(self) -> Iterator[tuple[_Output, int]]:
        for node, number in self.nodes.items():
            for edge in node.next_functions:
                yield edge, number
        for number, outputs in self.unseen.items():
            for output in outputs:
                yield output, number

    # ------------------------------------------------ gradients

    def _gradients(self, change: list[int]) -> None:
        """Add the gradients' bytes to the moments at which they are alive."""
        first = self.forward
        sizes: list[int] = []
        spans: list[list[int]] = []
        there: dict[_Output, int] = {}  # the gradient that has come in for an output
        gathered: set[Any] = set()

        def new(size: int, moment: int) -> int:
            sizes.append(size)
            spans.append([moment, moment])
            return len(sizes) - 1

        def give(to: _Output, gradient: int, moment: int) -> None:
            producer, _ = to
            if kind_of(producer) == ACCUMULATES:
                weight = producer.variable
                if weight.grad is None and producer not in gathered:
                    spans[gradient][1] = len(change) - 2
                gathered.add(producer)
            elif to not in there:
                there[to] = gradient
                spans[gradient][1] = max(spans[gradient][1], self._back(self.nodes[producer]))

        by_number = {number: node for node, number in self.nodes.items()}
        for moment, number in enumerate(sorted(self.at, reverse=True), first):
            node = by_number.get(number)
            if node is None:
                outputs = self.unseen.get(number, {})
                largest = max((nbytes_of(n._input_metadata[o]) for n, o in outputs), default=0)
                if number + 1 != self.end:
                    new(largest, moment)
                for output in outputs:
                    give(output, new(nbytes_of(output[0]._input_metadata[output[1]]), moment), moment)
                continue
            kind = kind_of(node)
            coming = [there[node, o] for o in range(len(node._input_metadata)) if (node, o) in there]
            size = nbytes_of(node._input_metadata[0])
            for edge in node.next_functions:
                if edge[0] is None:
                    continue
                out = nbytes_of(edge[0]._input_metadata[edge[1]])
                passes = kind in _SAME_GRADIENT and coming and (out == size or kind == "CatBackward0")
                if passes:
                    give(edge, coming[0], moment)
                else:
                    give(edge, new(0 if kind in _NO_GRADIENT else out, moment), moment)
            working = _WORKING.get(kind, 0.0)
            if working:
                source = next((e for e in node.next_functions if e[0] is not None), None)
                if source is not None:
                    new(int(working * nbytes_of(source[0]._input_metadata[source[1]])), moment)
        for size, (begin, last) in zip(sizes, spans, strict=True):
            change[begin] += size
            change[last + 1] -= size

    def _back(self, number: int) -> int:
        return 2 * self.forward - 1 - self.at[number]

    # ------------------------------------------------ values

    def lines(self, seconds: float) -> tuple[Lines, tuple[tuple[int, ...], ...]]:
        """The lines of the step, and the tensors behind its values. `seconds`: the price of stock's step."""
        lives = self._in_forward()
        change = [0] * (2 * self.forward + 1)
        sizes: dict[_Output, int] = defaultdict(int)
        for output, own in self.under.items():
            sizes[own] = max(sizes[own], nbytes_of(output[0]._input_metadata[output[1]]))
        for own, size in sizes.items():
            begin, last = lives[own]
            change[begin] += size
            change[last + 1] -= size
        self._gradients(change)
        beside, alive = [], 0
        for difference in change[: 2 * self.forward]:
            alive += difference
            beside.append(alive)
        return _Groups(self, lives).lines(beside, seconds)


class _Made:
    """A group that is being put together."""

    def __init__(self, made_of: tuple[int, ...] = ()) -> None:
        self.nbytes: int | None = None  # if it is kept under a plan
        self.wide = 0  # if it is kept in stock
        self.seconds: float | None = None
        self.made_of = made_of
        self.again = 0
        self.spares = 0
        self.given = False
        self.places: set[int] = set()
        self.begin = -1  # where it is kept from
        self.readers = 0
        self.in_place = False


class _Groups:
    """The values of a pass by the memory that they share."""

    def __init__(self, timeline: Timeline, lives: dict[_Output, tuple[int, int]]) -> None:
        self.timeline, self.lives = timeline, lives
        self.index: dict[Hashable, int] = {}
        self.made: list[_Made] = []
        self.beside_values = 0

    def of(self, value: Value) -> int:
        """The index of a value's group, which is made if there is none yet."""
        root = value
        while root.step is not None and root.step.kind == "view" and root.step.inputs:
            root = root.step.inputs[0]
        if root.step is None:
            tensor = root.tensor
            strided = tensor is not None and tensor.layout == torch.strided
            key: Hashable = tensor.untyped_storage()._cdata if strided else root  # type: ignore[union-attr]
        else:
            key = root
        if key in self.index:
            return self.index[key]
        if root.step is None or root.step.kind == "held":
            made = _Made()
            made.nbytes = made.wide = self._held(root)
            if id(root) in self.timeline.given:
                self.beside_values += made.nbytes
                made.nbytes = made.wide = 0
        else:
            made = self._rebuilt(root)
        self.index[key] = len(self.made)
        self.made.append(made)
        return self.index[key]

    def _held(self, root: Value) -> int:
        """Bytes that are counted: those of parameters are not."""
        tensor = root.tensor
        if tensor is None or tensor.layout != torch.strided:
            return root.frees if tensor is None else tensor.nbytes
        return self.timeline.storages.get(tensor.untyped_storage()._cdata, 0)

    def _rebuilt(self, root: Value) -> _Made:
        step = root.step
        assert step is not None
        made = _Made(tuple(dict.fromkeys(self.of(v) for v in step.inputs)))
        nbytes = prod(root.shape) * root.dtype.itemsize
        made.again = max(nbytes, 0)
        made.wide = root.frees or nbytes
        made.seconds = self.timeline.prices.of_rebuild(step, root.shape, root.dtype)
        made.in_place = step.in_place is not None
        narrow = root.from_narrow or (root.place < 0 and root.layout is None and root.users > 0 and root.frees)
        if narrow and step.inputs:
            copy = copy_that(step).tensor
            made.wide = root.frees + (0 if copy is None else copy.nbytes)
            made.given = True  # held as it is: in fewer bytes
        if root.in_rows:
            made.again, made.spares = 0, nbytes
        for i in made.made_of:
            self.made[i].readers += 1
        return made

    def lines(self, beside: list[int], seconds: float) -> tuple[Lines, tuple[tuple[int, ...], ...]]:
        timeline = self.timeline
        reads: dict[int, dict[int, None]] = defaultdict(dict)
        for by, value, made_by in timeline.reads:
            i = self.of(value)
            made = self.made[i]
            if value.place >= 0:
                made.places.add(value.place)
            if made_by is not None and made_by in self.lives:
                made.begin = max(made.begin, self.lives[made_by][1] + 1)
            elif made.begin < 0:
                made.begin = timeline.at[by] + 1
            own = made_by is not None and timeline.nodes.get(made_by[0]) == by
            if not (value.in_rows and not own):  # the loss reads no value of it
                reads[by][i] = None
        for made in self.made:
            self._settle(made)
        values, wide = [], []
        for made in self.made:
            begin = made.begin if made.begin >= 0 else 0
            value = Planned(
                made.nbytes, made.seconds, made.made_of, begin, begin - 1, made.again, spares=made.spares
            )
            values.append(value)
            wide.append(value._replace(nbytes=made.wide))
        backward = [
            Moment(tuple(reads.get(number, ()))) for number in sorted(timeline.at, reverse=True)
        ]
        stock = frozenset(i for i, made in enumerate(self.made) if made.wide is not None)
        step = Step(values, timeline.forward, backward, beside, stock, seconds, self.beside_values)
        in_stock = of_stock(step._replace(values=wide))
        return Lines(step, in_stock), tuple(tuple(sorted(made.places)) for made in self.made)

    def _settle(self, made: _Made) -> None:
        if made.seconds is None or made.given:
            return
        if made.places:
            made.nbytes = made.wide
