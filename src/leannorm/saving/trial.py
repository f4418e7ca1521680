"""Does a step rebuild its tensor bit for bit? Tried on two tensors of every kind of step, layout and dtype.

Rounding depends on kernels, compilers and processors. So the first steps of each kind are run, and the
results are compared with the saved tensors; if they differ, tensors of that kind are held. A tensor of one
value, or of zeros, tells nothing of others: its trial counts for itself alone. A step that is not proved to
read what its node read is compared every time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from math import gcd
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C import _get_dispatch_stack_at, _get_function_stack_at
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from leannorm.saving.device import asynchronous, capturing, synchronize
from leannorm.saving.evidence import bits, sample_of
from leannorm.saving.flags import current
from leannorm.saving.graph import exact
from leannorm.saving.steps import Owner, Step, run
from leannorm.saving.values import UNTOLD, Value

_ENOUGH = 2  # tensors of other values


class _Tried(NamedTuple):
    """The outcome for one kind of step: the seconds of a rebuild, None if the bits differed, and on what."""

    seconds: float | None
    on: tuple[bytes | None, ...] = ()

    def speaks_for(self, tensor: Tensor) -> bool:
        """Is no further trial needed for this tensor?"""
        if self.seconds is None or len(self.on) == _ENOUGH:
            return True
        sample = sample_of(tensor)
        return sample is not None and sample in self.on


_SEEN: dict[Hashable, _Tried] = {}
_MAX_SEEN = 1 << 14
_AS_IT_IS = nullcontext()


class NotTriedError(Exception):
    """A CUDA graph is being captured, so no value can be read for a comparison."""


def seconds(step: Step, tensor: Tensor, seen_as: Hashable) -> float | None:
    """The time of one rebuild, measured at the first of its kind; None if its bits differ."""
    if isinstance(tensor, FakeTensor):
        return 0.0
    key = (key_of(step), seen_as, tensor.device)
    is_proved, tried = proved(step) and not _under_modes(), _SEEN.get(key)
    speaks = tried is not None and tried.speaks_for(tensor)
    if tried is not None and speaks and (is_proved or tried.seconds is None):
        return tried.seconds
    if capturing(tensor):
        raise NotTriedError(
            f"a step for shape {tuple(tensor.shape)} was not tried before this CUDA graph's capture: run"
            f" {_ENOUGH} forward and backward passes with the same settings and shapes before it"
        )
    with torch.no_grad(), without_autocast(), _without_modes():
        if tried is not None and speaks:  # compared, since it may read something else than its node read
            return tried.seconds if _is(_rebuilt(step, _packed(step)), tensor) else None
        middle = _middle(step)
        spent = _try(step, tensor) if middle.as_told else None
    if spent is None:
        # else the step may be exact, its input stale; and NaNs of other payloads tell nothing of numbers
        if (is_proved or asynchronous(tensor)) and not bool(tensor.isnan().any()):
            _store(key, _Tried(None))
    elif middle.bits_told and _tells_of_others(tensor):
        on = () if tried is None else tried.on
        _store(key, _Tried(spent, (*on, sample_of(tensor))[-_ENOUGH:]))
    return spent


def is_settled(step: Step, tensor: Tensor, seen_as: Hashable) -> bool:
    """Does it rebuild every tensor that is made and laid out like this one, without another trial?"""
    tried = _SEEN.get((key_of(step), seen_as, tensor.device))
    settled = proved(step) and not _under_modes()
    return settled and tried is not None and tried.seconds is not None and len(tried.on) == _ENOUGH


WATCHING = {"torch.utils.flop_counter._FlopCounterMode", "torch.utils._device.DeviceContext"}
WATCHING.add("leannorm.head.defer.Heads")
"""Modes that change no result, by the names of their classes."""


def _under_modes() -> bool:
    """May a mode of the program change what operations give? The backward pass may run outside of it."""
    of_operators, of_functions = torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
    if not (of_operators or of_functions):
        return False
    modes: list[object] = [*map(_get_dispatch_stack_at, range(of_operators))]
    modes += map(_get_function_stack_at, range(of_functions))
    return any(f"{type(mode).__module__}.{type(mode).__qualname__}" not in WATCHING for mode in modes)


def _without_modes() -> AbstractContextManager[object]:
    """Turns the program's modes off, as a rebuild is to give what plain torch gives."""
    if not _under_modes():
        return _AS_IT_IS
    stack = ExitStack()
    stack.enter_context(_disable_current_modes())
    stack.enter_context(torch._C.DisableTorchFunction())
    return stack


def _store(key: Hashable, tried: _Tried) -> None:
    if len(_SEEN) >= _MAX_SEEN:  # shapes that never repeat: start over rather than grow
        _SEEN.clear()
    _SEEN[key] = tried


_SOME = 256


def _tells_of_others(tensor: Tensor) -> bool:
    """Has the tensor several values, of which some are normal numbers?"""
    flat, width = tensor.detach().reshape(-1), tensor.shape[-1] if tensor.dim() else 1
    step = max(len(flat) // _SOME, 1)
    while gcd(step, width) > 1:  # not one column: that of a padding token is zero in each row
        step += 1
    some = flat[::step].cpu()
    if not len(some) or bool((bits(some) == bits(some[:1])).all()):
        return False
    normal = torch.finfo(some.dtype).tiny if some.is_floating_point() or some.is_complex() else 1
    return bool((some.abs() >= normal).any()) if some.dtype is not torch.bool else True


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
    packed = _packed(step)

    def rebuilt() -> Tensor:
        return _rebuilt(step, packed)

    spent, again = _timed(rebuilt, tensor)
    if not _is(again, tensor):
        return None
    del again
    second, _ = _timed(rebuilt, tensor)  # the first call may have compiled or selected its kernel
    return min(spent, second)


def _is(again: Tensor, tensor: Tensor) -> bool:
    return layout(again) == layout(tensor) and same_bits(again, tensor.detach())


def _packed(step: Step) -> list[Tensor | None]:
    return [value.look() if value.layout or value.step is None else None for value in step.inputs]


def _rebuilt(step: Step, packed: list[Tensor | None]) -> Tensor:
    """The step's result; an input that was not packed is rebuilt here."""
    pairs = zip(packed, step.inputs, strict=True)
    inputs = [(value.look() if tensor is None else tensor, Owner.HELD) for tensor, value in pairs]
    return run(step, inputs, current())[0]


class _Middle(NamedTuple):
    """The tensors in the middle of a rebuild, which were not packed: do their nodes tell all of them?

    `as_told`: is each of the shape and dtype that its node tells? `layout_told`: is its layout known?
    `bits_told`: do no bits depend on a layout that is not known?
    """

    as_told: bool = True
    layout_told: bool = True
    bits_told: bool = True
    tensor: Tensor | None = None


def _middle(step: Step, value: Value | None = None) -> _Middle:
    """What the step reads; with `value`, which it rebuilds, also what it makes."""
    before = [_middle(v.step, v) for v in step.inputs if v.layout is None and v.step is not None]
    as_told = all(one.as_told for one in before)
    layout_told = all(one.layout_told for one in before)
    bits_told = all(one.bits_told for one in before) and (layout_told or step.in_any_layout)
    if value is None or not as_told:
        return _Middle(as_told, layout_told, bits_told)
    made = iter(before)
    inputs = [next(made).tensor if v.layout is None and v.step is not None else v.look() for v in step.inputs]
    tensors = [tensor for tensor in inputs if tensor is not None]
    tensor = run(step, [(tensor, Owner.HELD) for tensor in tensors], current())[0]
    if value.shape is not UNTOLD:
        as_told = (tensor.shape, tensor.dtype) == (value.shape, value.dtype)
    if not step.tells_layout:
        layout_told = layout_told and _has_one_layout(tensors[0])
    return _Middle(as_told, layout_told, bits_told, tensor)


def _has_one_layout(x: Tensor) -> bool:
    """Do copies of this tensor, and casts, have one layout, whatever memory format they ask for?"""
    return x.is_contiguous() and x.dim() not in (4, 5)


def _timed(rebuilt: Callable[[], Tensor], like: Tensor) -> tuple[float, Tensor]:
    synchronize(like)
    start = perf_counter()
    again = rebuilt()
    synchronize(like)
    return perf_counter() - start, again


def key_of(step: Step) -> Hashable:
    """All that decides the bits of a rebuild, except its inputs' values; and all that its node tells."""
    captured = tuple([None if t is None else layout(t) for t in step.captured])
    inputs = tuple([signature_of(value) for value in step.inputs])
    return step.function, exact(step.constants), captured, inputs, step.flags, step.identity


def signature_of(value: Value) -> Hashable:
    """The layout of a packed value, which was compared itself; for another value, the key of its step."""
    if value.layout is not None:
        return value.layout
    if value.step is not None:
        return key_of(value.step)
    return layout(value.tensor) if value.tensor is not None else None


def proved(step: Step) -> bool:
    """Is it proved that every tensor that the step depends on holds what its node read?"""
    return step.proved and all(
        value.step is None or value.layout is not None or proved(value.step) for value in step.inputs
    )
