"""Writes the log: a mode of torch sees each operator call below autograd, its arguments and its results."""

from __future__ import annotations

import threading
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
from leannorm.saving.log.rules import RULES, SKIP, Rule, rule_of
from leannorm.saving.log.tensors import copy_of, geometry_of, is_plain
from leannorm.saving.log.values import DROPPED, HELD, Call, Read

IN_LIST = 1 << 16  # `Value.out` of a tensor in a list of results
COMPILED, OTHERS_HOOKS, FAILED = 1, 2, 16  # what a pass has met, as `Met` in log.h
_MANY = 4096  # calls

_top_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks
_inference, _modes_below = torch.is_inference_mode_enabled, torch._C._len_torch_dispatch_stack
_UNREPEATED = (torch.Generator, torch.ScriptObject, torch.SymInt, torch.SymFloat, torch.SymBool)


class _OfThread(threading.local):
    log: Log | None = None


THREAD = _OfThread()
OWN: list[Any] = []  # the log's own unpack hook


def unpack_of_others() -> Any:
    """The unpack hook that is set now, if it is not the log's own."""
    top = _top_hooks(True)
    return None if top is None or top[1] in OWN else top[1]


def is_of_checkpoint(hook: Any) -> bool:
    return getattr(hook, "__module__", None) == "torch.utils.checkpoint"


class Recorder(TorchDispatchMode):
    """The mode that records one thread's calls while a pass is open."""

    supports_higher_order_operators = True

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch compile functions as without this mode."""
        return True

    @left_to_python
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = RULES[func] if func in RULES else rule_of(func)
        log = self.log
        if rule is None or rule.kind == SKIP or log.busy or log.closed or log.waits():
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


def own_modes() -> int:
    """How many of this thread's modes belong to the log."""
    return int(THREAD.log is not None and not THREAD.log.closed)


def push(mode: TorchDispatchMode) -> None:
    modes._push_mode(mode)


def remove(mode: TorchDispatchMode) -> None:
    """Remove this mode and no other: if tasks alternate in one thread, the first to end may not be on top."""
    above = []
    while torch._C._len_torch_dispatch_stack():
        top = modes._pop_mode()
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        modes._push_mode(other)


Writes = list[tuple[int, Tensor]]  # memories that a call is about to write


def begin(log: Log, rule: Rule, args: Any, kwargs: Any) -> tuple[int, Writes]:
    if log.unsettled:
        log.settle()
    if not log.alive and len(log.calls) > _MANY:
        log.start_over()
        if log.times is not None:
            log.times.clear()
    number = len(log.calls)
    if log.times is not None:
        log.times.note_freed(log, number)
    full = rule.full(args, kwargs)
    call = Call(rule, full, len(args), tuple(kwargs))
    call.usable = False  # as long as it is not read whole
    log.calls.append(call)
    flags = current()
    unpack = unpack_of_others()
    call.in_checkpoint = unpack is not None and is_of_checkpoint(unpack)
    call.usable, call.flags = not (_modes_below() or _inference()), flags
    tensors = read_arguments(log, number, call)
    others = unpack is not None and call.grad_mode and not call.in_checkpoint
    if others and any(t.requires_grad for given in tensors.values() for t in _listed(given)):
        log.meets(OTHERS_HOOKS)
    writes: Writes = []
    if rule.writes and (rule.gate < 0 or call.args[rule.gate]):
        for at in rule.writes:
            for t in _listed(tensors.get(at)):
                about_to_write(log, call, t, writes)
    return number, writes


def _listed(given: Any) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given]
    return [t for one in given or () for t in _listed(one)]


def read_arguments(log: Log, number: int, call: Call) -> dict[int, Any]:
    """The tensors among the arguments, by position; the call keeps the other arguments."""
    tensors: dict[int, Any] = {}
    for at, given in enumerate(call.args):
        if isinstance(given, Tensor):
            tensors[at], call.args[at] = given, None
            _read(log, number, call, at, -1, given)
        elif isinstance(given, (list, tuple)) and any(isinstance(one, Tensor) for one in given):
            tensors[at], call.args[at] = [one for one in given if one is not None], [None] * len(given)
            for place, one in enumerate(given):
                if one is not None:
                    _read(log, number, call, at, place, one)
        elif isinstance(given, _UNREPEATED) or (isinstance(given, (list, tuple)) and _is_nested(given)):
            call.args[at], call.usable = None, False
            tensors[at] = given if isinstance(given, (list, tuple)) and _is_nested(given) else ()
    return tensors


def _is_nested(given: Any) -> bool:
    return any(isinstance(one, (list, *_UNREPEATED)) for one in given)


def _read(log: Log, number: int, call: Call, at: int, place: int, tensor: Tensor) -> None:
    if not is_plain(tensor):
        call.usable = False
        return
    v = log.value_or_new(tensor, call.rule.slack if at in call.rule.writes else 0)
    x, shape = log.values[v], geometry_of(tensor)
    same = shape == x.made
    if not same and shape.extent > x.made.extent:  # it shows memory that its call has not made
        if x.state == DROPPED:
            call.usable = False
        else:
            x.call = -1
    if log.times is not None:
        log.times.read(number, len(call.reads), v, tensor)
    call.reads.append(Read(at, place, v, None if same else shape))


def about_to_write(log: Log, call: Call, tensor: Tensor, writes: Writes) -> None:
    """Note a memory that the call will write, and copy what it contains if rebuilds need that."""
    if not is_plain(tensor, in_any_bits=True):
        return
    v = log.value_or_new(tensor, call.rule.slack)
    x = log.values[v]
    if x.held is not None and not x.copied and x.refs > x.saves and not call.rule.reshapes:
        now = x.held if x.elsewhere is None else x.elsewhere.bring(x)
        if x.elsewhere is None or not x.elsewhere.is_other:
            x.held, x.copied, x.state = copy_of(now, x.made), True, HELD
    if x.elsewhere is not None and not call.rule.reshapes:
        x.elsewhere.settle()
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
        v = log.new_memory(tensor, number)
        log.values[v].out = out
        log.calls[number].outs.append(v)
        if log.times is not None:
            log.times.made(log.calls[number], number, v, tensor)
