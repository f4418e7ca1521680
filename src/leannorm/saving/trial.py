"""Does a step rebuild its tensor bit for bit? Tried once for every kind of step, layout and dtype.

Rounding depends on kernels, compilers and processors. So the first step of each kind is run, and its result
is compared with the saved tensor; if they differ, tensors of that kind are held. A step that is not proved to
read what its node read is compared every time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from time import perf_counter

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from leannorm.saving.device import asynchronous, capturing, synchronize
from leannorm.saving.evidence import bits
from leannorm.saving.flags import current
from leannorm.saving.values import Owner, Step, Value, run

_SEEN: dict[Hashable, float | None] = {}
_MAX_SEEN = 1 << 14
_AS_IT_IS = nullcontext()


class NotTriedError(Exception):
    """A CUDA graph is being captured, so no value can be read for a comparison."""


def seconds(step: Step, tensor: Tensor, seen_as: Hashable) -> float | None:
    """The time of one rebuild, measured at the first of its kind; None if its bits differ."""
    if isinstance(tensor, FakeTensor):
        return 0.0
    key = (_key(step), seen_as, tensor.device)
    proved = _proved(step)
    if key not in _SEEN or not proved:
        if capturing(tensor):
            raise NotTriedError(
                f"a step for shape {tuple(tensor.shape)} was not tried before this CUDA graph's capture: run"
                " a forward and backward pass with the same settings and shapes before it"
            )
        found = _try(step, tensor)
        if found is None and not (proved or asynchronous(tensor)):
            return None  # not stored: the step may be exact, its input stale; a device is not asked twice
        if len(_SEEN) >= _MAX_SEEN:  # shapes that never repeat: start over rather than grow
            _SEEN.clear()
        _SEEN[key] = found
        return found
    return _SEEN[key]


def layout(tensor: Tensor) -> tuple[Hashable, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def without_autocast() -> AbstractContextManager[object]:
    """Turns autocast off, as a rebuild repeats kernels with the dtypes of the forward pass."""
    if not torch._C._is_any_autocast_enabled():
        return _AS_IT_IS
    stack = ExitStack()
    for device in ("cpu", "cuda", "xpu", "mps"):
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def _try(step: Step, tensor: Tensor) -> float | None:
    with torch.no_grad(), without_autocast():
        packed = [value.look() if value.layout or value.step is None else None for value in step.inputs]

        def rebuilt() -> Tensor:
            pairs = zip(packed, step.inputs, strict=True)  # an input that was not packed is rebuilt here
            inputs = [(value.look() if tensor is None else tensor, Owner.HELD) for tensor, value in pairs]
            return run(step, inputs, current())[0]

        spent, again = _timed(rebuilt, tensor)
        if layout(again) != layout(tensor) or not same_bits(again, tensor.detach()):
            return None
        del again
        second, _ = _timed(rebuilt, tensor)  # the first call may have compiled or selected its kernel
        return min(spent, second)


def _timed(rebuilt: Callable[[], Tensor], like: Tensor) -> tuple[float, Tensor]:
    synchronize(like)
    start = perf_counter()
    again = rebuilt()
    synchronize(like)
    return perf_counter() - start, again


def _key(step: Step) -> Hashable:
    """All that decides the bits of a rebuild, except its inputs' values."""
    captured = tuple([None if t is None else layout(t) for t in step.captured])
    inputs = tuple([_signature_of(value) for value in step.inputs])
    return step.function, step.constants, captured, inputs, step.flags


def _signature_of(value: Value) -> Hashable:
    """The layout of a packed value, which was compared itself; for another value, the key of its step."""
    if value.layout is not None:
        return value.layout
    if value.step is not None:
        return _key(value.step)
    return layout(value.tensor) if value.tensor is not None else None


def _proved(step: Step) -> bool:
    """Is it proved that every tensor that the step depends on holds what its node read?"""
    return step.proved and all(
        value.step is None or value.layout is not None or _proved(value.step) for value in step.inputs
    )
