"""What `lean()` remembers from one pass to the next, and a context without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from leannorm.saving import limit, plans, reasons, small, watched

_STORES: tuple[Any, ...] = (plans.KNOWN, small.LEFT_ALONE, watched.WATCHED, limit.LEARNED, reasons.WARNED)


@contextmanager
def nothing_remembered() -> Iterator[None]:
    """As in a new process: the plans, measurements and warnings of earlier passes do not count within the
    context, and those of the context do not count after it."""
    before = [store.copy() for store in _STORES]
    forget()
    try:
        yield
    finally:
        forget()
        for store, then in zip(_STORES, before, strict=True):
            store.update(then)


def forget() -> None:
    """Let no earlier pass count any more."""
    for store in _STORES:
        store.clear()
