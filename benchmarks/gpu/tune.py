"""Which launches of the per-channel kernels are the fastest on this device: one number after the other.

Each number of a `tiling.Choice` is tried with the best of the others, on ResNet-50's batch norms; the fastest
sum of all shapes wins. A choice that is less than 1% faster, gives other results than the defaults' to more
than rounding, or cannot be launched is not taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.report import Report
from leannorm.ops.backends.triton import tuned
from leannorm.report.timing import device_seconds, sets_past_the_cache

_GAIN = 0.99
# in the order in which they are tried: the tile, then each kernel's programs and loads
_TRIED = {
    "in_flight": (16, 64),
    "warps": (2, 8),
    "moments_stages": (2, 3),
    "sums_stages": (2, 3),
    "mapping_stages": (2, 3),
    "moments": (4, 6, 8),
    "sums": (3, 5, 6),
    "mapping": (8, 32),
}
_SHAPES = ((128, 64, 56, 56), (128, 256, 56, 56), (128, 512, 28, 28), (128, 1024, 14, 14), (128, 2048, 7, 7))


@contextmanager
def launched_by(choice: Any) -> Iterator[None]:
    """The kernels are launched by this choice, and what is noted of others is forgotten."""
    from leannorm.ops.backends.triton import channel, tape

    before = channel.choice_for
    tape.forget()
    channel.choice_for = lambda device: choice
    try:
        yield
    finally:
        channel.choice_for = before
        tape.forget()


def _calls(shape: tuple[int, ...], device: torch.device, several: bool) -> list[Callable[[], list[Tensor]]]:
    """Forward and backward pass of a batch norm with relu, on inputs that are not in the cache."""
    from leannorm.ops.backends import TRITON

    def made() -> tuple[Tensor, ...]:
        x, dy = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
        last = torch.channels_last
        return x.to(memory_format=last), dy.to(memory_format=last), torch.rand(shape[1], device=device)

    def run(x: Tensor, dy: Tensor, weight: Tensor) -> list[Tensor]:
        y, mean, _, rstd = TRITON.channel_forward(x, weight, weight, None, 1e-5, "relu")
        dx, dweight, dbias, _ = TRITON.channel_backward(
            dy, x, mean, rstd, weight, weight, None, None, "relu", 0, False
        )
        return [y, dx, dweight, dbias]

    size = torch.Size(shape).numel() * 2
    return [partial(run, *made()) for _ in range(sets_past_the_cache(size, device) if several else 1)]


def _agree(got: list[Tensor], want: list[Tensor]) -> bool:
    """To the rounding of the dtype, of the largest value."""
    for a, b in zip(got, want, strict=True):
        limit = 4 * torch.finfo(torch.bfloat16 if a.dim() > 1 else torch.float32).eps * b.abs().max().item()
        if not (a.double() - b.double()).abs().max().item() <= limit + 1e-3 * b.abs().max().item():
            return False
    return True


def tune(report: Report, file: Path, smoke: bool) -> Any:
    """Find, print and save the choice of this device."""
    from leannorm.ops.backends.triton import launch
    from leannorm.ops.backends.triton.tiling import Choice

    device, turns = report.device, 1 if smoke else 8
    shapes = ((2, 8, 5, 5),) if smoke else _SHAPES
    tried = {name: values[:1] for name, values in _TRIED.items()} if smoke else _TRIED
    of_shapes = [_calls(shape, device, not smoke) for shape in shapes]
    with launched_by(Choice()):
        plain = [calls[0]() for calls in of_shapes]

    def seconds(choice: Any) -> float:
        with launched_by(choice):
            for calls, want in zip(of_shapes, plain, strict=True):
                if not _agree(calls[0](), want):
                    raise RuntimeError("results differ from those of the defaults")
            return sum(median(device_seconds(calls, device, turns)) for calls in of_shapes)

    best = Choice()
    least = default = seconds(best)
    for name, values in tried.items():
        for value in values:
            candidate = best._replace(**{name: value})
            if not report.has(20, f"{name} = {value}"):
                continue
            try:
                tuned.read({**_about(device, launch), **candidate._asdict()}, launch.processors(device))
                taken = seconds(candidate)
            except Exception as error:  # cannot be compiled or launched, or is wrong
                report.note(f"{name} = {value} is not taken: {type(error).__name__}: {str(error)[:200]}")
                continue
            report.add("tuned", {**candidate._asdict(), "seconds": taken})
            print(f"{name:16} {value:4} {taken * 1e6:10.1f} us, the best {least * 1e6:10.1f} us", flush=True)
            if taken < _GAIN * least:
                best, least = candidate, taken
    name = report.data["device"]
    tuned.save(file, name, launch.processors(device), best)
    print(f"{name}: {best}, {least / default:.3f} of the defaults' time; written to {file}")
    return best


def _about(device: torch.device, launch: Any) -> dict[str, Any]:
    return {"triton": tuned.triton_version(), "multiprocessors": launch.processors(device)}
