"""Where torch allows no saved-tensor hooks, a pass removes its own and sets them again afterwards.

torch.func's transforms and `torch.autograd.graph.disable_saved_tensors_hooks` raise if hooks are set. Both
begin with one function of torch and end with another. While a pass is open, these two functions are replaced
by those below. What is saved in between is kept, as without `lean()`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from threading import get_ident
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from leannorm.autograd.nodes import NODES
from leannorm.saving import recorded_pass, timing

_autograd: Any = torch._C._autograd
_DISABLE, _ENABLE = "_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable"
_disable_in_torch, _enable_in_torch = getattr(_autograd, _DISABLE), getattr(_autograd, _ENABLE)


Pair = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.aside: list[Pair] = []  # the hooks that are removed now, the innermost first
        self.last = 0  # how many passes this process had opened when hooks were last removed


_thread = _OfThread()
_lock = threading.Lock()
_passes = 0  # open in all threads


class PassHooks:
    """Saved-tensor hooks of the pass with this number, set within the context. `stepped_aside`: whether they
    were removed for a while."""

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor], number: int) -> None:
        self._hooks, self._number, self._of = (pack, unpack), number, get_ident()
        self.stepped_aside = self._is_gone = False
        self._removed: Pair | None = None
        """What was set first. A backward pass within the context removes it only from its own copy."""

    def __enter__(self) -> PassHooks:
        _count(1)
        self._set()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_gone:
            self._end()
            take_away(self._hooks)
        if self._removed is not None and _top() == self._removed:
            _autograd._pop_saved_tensors_default_hooks()

    def remove(self) -> bool:
        """Remove these hooks before the context ends, if they are this thread's and on top."""
        if not self.is_on_top():
            return False
        self._end()
        _autograd._pop_saved_tensors_default_hooks()
        self._removed = self._hooks
        return True

    def _end(self) -> None:
        _count(-1)
        self._is_gone, self.stepped_aside = True, _thread.last >= self._number

    def replace(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        """Set other hooks from the next tensor on, if these are on top. The first hook may call it while
        torch runs that hook."""
        if self.is_on_top():
            _autograd._pop_saved_tensors_default_hooks()
            self._removed, self._hooks = self._hooks, (pack, unpack)
            self._set()

    def _set(self) -> None:
        _autograd._push_saved_tensors_default_hooks(*self._hooks)

    def is_on_top(self) -> bool:
        """Whether these hooks are this thread's, and on top."""
        return not self._is_gone and get_ident() == self._of and _top() == self._hooks


def take_away(hooks: Pair) -> None:
    """Remove these hooks and no others: if tasks alternate in one thread, the hooks of the first to end may
    be below those of the others."""
    if hooks in _thread.aside:
        _thread.aside.remove(hooks)
        return
    above = list[Pair]()
    while (top := _top()) is not None:
        _autograd._pop_saved_tensors_default_hooks()
        if top == hooks:
            break
        above.append(top)
    for one in reversed(above):
        _autograd._push_saved_tensors_default_hooks(*one)


def _top() -> Pair | None:
    top: Pair | None = _autograd._top_saved_tensors_default_hooks(True)
    return top


def _disable(message: str, fail_if_non_empty: bool = True) -> None:
    taken = list[Pair]()
    while fail_if_non_empty and (top := _top()) is not None and top[1] == recorded_pass.LOG.record_unpack:
        _autograd._pop_saved_tensors_default_hooks()
        taken.append(top)
    try:
        _disable_in_torch(message, fail_if_non_empty)
    except RuntimeError:  # there are others' hooks below these
        for hooks in reversed(taken):
            _autograd._push_saved_tensors_default_hooks(*hooks)
        raise
    if taken:
        _thread.aside, _thread.last = taken, timing.passes()


def _enable() -> None:
    _enable_in_torch()
    taken, _thread.aside = _thread.aside, []
    for hooks in reversed(taken):
        _autograd._push_saved_tensors_default_hooks(*hooks)


def _count(more: int) -> None:
    """Count open passes: torch gets its own two functions back when none is open. Where there are C++ nodes,
    these count, as they open passes too."""
    global _passes
    with _lock:
        _passes += more
        if _passes == more == 1 or not _passes:
            for name, functions in _FUNCTIONS.items():
                setattr(_autograd, name, functions[_passes])


_FUNCTIONS = {_DISABLE: (_disable_in_torch, _disable), _ENABLE: (_enable_in_torch, _enable)}
"""Torch's two functions: by name, the one that it has while no pass is open, and the other one."""

if NODES is not None:
    NODES.set_aside(_autograd, _FUNCTIONS)
    _count = NODES.count_passes
