"""Is a rebuilt tensor the original, bit for bit? Tried once for every kind of step, layout and dtype.

Rounding depends on kernels, compilers and processors; rather than trust a table of them, a step is run
the first time that its like is met and its answer compared with the tensor. What differs is held.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from time import perf_counter

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from leannorm.saving.device import check_not_capturing, synchronize
from leannorm.saving.values import Step, Value, run, without_autocast

_SEEN: dict[Hashable, float | None] = {}
_MOST = 1 << 14
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def seconds(step: Step, tensor: Tensor, seen_as: Hashable) -> float | None:
    """The time of one rebuild, measured at the first of its kind; None if it is not exact."""
    if isinstance(tensor, FakeTensor):
        return 0.0
    key = (step.constants, *map(_signature_of, step.inputs), seen_as, tensor.device, torch.get_num_threads())
    if key not in _SEEN:
        check_not_capturing(tensor, f"{step.constants or step.kind} of shape {tuple(tensor.shape)}")
        if len(_SEEN) >= _MOST:  # shapes that never repeat: forget rather than grow
            _SEEN.clear()
        _SEEN[key] = _try(step, tensor)
    return _SEEN[key]


def layout(tensor: Tensor) -> tuple[Hashable, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _try(step: Step, tensor: Tensor) -> float | None:
    with torch.no_grad(), without_autocast():
        packed = [value.look() if value.layout or value.step is None else None for value in step.inputs]

        def rebuilt() -> Tensor:
            pairs = zip(packed, step.inputs, strict=True)  # what nobody packed is part of this rebuild
            return run(step, [(value.look() if tensor is None else tensor, False) for tensor, value in pairs])

        spent, again = _timed(rebuilt, tensor)
        if layout(again) != layout(tensor) or not _same_bits(again, tensor.detach()):
            return None
        del again
        second, _ = _timed(rebuilt, tensor)  # the first call may have compiled its kernel, or chosen it
        return min(spent, second)


def _timed(rebuilt: Callable[[], Tensor], like: Tensor) -> tuple[float, Tensor]:
    synchronize(like)
    start = perf_counter()
    again = rebuilt()
    synchronize(like)
    return perf_counter() - start, again


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if a.is_floating_point():  # a NaN equals itself here
        a, b = (v.view(_INTEGERS[v.element_size()]) for v in (a, b))
    return torch.equal(a, b)


def _signature_of(value: Value) -> Hashable:
    """A packed value's layout says where it comes from no further than needed: it is exact itself."""
    if value.layout is not None:
        return value.layout
    step = value.step
    if step is not None:
        return (step.constants, *map(_signature_of, step.inputs))
    return layout(value.tensor) if value.tensor is not None else None
