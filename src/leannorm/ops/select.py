"""Which backend computes a call, and why the others cannot."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from leannorm._errors import BackendUnavailableError, InputError
from leannorm.ops.backends import ATEN, BACKENDS, CPU, TRITON, Backend
from leannorm.ops.backends.compiled import DTYPES
from leannorm.ops.modes import traced
from leannorm.ops.modes import transformed as transformed

AUTO = "auto"
_PICKED: dict[Hashable, Backend] = {}
_cpu_serves: bool | None = None  # not known yet
_chosen = os.environ.get("LEANNORM_BACKEND", AUTO)
_DTYPES = frozenset(DTYPES)
_LARGE = 1 << 16  # elements of a tensor from which on missing kernels matter
_warned = False


def _named(name: str) -> Backend:
    if name not in BACKENDS:
        known = ", ".join((AUTO, *BACKENDS))
        raise InputError(f"unknown backend {name!r}; choose one of: {known}")
    return BACKENDS[name]


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the context every call uses the backend `name`, or raises; `auto` chooses again.

    The setting is process-wide, as torch's own backend flags are: do not change it from several threads at
    once.

    Raises: `InputError` for an unknown name; within the context, `BackendUnavailableError` for a call that
    the backend cannot compute.

    >>> import torch, leannorm
    >>> with leannorm.use_backend("reference"):
    ...     leannorm.functional.rms_norm(torch.ones(1, 2), (2,))
    tensor([[1.0000, 1.0000]])
    """
    global _chosen
    if name != AUTO:
        _named(name)
    before, _chosen = _chosen, name
    try:
        yield
    finally:
        _chosen = before


def pick(*tensors: Tensor | None) -> Backend:
    """The backend for a call on these tensors: the one chosen by name, otherwise the first that can compute
    it."""
    if not traced() and picks_cpu():
        for t in tensors:
            if t is not None and not (t.is_cpu and t.dtype in _DTYPES and t.layout is torch.strided):
                break
        else:
            return CPU
    if _chosen != AUTO:
        backend = _named(_chosen)
        reasons = backend.why_not(*tensors, named=True)
        if reasons:
            raise BackendUnavailableError(_chosen, reasons)
        return backend
    return first_of_all(*tensors)


def picks_cpu() -> bool:
    """Whether `pick` would choose the CPU's kernels for any dense CPU tensors of a dtype that they take."""
    global _cpu_serves
    if _cpu_serves is None:
        _cpu_serves = not CPU.why_not()
    return _cpu_serves and (_chosen == AUTO or _chosen == CPU.name)


def picks_aten(x: Tensor) -> bool:
    """Whether `pick` would choose torch's kernels for CPU tensors like this one of a dtype that they take."""
    if _chosen != AUTO:
        return _chosen == ATEN.name
    if picks_cpu():
        return False
    if not _warned:
        _warn_of_missing_kernels((x,))
    return True


def picks_triton(x: Tensor) -> bool:
    """Whether `pick` would choose Triton's kernels for tensors like this one."""
    if x.layout is not torch.strided:
        return False
    if _chosen != AUTO:
        return _chosen == TRITON.name and not TRITON.why_not(x, named=True)
    return first_of_all(x) is TRITON


def first_of_all(*tensors: Tensor | None) -> Backend:
    """The first backend that can compute on these tensors, whichever was chosen by name."""
    if traced():
        return _first(tensors)
    # cached: the choice depends on nothing else of the tensors
    kinds: list[Hashable] = []
    for t in tensors:
        if t is not None:
            kinds += (t.device, t.dtype, t.layout)
    key = tuple(kinds)
    backend = _PICKED.get(key)
    if backend is None:
        backend = _PICKED[key] = _first(tensors)
    if backend is ATEN and not _warned:
        _warn_of_missing_kernels(tensors)
    return backend


def _warn_of_missing_kernels(tensors: tuple[Tensor | None, ...]) -> None:
    """Warn that the C++ kernels are missing, once, at the first large tensor."""
    global _warned
    if any(t is not None and t.numel() >= _LARGE for t in tensors):
        _warned = True
        how = "To build its own, with a C++ compiler, run `pip install --no-build-isolation .` in its source"
        if sys.platform == "win32":
            how = "There are none for Windows"
        warnings.warn(
            f"leannorm normalizes on the CPU with torch's kernels, which take longer than its own: "
            f"{'; '.join(CPU.why_not())}. {how}",
            stacklevel=2,
        )


def _first(tensors: tuple[Tensor | None, ...]) -> Backend:
    for t in tensors:
        if t is not None and t.layout is not torch.strided:
            raise InputError(
                f"a norm's tensors must be dense (layout torch.strided), got one of shape {tuple(t.shape)} "
                f"with layout {t.layout}; convert it first with .to_dense()"
            )
    for backend in BACKENDS.values():
        if not backend.why_not(*tensors):
            return backend
    raise AssertionError("the reference takes every call")


def backends(*tensors: Tensor | None) -> dict[str, list[str]]:
    """For every backend, in order of preference, the reasons why it cannot be used (none: it can).

    With `tensors`, the reasons why it cannot be used for a call on these.

    Raises: nothing.

    >>> import torch, leannorm
    >>> leannorm.backends(torch.ones(2))["reference"]
    []
    """
    return {name: backend.why_not(*tensors) for name, backend in BACKENDS.items()}
