"""What an operator does for tensors of one kind, recorded once and repeated: new tensors, launches, results.

An operator decides by shapes, strides, dtypes, devices and settings alone; it never reads a value. So if all
of these are equal it makes the same tensors and launches, and a later call repeats them without plans, checks
and Triton's look-up of the compiled kernel, which take most of a small call's time. What a tape cannot record
(a copy into another layout, a tensor that is given twice) every call does again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from leannorm.ops.backends.triton import launch as launch_module
from leannorm.ops.backends.triton.launch import Launch, Places, listening

_MOST = 4096  # tapes per operator: every call may have new shapes
_PLAIN = (Tensor, torch.nn.Parameter)
_PASSED = (*_PLAIN, type(None), bool, int, float, str)  # types that C++ takes; no numpy.float32
_NOTHING = -1  # the number that stands for a result of None
_new = torch.empty_like
_all: list[dict[Hashable, _Tape | None]] = []
_nodes: Any = None  # the tables in C++, which repeats calls of these operators too
_of_nodes: frozenset[str] = frozenset()


def hand_over(nodes: Any, operators: Sequence[str], interpreted: bool) -> None:
    """From now on, also give the tapes of these operators to the autograd nodes in C++."""
    global _nodes, _of_nodes
    nodes.set_launches(launch_module, not interpreted)
    _nodes, _of_nodes = nodes, frozenset(operators)


def watched() -> bool:
    """Whether a pass under `lean()` or a profiler listens to operators in this thread.

    Without the nodes in C++ a pass is a dispatch mode.
    """
    return _nodes is not None and bool(_nodes.is_watched())


class _Recorder:
    """One call while it is recorded: its arguments, and then the tensors that it makes, have numbers."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        self.slots, self.first_made = list(arguments), len(arguments)
        self.made: list[int | Tensor] = []
        self.launches: list[tuple[Launch, Places]] = []
        self.sayable = True

    def place(self, t: Tensor) -> tuple[int, int] | None:
        """A tensor's number, and for a part of a new tensor the offset from its beginning."""
        for number, slot in enumerate(self.slots):
            if slot is t:
                return number, 0
        for number in range(self.first_made, len(self.slots)):
            whole: Tensor = self.slots[number]
            if t._base is whole and t.dtype == whole.dtype and t.is_contiguous() and whole.is_contiguous():
                return number, int(t.storage_offset())
        return None

    def note(self, launch: Launch, arguments: Sequence[Any]) -> None:
        if any(isinstance(value, Tensor) for value in launch.constants.values()):
            self.sayable = False  # a setting whose value may change
        places = []
        for position, t in enumerate(arguments):
            if isinstance(t, Tensor):
                place = self.place(t)
                if place is None:
                    self.sayable = False
                    return
                places.append((position, *place))
        self.launches.append((launch, places))

    def tape(self, result: Any) -> _Tape | None:
        """None if the call did anything else than make tensors and launch kernels."""
        results = result if isinstance(result, tuple) else () if result is None else (result,)
        places = [(_NOTHING, 0) if r is None else self.place(r) for r in results]
        numbers = [place[0] for place in places if place is not None and place[1] == 0]
        if not (self.sayable and self.launches and len(numbers) == len(results)):
            return None
        return _Tape(self.made, self.launches, numbers, isinstance(result, Tensor))


class _Tape:
    """The steps of a call; tensors are given by their numbers."""

    __slots__ = ("launches", "made", "results", "single")

    def __init__(
        self,
        made: list[int | Tensor],
        launches: list[tuple[Launch, Places]],
        results: list[int],
        single: bool,
    ) -> None:
        self.made, self.launches, self.results, self.single = made, launches, results, single

    def __call__(self, arguments: Sequence[Any]) -> Any:
        slots = list(arguments)
        for like in self.made:
            slots.append(_new(slots[like] if isinstance(like, int) else like))
        for launch, places in self.launches:
            launch(slots, places)
        if self.single:
            return slots[self.results[0]]
        slots.append(None)  # the last number, which therefore stands for None
        return tuple([slots[number] for number in self.results]) or None


def _pattern(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor without memory: `empty_like` of it takes half the time of `empty`, and returns the same.

    Inside a CUDA graph's pool, memory that outlives the call would count as a leak and raise.
    """
    made = torch.empty((), dtype=dtype, device=device).expand(shape)
    made.untyped_storage().resize_(0)
    return made


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new tensor of an operator."""
    made = torch.empty(shape, dtype=dtype, device=device)
    if (recorder := listening.recorder) is not None:
        pattern = _pattern(shape, dtype, device) if made.numel() else made
        recorder.sayable &= torch.empty_like(pattern).stride() == made.stride()
        recorder.slots.append(made)
        recorder.made.append(pattern)
    return made


def empty_like(t: Tensor) -> Tensor:
    """A new tensor of an operator, in the layout of another of its tensors."""
    made = torch.empty_like(t)
    if (recorder := listening.recorder) is not None:
        place = recorder.place(t)
        recorder.sayable &= place is not None and place[1] == 0
        recorder.slots.append(made)
        recorder.made.append(place[0] if place else -1)
    return made


def forget() -> None:
    """Forget all tapes, for code that changes how operators divide tensors into programs."""
    for tapes in _all:
        tapes.clear()
    if _nodes is not None:
        _nodes.forget_tapes()


def _kind(arguments: tuple[Any, ...]) -> Hashable | None:
    """Everything that an operator decides by; None if a tensor is more than its memory."""
    kind: list[Any] = []
    for a in arguments:
        if type(a) in _PLAIN and not a.is_neg():
            kind += (a.shape, a.stride(), a.dtype, a.device)
        elif isinstance(a, Tensor):
            return None
        else:
            kind.append(a)
    return tuple(kind)


class taped:  # noqa: N801  (a decorator)
    """An operator that repeats a call which it has seen. It takes tensors, None, numbers and strings."""

    def __init__(self, operator: Callable[..., Any]) -> None:
        self.operator = operator
        self.tapes: dict[Hashable, _Tape | None] = {}
        functools.update_wrapper(self, operator)
        _all.append(self.tapes)

    def __call__(self, *arguments: Any) -> Any:
        return self.call(arguments, self._resolved)

    def _resolved(self, *arguments: Any) -> Any:
        return self.operator(*[torch.resolve_neg(a) if isinstance(a, Tensor) else a for a in arguments])

    def call(self, arguments: tuple[Any, ...], otherwise: Callable[..., Any]) -> Any:
        """`otherwise` handles what a tape cannot record: subclasses, and views that the dispatcher
        negates."""
        if listening.recorder is not None:  # a part of another operator
            return self.operator(*arguments)
        kind = _kind(arguments)
        if kind is None:
            return otherwise(*arguments)
        tape = self.tapes.get(kind)
        return self._note(kind, arguments) if tape is None else tape(arguments)

    def again(self, arguments: tuple[Any, ...]) -> Any:
        """Repeat a recorded call with arguments of the same kinds; None if there is none, or it cannot be
        repeated."""
        tape = self.tapes.get(_kind(arguments))
        return None if tape is None else tape(arguments)

    def _note(self, kind: Hashable, arguments: tuple[Any, ...]) -> Any:
        tensors = [a for a in arguments if isinstance(a, Tensor)]
        given_twice = len(set(map(id, tensors))) < len(tensors)  # a tensor given twice would have two numbers
        if kind in self.tapes or given_twice:
            return self.operator(*arguments)
        recorder = listening.recorder = _Recorder(arguments)
        try:
            result = self.operator(*arguments)
        finally:
            listening.recorder = None
        if len(self.tapes) >= _MOST:
            forget()
        tape = self.tapes[kind] = recorder.tape(result)
        name = self.operator.__name__
        if name in _of_nodes and tape is not None and all(type(a) in _PASSED for a in arguments):
            made = recorder.slots[recorder.first_made :]
            _nodes.keep_tape(name, arguments, made, tape.launches, tape.results)
        return result
