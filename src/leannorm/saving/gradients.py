"""The gradients of a backward pass, and what its kernels need: how many bytes, and from when to when."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from leannorm.saving.logged import HAS_GRADIENT, Call, Read
from leannorm.saving.operators import OPERATORS

if TYPE_CHECKING:
    from leannorm.saving.timeline import Timeline

_SAME_GRADIENT = {"aten::add", "aten::add_", "aten::clone", "aten::cat", "aten::copy_"}
"""Their arguments of the result's size get the incoming gradient itself; those of `cat` get parts of it."""
_NO_GRADIENT = {"aten::sum"}  # whose gradient takes no memory: it is one number, expanded
_WORKING = {"aten::pow": 2, "aten::native_batch_norm": 1}
"""What the backward pass of a call allocates in addition to gradients, in multiples of its result's bytes."""


class Gradients:
    """The gradients of one step's backward pass."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.made: list[list[int]] = []
        self.of: dict[int, list[int]] = {}  # by value, the gradient that has come in
        self.later: dict[int, list[int]] = defaultdict(list)  # by moment: values with gradients in parts

    def spans(self) -> list[list[int]]:
        """For each gradient its bytes, and its first and last moment."""
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
