"""Torch's global flags on which a kernel's bits depend: recorded in the forward pass, set for a rebuild."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch


class _Flag(NamedTuple):
    get: Callable[[], Any]
    set: Callable[[Any], None]


def _plain(get: str, set_: str) -> list[_Flag]:
    """A flag of `torch._C`; an empty list where this release of torch lacks it."""
    there = hasattr(torch._C, get) and hasattr(torch._C, set_)
    return [_Flag(getattr(torch._C, get), getattr(torch._C, set_))] if there else []


def _precision(backend: str, operation: str) -> list[_Flag]:
    """The precision inside float32 products (TF32, bfloat16 or full)."""
    get = getattr(torch._C, "_get_fp32_precision_getter", None)
    set_ = getattr(torch._C, "_set_fp32_precision_setter", None)
    if get is None or set_ is None:
        return []
    return [_Flag(partial(get, backend, operation), partial(set_, backend, operation))]


_FLAGS: list[_Flag] = [
    *_plain("_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    _Flag(torch.get_num_threads, torch.set_num_threads),
    _Flag(torch._C._get_deterministic_algorithms, torch._C._set_deterministic_algorithms),
    *_plain("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    *_plain("_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
    *_precision("mkldnn", "matmul"),
    *_precision("mkldnn", "conv"),
]
if torch.backends.cuda.is_built():
    _FLAGS += [
        *_plain("_get_cudnn_enabled", "_set_cudnn_enabled"),
        *_plain("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
        *_precision("cuda", "matmul"),
        *_precision("cuda", "conv"),
    ]
_GETTERS = tuple(flag.get for flag in _FLAGS)


class Flags(tuple[Any, ...]):
    """The values of all flags; equal values are the same object."""

    __slots__ = ()
    __hash__ = tuple.__hash__

    @property
    def benchmark(self) -> bool:
        """Does cuDNN time a convolution's algorithms, in each thread by itself, and use the fastest?"""
        return bool(self[0])

    @contextmanager
    def set(self) -> Iterator[None]:
        """Set these flags within the context; those that have the value already are not touched."""
        changes = [
            (flag, ours, theirs)
            for flag, ours, theirs in zip(_FLAGS, self, current(), strict=True)
            if ours != theirs
        ]
        try:
            for flag, ours, _ in changes:
                flag.set(ours)
            yield
        finally:
            for flag, _, theirs in changes:
                flag.set(theirs)


_KNOWN: dict[tuple[Any, ...], Flags] = {}


def current() -> Flags:
    """The flags now."""
    now = tuple([get() for get in _GETTERS])
    known = _KNOWN.get(now)
    return known if known is not None else _KNOWN.setdefault(now, Flags(now))


class FlagLog:
    """The flags during one forward pass, by the sequence numbers of its nodes.

    A norm or a product saves its inputs while it runs. So the flags read at each save are those under which
    the saving node ran.
    """

    def __init__(self, since: int) -> None:
        self._since = since
        self._from, self._flags = [-1], [current()]
        self._last = -1

    def record(self, number: int) -> None:
        """Record the flags while a tensor is saved; `number` is the next node's sequence number."""
        if number == self._last:  # the same node saves another tensor
            return
        self._last, now = number, current()
        if now is not self._flags[-1]:
            self._from.append(number)
            self._flags.append(now)

    def of(self, node: int) -> tuple[Flags, bool]:
        """The flags under which the node with this sequence number ran, and True.

        If that is not sure: the flags now, and False. While a node runs, the next number is 1 above the
        node's, or a little more if it made inner nodes.
        """
        i = bisect_right(self._from, node + 1) - 1
        soon = i + 1 < len(self._from) and self._from[i + 1] <= node + 3
        sure = not soon and node >= self._since
        return self._flags[i if sure else -1], sure
