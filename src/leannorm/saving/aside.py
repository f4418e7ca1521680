"""Where torch admits no saved-tensor hooks, a pass takes its own away and sets them again afterwards.

torch.func's transforms and `torch.autograd.graph.disable_saved_tensors_hooks` raise where hooks are set. Both
ask by one function of torch and end by another; while a pass is open, these two are replaced by those below.
What is saved in between is held, as without `lean()`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

_autograd: Any = torch._C._autograd
_DISABLE, _ENABLE = "_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable"
_disable_in_torch, _enable_in_torch = getattr(_autograd, _DISABLE), getattr(_autograd, _ENABLE)


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.open: list[PassHooks] = []  # set, or taken away for a while
        self.aside = False


_thread = _OfThread()
_lock = threading.Lock()
_passes = 0  # open in all threads


class PassHooks:
    """Saved-tensor hooks, set within the context. `stepped_aside`: were they taken away for a part of it?"""

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        self._hooks = pack, unpack
        self.stepped_aside = self._is_gone = False

    def __enter__(self) -> PassHooks:
        _count(1)
        _thread.open.append(self)
        self._set()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_gone:
            return
        _count(-1)
        _thread.open.remove(self)
        if not _thread.aside:
            self._take_away()
        _thread.aside = _thread.aside and bool(_thread.open)

    def remove(self) -> bool:
        """Take these hooks away before the context ends, where `replace` could replace the first."""
        if not (self in _thread.open and self._is_on_top()):
            return False
        _count(-1)
        _thread.open.remove(self)
        _autograd._pop_saved_tensors_default_hooks()
        self._is_gone = True
        return True

    def _take_away(self) -> None:
        """These hooks, and no others: of tasks that take turns in one thread, the first to end may lie below
        the others."""
        above = list[tuple[Any, Any]]()
        while (top := _autograd._top_saved_tensors_default_hooks(True)) is not None:
            _autograd._pop_saved_tensors_default_hooks()
            if top == self._hooks:
                break
            above.append(top)
        for hooks in reversed(above):
            _autograd._push_saved_tensors_default_hooks(*hooks)

    def replace(self, make: Callable[[], tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]]) -> bool:
        """Other hooks, from the next tensor on, if these hooks are this thread's and lie on top. For the
        first hook itself, which torch calls where it does."""
        if not (self in _thread.open and self._is_on_top()):
            return False
        hooks = make()
        _autograd._pop_saved_tensors_default_hooks()
        self._hooks = hooks
        self._set()
        return True

    def _set(self) -> None:
        _autograd._push_saved_tensors_default_hooks(*self._hooks)

    def _is_on_top(self) -> bool:
        return bool(_autograd._top_saved_tensors_default_hooks(True) == self._hooks)


def _disable(message: str, fail_if_non_empty: bool = True) -> None:
    taken = list[PassHooks]()
    if fail_if_non_empty and not _thread.aside:
        for hooks in reversed(_thread.open):
            if not hooks._is_on_top():
                break
            _autograd._pop_saved_tensors_default_hooks()
            taken.append(hooks)
    try:
        _disable_in_torch(message, fail_if_non_empty)
    except RuntimeError:  # others' hooks lie below
        for hooks in reversed(taken):
            hooks._set()
        raise
    if taken:
        _thread.aside = True
        for hooks in taken:
            hooks.stepped_aside = True


def _enable() -> None:
    _enable_in_torch()
    if _thread.aside:
        _thread.aside = False
        for hooks in _thread.open:
            hooks._set()


def _count(more: int) -> None:
    """Torch's two functions are its own where no pass is open."""
    global _passes
    with _lock:
        _passes += more
        if _passes == more == 1:
            setattr(_autograd, _DISABLE, _disable)
            setattr(_autograd, _ENABLE, _enable)
        elif not _passes:
            setattr(_autograd, _DISABLE, _disable_in_torch)
            setattr(_autograd, _ENABLE, _enable_in_torch)
