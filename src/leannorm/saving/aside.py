"""Where torch allows no saved-tensor hooks, a pass removes its own and sets them again afterwards.

torch.func's transforms and `torch.autograd.graph.disable_saved_tensors_hooks` raise if hooks are set. Both
begin with one function of torch and end with another. While a pass is open, these two functions are replaced
by those below. What is saved in between is kept, as without `lean()`.
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
        self.open: list[PassHooks] = []  # the hooks that are set, or removed for a while
        self.aside = False  # whether they are removed now


_thread = _OfThread()
_lock = threading.Lock()
_passes = 0  # open in all threads


class PassHooks:
    """Saved-tensor hooks, set within the context. `stepped_aside`: whether they were removed for a while."""

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
        """Remove these hooks before the context ends, if they are this thread's and on top."""
        if not self.is_on_top():
            return False
        _count(-1)
        _thread.open.remove(self)
        _autograd._pop_saved_tensors_default_hooks()
        self._is_gone = True
        return True

    def _take_away(self) -> None:
        """Remove these hooks and no others: if tasks alternate in one thread, the hooks of the first to end
        may be below those of the others."""
        above = list[tuple[Any, Any]]()
        while (top := _autograd._top_saved_tensors_default_hooks(True)) is not None:
            _autograd._pop_saved_tensors_default_hooks()
            if top == self._hooks:
                break
            above.append(top)
        for hooks in reversed(above):
            _autograd._push_saved_tensors_default_hooks(*hooks)

    def replace(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        """Set other hooks from the next tensor on, if these are on top. The first hook may call it while
        torch runs that hook."""
        if self.is_on_top():
            _autograd._pop_saved_tensors_default_hooks()
            self._hooks = pack, unpack
            self._set()

    def _set(self) -> None:
        _autograd._push_saved_tensors_default_hooks(*self._hooks)

    def is_on_top(self) -> bool:
        """Whether these hooks are this thread's, and on top."""
        return self in _thread.open and _autograd._top_saved_tensors_default_hooks(True) == self._hooks


def _disable(message: str, fail_if_non_empty: bool = True) -> None:
    taken = list[PassHooks]()
    if fail_if_non_empty and not _thread.aside:
        for hooks in reversed(_thread.open):
            if not hooks.is_on_top():
                break
            _autograd._pop_saved_tensors_default_hooks()
            taken.append(hooks)
    try:
        _disable_in_torch(message, fail_if_non_empty)
    except RuntimeError:  # there are others' hooks below these
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
    """Count open passes: torch gets its own two functions back when none is open."""
    global _passes
    with _lock:
        _passes += more
        if _passes == more == 1:
            setattr(_autograd, _DISABLE, _disable)
            setattr(_autograd, _ENABLE, _enable)
        elif not _passes:
            setattr(_autograd, _DISABLE, _disable_in_torch)
            setattr(_autograd, _ENABLE, _enable_in_torch)
