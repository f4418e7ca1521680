"""Measures the memory of a training step; everything in leannorm that reports memory uses this."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._autograd import DeviceType

from leannorm._errors import InputError

_MARK = "leannorm::forward"


class StepMemory(NamedTuple):
    """Bytes of one training step, all relative to its start.

    `held`: allocated by the forward pass and still alive at its end. `peak`: the most that was alive at
    once. `timeline`: (seconds since the start, bytes alive) at every change, and `forward_end` in the same
    seconds; on the CPU only, else empty and 0.
    """

    held: int
    peak: int
    timeline: tuple[tuple[float, int], ...] = ()
    forward_end: float = 0.0


def measure_step(
    forward: Callable[[], Tensor],
    backward: Callable[[Tensor], object] = Tensor.backward,
    device: torch.device | str = "cpu",
) -> StepMemory:
    """Run `backward(forward())` once and return what it kept and its peak.

    CPU: every allocation and free of torch's allocator, as `torch.profiler` records them
    (`profile_memory=True`). Not recorded: workspaces of vendor libraries, blocks allocated in threads that
    `forward` starts, and frees of blocks that existed before the step. So set gradients to None first.
    CUDA: `torch.cuda.memory_allocated` and `torch.cuda.max_memory_allocated`.

    Recording takes time, which is included in `timeline`: do not time a step with it.

    Raises InputError for any other device.

    >>> x = torch.zeros(1000, requires_grad=True)
    >>> memory = measure_step(lambda: x.exp().sum())  # keeps exp(x), and the loss
    >>> memory.held, memory.peak
    (4004, 8008)
    """
    kind = torch.device(device).type
    gc.collect()
    if kind == "cpu":
        return _measure_cpu(forward, backward)
    if kind == "cuda":
        return _measure_cuda(forward, backward, torch.device(device))
    raise InputError(f"memory is measured on cpu and cuda; got device {str(device)!r}: use one of these")


def _measure_cuda(
    forward: Callable[[], Tensor], backward: Callable[[Tensor], object], device: torch.device
) -> StepMemory:
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    loss = forward()
    held = torch.cuda.memory_allocated(device) - before
    backward(loss)
    return StepMemory(held, torch.cuda.max_memory_allocated(device) - before)


def _measure_cpu(forward: Callable[[], Tensor], backward: Callable[[Tensor], object]) -> StepMemory:
    from torch.profiler import ProfilerActivity, profile, record_function

    with (
        _quiet_profiler(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded,
    ):
        with record_function(_MARK):
            loss = forward()
        backward(loss)
    events = recorded.profiler.kineto_results.events()
    mark = next(event for event in events if event.name() == _MARK)
    return _add_up(events, mark.start_ns(), mark.start_ns() + mark.duration_ns())


def _add_up(events: list[Any], start: int, end_of_forward: int) -> StepMemory:
    allocations = (e for e in events if e.name() == "[memory]" and e.device_type() == DeviceType.CPU)
    changes = sorted(((e.start_ns(), e.nbytes()) for e in allocations), key=lambda change: change[0])
    alive = held = peak = 0
    timeline = [(0.0, 0)]
    for time_ns, nbytes in changes:
        alive += nbytes
        peak = max(peak, alive)
        if time_ns <= end_of_forward:
            held = alive
        timeline.append(((time_ns - start) / 1e9, alive))
    return StepMemory(held, peak, tuple(timeline), (end_of_forward - start) / 1e9)


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Keep the profiler's library from logging to stderr; it reads its log level when it first starts."""
    name = "KINETO_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "6"  # above its highest level
    try:
        yield
    finally:
        del os.environ[name]


def check_device(device: str) -> None:
    """Raises InputError for a device that torch does not know or cannot use here."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise InputError(f"torch cannot use device {device!r} here{_why(device)}") from None


def _why(device: str) -> str:
    if torch.cuda.is_available():
        there = torch.cuda.device_count()
        return f": choose cpu or cuda ({there} of them, from cuda:0 on)"
    if not device.startswith("cuda"):
        return ": choose cpu"
    if torch.version.cuda is None and torch.version.hip is None:
        reason = f"torch {torch.__version__} is built without CUDA; install a build with it, or"
    else:
        reason = "torch finds no GPU or no driver, as `nvidia-smi` would; fix that, or"
    return f" ({reason} choose cpu)"
