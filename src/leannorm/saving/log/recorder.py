"""Writes the log: a mode of torch sees each operator call below autograd, its arguments and its results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils import _python_dispatch as modes
from torch.utils._python_dispatch import TorchDispatchMode

from leannorm._torch import left_to_python
from leannorm.saving.flags import current
from leannorm.saving.log.log import Log
from leannorm.saving.log.moved import hand_over
from leannorm.saving.log.rules import RULES, Rule, rule_of
from leannorm.saving.log.tensors import copy_of, geometry_of, is_plain, over
from leannorm.saving.log.values import DROPPED, FREE, HELD, Call, Read
from leannorm.saving.log.watch import copy_before_write, copy_exposed
from leannorm.saving.logged import WANTS
from leannorm.saving.operators import VIEW

IN_LIST = 1 << 16  # `Value.out` of a tensor in a list of results
COMPILED, OTHERS_HOOKS, FAILED = 1, 2, 16  # what a pass has met, as `Met` in log.h
_MANY = 4096  # calls

_top_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks
_inference, _modes_below = torch.is_inference_mode_enabled, torch._C._len_torch_dispatch_stack
_UNREPEATED = (torch.Generator, torch.ScriptObject, torch.SymInt, torch.SymFloat, torch.SymBool)


class _OfThread(threading.local):
    log: Log | None = None
    recorder: Recorder | None = None


THREAD = _OfThread()
OWN: list[Any] = []  # unpack hooks of lean()


def unpack_of_others() -> Any:
    """The unpack hook that is set now, if it is not of lean()."""
    top = _top_hooks(True)
    return None if top is None or top[1] in OWN else top[1]


def is_of_checkpoint(hook: Any) -> bool:
    return getattr(hook, "__module__", None) == "torch.utils.checkpoint"


class _Afterwards:
    """A callback of a backward pass that acts when the engine lets go of it, as the last callback comes too
    early."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def __call__(self) -> None:
        pass

    def __del__(self) -> None:
        self._act()


class Recorder(TorchDispatchMode):
    """The mode that records one thread's calls while a pass is open.

    After the pass it stays as long as rebuilds need memory that other code can write, and copies that memory
    before a write. It is then below all other modes, so that the program can end those.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.log: Log | None = None  # that of the open passes
        self.watched: list[Log] = []  # closed ones
        self._thread = threading.get_ident()
        self._waits = False  # for the end of a backward pass

    def start(self, log: Log) -> None:
        """Write this log from now on."""
        self.log, log.recorder = log, self
        _set_modes(*(mode for mode in _take_modes() if mode is not self), self)

    def stop(self, log: Log) -> None:
        """Watch what the closed log needs."""
        self.log, log.recorder = None, self if log.exposed else None
        self.watched += [log] * bool(log.exposed)
        self._arrange()
        if torch._C._current_graph_task_id() >= 0:
            self.rest()

    def rest(self) -> None:
        """Leave the thread's modes, if there is nothing to record and to watch any more.

        After a backward pass torch sets the modes that there were before it, so this waits until then.
        """
        self.watched = [log for log in self.watched if log.exposed]
        if self.watched or self.log is not None or self._waits:
            return
        if torch._C._current_graph_task_id() < 0:
            self._arrange()
        else:
            self._waits = True
            torch.autograd.Variable._execution_engine.queue_callback(_Afterwards(self._arrange))

    def _arrange(self) -> None:
        """Move the mode below all others while memory is watched, else remove it.

        Another thread, and one whose log is open, leave that to the next pass.
        """
        self._waits = False
        if threading.get_ident() == self._thread and self.log is None:
            taken = _take_modes()
            if self in taken:
                taken.remove(self)
                _set_modes(*[self] * bool(self.watched))
            _set_modes(*taken)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Hide this mode while torch compiles functions."""
        return True

    @left_to_python
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = RULES[func] if func in RULES else rule_of(func)
        if rule is None or rule.kind == VIEW:
            return func(*args, **kwargs)
        if rule.writes and self.watched and not rule.reshapes:
            with suppress(Exception):  # then the backward pass reports the edit
                copy_exposed(self.watched, written(rule, rule.full(args, kwargs)))
        log = self.log
        if log is None or log.busy or log.closed or log.waits():
            return func(*args, **kwargs)
        with log:
            try:
                number, writes = begin(log, rule, args, kwargs)
            except Exception:  # what the call makes or writes is then like what was there before
                log.meets(FAILED)
                number = -1
        if number < 0:
            return func(*args, **kwargs)
        start = perf_counter()
        try:
            result = func(*args, **kwargs)
        except BaseException:
            with log:
                log.calls[number].usable = False
                finish_writes(log, number, writes)
            raise
        seconds = perf_counter() - start
        with log:
            if log.measures:
                log.seconds[number] = seconds
            try:
                end(log, number, writes, result)
            except Exception:
                log.meets(FAILED)
            if log.to_move:
                hand_over(log)
        return result


def exposed() -> int:
    """How many values this thread watches."""
    return 0 if THREAD.recorder is None else sum(len(log.exposed) for log in THREAD.recorder.watched)


def _take_modes() -> list[TorchDispatchMode]:
    """Remove all modes of this thread; returns them, the innermost last."""
    taken = [modes._pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]
    return taken[::-1]


def _set_modes(*taken: TorchDispatchMode) -> None:
    for mode in taken:
        modes._push_mode(mode)


Writes = list[tuple[int, Tensor]]  # memories that a call is about to write


def begin(log: Log, rule: Rule, args: Any, kwargs: Any) -> tuple[int, Writes]:
    if log.unsettled:
        log.settle()
    if not log.alive and len(log.calls) > _MANY:
        log.start_over()
    number = len(log.calls)
    log.note_freed()
    unpack, usable = unpack_of_others(), not (_modes_below() or _inference())
    full, in_checkpoint = rule.full(args, kwargs), unpack is not None and is_of_checkpoint(unpack)
    call = Call(rule, full, len(args), tuple(kwargs), current(), in_checkpoint, usable)
    log.calls.append(call)
    others = unpack is not None and call.grad_mode and not call.in_checkpoint
    if others and any(t.requires_grad for t in _tensors(full)):
        log.meets(OTHERS_HOOKS)
    to_write = list(written(rule, full))
    for at, given in enumerate(full):
        call.args[at] = _read_argument(log, call, at, given)
    writes: Writes = []
    for t in to_write:
        about_to_write(log, call, t, writes)
    return number, writes


def written(rule: Rule, args: list[Any]) -> Iterator[Tensor]:
    """The tensors that a call with these arguments writes."""
    if rule.gate < 0 or args[rule.gate]:
        for at in rule.writes:
            yield from _tensors(args[at])


def _tensors(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, (list, tuple)):
        for one in given:
            yield from _tensors(one)


def _read_argument(log: Log, call: Call, at: int, given: Any) -> Any:
    """Note the tensors in an argument; returns what the call keeps of it."""
    several = given if isinstance(given, (list, tuple)) else ()
    if isinstance(given, Tensor):
        _read(log, call, at, -1, given)
        return None
    if any(isinstance(one, Tensor) for one in several):
        for place, one in enumerate(several):
            if one is not None:
                _read(log, call, at, place, one)
        return [None] * len(several)
    if isinstance(given, _UNREPEATED) or any(isinstance(one, (list, *_UNREPEATED)) for one in several):
        call.usable = False
        return None
    return given


def _read(log: Log, call: Call, at: int, place: int, tensor: Tensor) -> None:
    if not is_plain(tensor):
        call.usable = False
        return
    v = log.value_or_new(tensor, call.rule.slack if at in call.rule.writes else 0)
    x, shape = log.values[v], geometry_of(tensor)
    if x.state == FREE and not x.storage_bytes and not x.made.numel:  # as a language model's cache at first
        x.held, x.copied, x.state = copy_of(over(tensor.untyped_storage(), x.made), x.made), True, HELD
    same = shape == x.made
    if not same and shape.extent > x.made.extent:  # it shows memory that its call has not made
        if x.state == DROPPED:
            call.usable = False
        else:
            x.call = -1
    if log.may_plan:
        x.note_gradient(tensor)
    call.reads.append(Read(at, place, v, None if same else shape, tensor.requires_grad))


def about_to_write(log: Log, call: Call, tensor: Tensor, writes: Writes) -> None:
    """Note a memory that the call will write, and copy what it contains if rebuilds need that."""
    if not is_plain(tensor, in_any_bits=True):
        return
    v = log.value_or_new(tensor, call.rule.slack)
    x = log.values[v]
    if not call.rule.reshapes:
        copy_before_write(x)
    memory = log.memories[x.memory]
    memory.sent = memory.sent or call.rule.sends
    if all(number != x.memory for number, _ in writes):
        writes.append((x.memory, tensor))


def finish_writes(log: Log, number: int, writes: Writes) -> None:
    for memory, tensor in writes:
        log.written(memory, tensor, number)


def end(log: Log, number: int, writes: Writes, result: Any) -> None:
    if log.closed or number >= len(log.calls):
        return
    call = log.calls[number]
    finish_writes(log, number, writes)
    if isinstance(result, Tensor):
        _made_by(log, number, 0, result)
    elif not isinstance(result, (tuple, list)) or not result:
        call.usable = False  # it has no result
    else:
        for out, one in enumerate(result):
            if isinstance(one, Tensor):
                _made_by(log, number, out + IN_LIST if call.rule.lists else out, one)


def _made_by(log: Log, number: int, out: int, tensor: Tensor) -> None:
    if is_plain(tensor) and log.value_of(tensor) < 0:
        v, call = log.new_memory(tensor, number), log.calls[number]
        log.values[v].out = out
        call.outs.append(v)
        # it has no graph yet, so what the call reads says whether it gets a gradient
        if (
            log.may_plan
            and call.grad_mode
            and tensor.is_floating_point()
            and any(read.wants for read in call.reads)
        ):
            log.values[v].gradient = WANTS
