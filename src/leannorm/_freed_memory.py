"""Keep freed memory in the process: large blocks that go back to the system cost page faults again."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of glibc's malloc.h
_OTHER_ALLOCATORS = {"mallctl": "jemalloc", "tc_malloc": "tcmalloc", "mi_malloc": "mimalloc"}


@dataclass(frozen=True)
class FreedMemory:
    """Whether freed memory is kept (also the truth value), and what was done or why it was not.

    >>> import leannorm
    >>> print(leannorm.FreedMemory(False, "the C library is not glibc"))
    the C library is not glibc
    """

    kept: bool
    detail: str

    def __bool__(self) -> bool:
        return self.kept

    def __str__(self) -> str:
        return self.detail


def keep_freed_memory() -> FreedMemory:
    """Stop the C allocator from returning large freed blocks to the system, in this process, for good.

    glibc returns every block above 32 MiB (and often smaller ones) to the system when it is freed; the next
    training step faults its pages in again, one by one, which can take half of the step on the CPU. This sets
    `mallopt(M_MMAP_MAX, 0)` and `mallopt(M_TRIM_THRESHOLD, -1)`: freed blocks are reused. The process then
    keeps its high-water mark until it ends. It has no effect on GPU memory.

    Returns: what was done, or the reason why it was not (another system, C library or allocator). A
    second call changes nothing.
    Raises: nothing.
    Source: mallopt(3).

    >>> import leannorm
    >>> result = leannorm.keep_freed_memory()
    >>> bool(result) == result.kept
    True
    """
    reason = _why_not()
    if reason:
        return FreedMemory(False, f"freed memory is not kept: {reason}")
    mallopt = ctypes.CDLL(None).mallopt
    if not (mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, -1)):
        return FreedMemory(False, "freed memory is not kept: glibc refused the setting")
    return FreedMemory(True, "freed memory is kept (glibc: no mmap, no trim)")


def _why_not() -> str | None:
    if sys.platform != "linux":
        return f"only Linux with glibc has the setting, and this is {sys.platform}"
    process = ctypes.CDLL(None)
    for symbol, name in _OTHER_ALLOCATORS.items():
        if hasattr(process, symbol):
            return f"{name} is used by this process in place of glibc's allocator and has settings of its own"
    if not hasattr(process, "gnu_get_libc_version"):
        return "the C library is not glibc"
    return None
