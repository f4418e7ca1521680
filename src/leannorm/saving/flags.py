"""Torch's global flags that change a kernel's bits: recorded in the forward pass, set for a rebuild."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch


class _Flag(NamedTuple):
    """`get()` is the value that kernels see, `set` changes it, and `restore(state())` changes nothing."""

    get: Callable[[], Any]
    set: Callable[[Any], object]
    state: Callable[[], Any]
    restore: Callable[[Any], object]

    @staticmethod
    def plain(get: Callable[[], Any], set_: Callable[[Any], object]) -> _Flag:
        return _Flag(get, set_, get, set_)


def _plain(*names: str) -> list[_Flag]:
    """Flags of `torch._C`, by the name behind `_get_` and `_set_`, if this release of torch has them."""
    flags = []
    for name in names:
        get, set_ = (getattr(torch._C, f"_{verb}_{name}", None) for verb in ("get", "set"))
        if get is not None and set_ is not None:
            flags.append(_Flag.plain(get, partial(_give, set_)))
    return flags


def _give(set_: Callable[..., None], value: Any) -> None:
    set_(*value) if isinstance(value, tuple) else set_(value)


# None if this torch has one precision for all backends
_get_precision: Any = getattr(torch._C, "_get_fp32_precision_getter", None)
_set_precision: Any = getattr(torch._C, "_set_fp32_precision_setter", None)
_OTHER = {"ieee": "tf32"}  # a precision that differs from the given one: "ieee" if it is not listed


def _precision(*places: tuple[str, str]) -> list[_Flag]:
    """Flags of the precision inside float32 products (TF32, bfloat16 or full), by (backend, operation)."""
    if _get_precision is None or _set_precision is None:
        return []
    return [
        _Flag(
            partial(_get_precision, *at),
            partial(_prescribe, *at),
            partial(_own, *at),
            partial(_set_precision, *at),
        )
        for at in places
    ]


def _prescribe(backend: str, operation: str, precision: str) -> None:
    """Make kernels see `precision`. "none" is full precision that nobody has set, and inherits: if another
    one would be inherited, set "ieee"."""
    _set_precision(backend, operation, precision)
    if _get_precision(backend, operation) != precision:
        _set_precision(backend, operation, "ieee")


def _follows(at: tuple[str, str], above: tuple[str, str]) -> bool:
    """Whether `at` inherits the precision of `above`. Torch does not say, so `above` is changed for a moment
    and `at` is read."""
    now, before = _get_precision(*at), _own(*above)
    _set_precision(*above, _OTHER.get(now, "ieee"))
    try:
        return bool(_get_precision(*at) != now)
    finally:
        _set_precision(*above, before)


def _own(backend: str, operation: str) -> str:
    """The precision that is set here, or "none" if it is inherited from the backend or from all backends."""
    at, above = (backend, operation), (backend, "all") if operation != "all" else ("generic", "all")
    now: str = _get_precision(*at)
    inherited = at != above and _get_precision(*above) == now and _follows(at, above)
    return "none" if inherited else now


_CONV, _PRODUCTS, _CUDA = ("cuda", "conv"), ("cuda", "matmul"), ("cuda", "all")


def _cudnn() -> list[_Flag]:
    """The precision of cuDNN's convolutions.

    At first it is TF32 unless a precision is set above it; no setter restores that state. So while it follows
    what is above, this sets the precision above, and sets that of cuBLAS's products back.
    """
    if _get_precision is None or _set_precision is None:
        return []
    get, set_ = _get_precision, _set_precision

    def state() -> tuple[str | None, str, str]:
        return None if _follows(_CONV, _CUDA) else get(*_CONV), _own(*_CUDA), _own(*_PRODUCTS)

    def prescribe(precision: str) -> None:
        if not _follows(_CONV, _CUDA):
            return _prescribe(*_CONV, precision)
        products = get(*_PRODUCTS)
        set_(*_CUDA, precision)
        if get(*_CONV) != precision:
            set_(*_CUDA, "ieee")
        if get(*_PRODUCTS) != products:
            _prescribe(*_PRODUCTS, products)

    def restore(before: tuple[str | None, str, str]) -> None:
        own, above, products = before
        if own is not None:
            set_(*_CONV, own)
        set_(*_CUDA, above)
        set_(*_PRODUCTS, products)

    return [_Flag(partial(get, *_CONV), prescribe, state, restore)]


_deterministic = torch._C._get_deterministic_algorithms
_only_warns = torch._C._get_deterministic_algorithms_warn_only  # instead of raising an error


def _set_deterministic(value: bool) -> None:
    torch._C._set_deterministic_algorithms(value, warn_only=_only_warns())


def _set_only_warns(value: bool) -> None:
    torch._C._set_deterministic_algorithms(_deterministic(), warn_only=value)


# Torch does not say whether this thread flushes denormal numbers; if it does, the smallest one equals 0
_flushes: Callable[[], bool] = partial(struct.unpack("<d", (1).to_bytes(8, "little"))[0].__eq__, 0.0)


_FLAGS: list[_Flag] = [
    *_plain("cudnn_benchmark"),
    _Flag.plain(torch.get_num_threads, torch.set_num_threads),
    _Flag.plain(_deterministic, _set_deterministic),
    _Flag.plain(_only_warns, _set_only_warns),
    _Flag.plain(_flushes, torch.set_flush_denormal),
    *_plain("mkldnn_enabled", "mkldnn_deterministic", "nnpack_enabled"),
    *_plain("cpu_allow_fp16_reduced_precision_reduction"),
    *_precision(("mkldnn", "matmul"), ("mkldnn", "conv")),
]
if torch.backends.cuda.is_built():
    _FLAGS += [
        *_plain("cudnn_enabled", "cudnn_deterministic", "cublas_allow_fp16_accumulation"),
        *_plain("cublas_allow_fp16_reduced_precision_reduction"),
        *_plain("cublas_allow_bf16_reduced_precision_reduction"),
        *_precision(("cuda", "matmul")),
        *_cudnn(),
    ]
GETTERS = tuple(flag.get for flag in _FLAGS)


class Flags(tuple[Any, ...]):
    """The values of all flags; equal values are the same object."""

    __slots__ = ()
    __hash__ = tuple.__hash__

    @staticmethod
    def now() -> Flags:
        """The flags now; csrc/nodes/record/log.h calls it."""
        return current()

    @contextmanager
    def set(self) -> Iterator[None]:
        """Set these flags within the context, except those that have the value already."""
        pairs = zip(_FLAGS, self, current(), strict=True)
        changes = [(flag, ours, flag.state()) for flag, ours, theirs in pairs if ours != theirs]
        try:
            for flag, ours, _ in changes:
                flag.set(ours)
            yield
        finally:
            for flag, _, state in reversed(changes):
                flag.restore(state)


_KNOWN: dict[tuple[Any, ...], Flags] = {}


def current() -> Flags:
    """The flags now."""
    now = tuple([get() for get in GETTERS])
    known = _KNOWN.get(now)
    return known if known is not None else _KNOWN.setdefault(now, Flags(now))


_AS_IT_IS = nullcontext()


def without_autocast() -> AbstractContextManager[object]:
    """Turn autocast off, since a rebuild calls kernels with the dtypes that the forward pass gave them."""
    if not torch._C._is_any_autocast_enabled():
        return _AS_IT_IS
    stack = ExitStack()
    for device in ("cpu", "cuda", "xpu", "mps"):
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack
