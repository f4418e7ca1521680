"""Finds the fastest launches of the per-channel kernels on this device, by changing one number at a time.

Each number of a `tiling.Choice` is tried with the best values of the others: the numbers of loops on
ResNet-50's batch norms, and those of programs that read a whole set on norms that have such programs. The
fastest few are then measured again, alternating with the defaults. A choice is written to the file only if it
wins clearly: faster than the defaults in every turn, and by at least 2% in the median turn. Otherwise the
file gets the defaults. A choice is rejected if it cannot be launched, or if its results differ from the
defaults' by more than rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu import modern
from benchmarks.gpu.report import Report
from leannorm._types import Channels, ChannelTensors, KeptByChannelNorm
from leannorm.ops.backends.triton import tuned
from leannorm.report.timing import device_seconds, sets_past_the_cache

_GAIN, _CLEARLY = 0.99, 0.98  # relative time: to go on with a choice, and to write it to the file
_FINALISTS, _TURNS = 3, 9


class Part(NamedTuple):
    """Numbers that decide about the same launches, and (shape, groups) of norms that use them."""

    tried: Mapping[str, Sequence[int]]
    norms: Sequence[tuple[tuple[int, ...], int]]


_RESNET = ((128, 64, 56, 56), (128, 256, 56, 56), (128, 512, 28, 28), (128, 1024, 14, 14), (128, 2048, 7, 7))
_PARTS = {
    "loops": Part(
        {  # in the order of the search: the tile, then loads and programs of each kernel
            "in_flight": (16, 64),
            "warps": (2, 8),
            "moments_stages": (2, 3),
            "sums_stages": (2, 3),
            "mapping_stages": (2, 3),
            "moments": (4, 6, 8),
            "sums": (3, 5, 6),
            "mapping": (8, 32),
        },
        [(shape, 0) for shape in _RESNET],
    ),
    "sets": Part(
        {"rounds": (0, 8, 32), "sets_stages": (2, 3, 4), "alone_stages": (1, 2)},
        [((32, 256, 32, 32), 32), ((8, 1280, 16, 16), 32), ((64, 512, 8, 8), 512), ((8, 256, 14, 14), 0)]
        + [((128, c, n, n), 0) for c, n in ((256, 14), (512, 14), (512, 7), (2048, 7))],
    ),
}


@contextmanager
def launched_by(choice: Any) -> Iterator[None]:
    """Launch the kernels by this choice, and forget recordings of other launches."""
    from leannorm.ops.backends.triton import channel, rows, tape

    modules: tuple[Any, ...] = channel, rows
    before = [module.choice_for for module in modules]
    tape.forget()
    for module in modules:
        module.choice_for = lambda device: choice
    try:
        yield
    finally:
        for module, choice_for in zip(modules, before, strict=True):
            module.choice_for = choice_for
        tape.forget()


def has_plain_launches(kind: str, x: Tensor) -> bool:
    """Whether the side "plain" launches this norm differently.

    It does for a channel or group norm in one launch, and for AdaLN with many rows per program.
    """
    from leannorm.ops.backends.triton.channel import plan_of

    groups = {"channel": 0, "group": min(modern.GROUPS, x.shape[1])}.get(kind)
    return kind in ("ada", "add ada") or (groups is not None and plan_of(x, groups).sets is not None)


@contextmanager
def launched_as(side: str, device: torch.device) -> Iterator[None]:
    """With the side "plain", take several launches for statistics, and one program for each tile of rows."""
    from leannorm.ops.backends.triton.tiling import DEFAULT

    if side != "plain":
        yield
        return
    with launched_by((tuned.choice_for(device) or DEFAULT)._replace(rounds=0, run_stages=0)):
        yield


def _calls(
    shape: tuple[int, ...], groups: int, device: torch.device, several: bool
) -> list[Callable[[], list[Tensor]]]:
    """Forward and backward passes of a norm with relu, on inputs that are not in the cache."""
    from leannorm.ops.backends import TRITON

    def made() -> tuple[Tensor, ...]:
        x, dy = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
        last = torch.channels_last
        return x.to(memory_format=last), dy.to(memory_format=last), torch.rand(shape[1], device=device)

    def run(x: Tensor, dy: Tensor, weight: Tensor) -> list[Tensor]:
        norm = Channels(groups, 1e-5, "relu")
        y, mean, _, rstd, _ = TRITON.channel_forward(ChannelTensors(x, weight, weight), norm)
        kept = KeptByChannelNorm(x, mean, rstd, weight, weight, norm=norm)
        dx, dweight, dbias, _ = TRITON.channel_backward(dy, kept)
        return [y, dx, dweight, dbias]

    size = torch.Size(shape).numel() * 2
    return [partial(run, *made()) for _ in range(sets_past_the_cache(size, device) if several else 1)]


def _agree(got: list[Tensor], want: list[Tensor]) -> bool:
    """Whether results agree up to rounding, relative to the largest value."""
    for a, b in zip(got, want, strict=True):
        limit = 4 * torch.finfo(torch.bfloat16 if a.dim() > 1 else torch.float32).eps * b.abs().max().item()
        if not (a.double() - b.double()).abs().max().item() <= limit + 1e-3 * b.abs().max().item():
            return False
    return True


def search(
    default: Any,
    tried: Mapping[str, Sequence[int]],
    seconds: Callable[[Any, str], float | None],
) -> list[Any]:
    """The fastest choices by one measurement each, in order; `seconds` returns None if a choice fails."""
    best, least = default, seconds(default, "the defaults")
    if least is None:
        return []
    found = {default: least}
    for name, values in tried.items():
        for value in values:
            candidate = best._replace(**{name: value})
            if candidate in found or (taken := seconds(candidate, f"{name} = {value}")) is None:
                continue
            found[candidate] = taken
            if taken < _GAIN * least:
                best, least = candidate, taken
    faster = [choice for choice, taken in found.items() if taken < found[default]]
    return sorted(faster, key=lambda choice: found[choice])[:_FINALISTS]


def wins_clearly(times: Sequence[float], defaults: Sequence[float]) -> bool:
    """Whether it is faster in every turn, and by `_CLEARLY` in the median turn."""
    ratios = [time / default for time, default in zip(times, defaults, strict=True)]
    return bool(ratios) and max(ratios) < 1 and median(ratios) <= _CLEARLY


def final(
    default: Any, finalists: Sequence[Any], seconds: Callable[[Any, str], float | None], turns: int
) -> tuple[Any, dict[Any, list[float]]]:
    """The fastest finalist that wins clearly, else the default, and the seconds of each by turn."""
    times: dict[Any, list[float]] = {choice: [] for choice in (default, *finalists)}
    for turn in range(turns if finalists else 0):
        order = list(times) if turn % 2 == 0 else list(times)[::-1]
        measured = {choice: seconds(choice, f"turn {turn + 1} of {turns}") for choice in order}
        if None in measured.values():  # no time is left, and only complete turns count
            break
        for choice, taken in measured.items():
            times[choice].append(taken or 0.0)
    winners = [choice for choice in finalists if wins_clearly(times[choice], times[default])]
    if len(times[default]) < min(turns, 3):
        winners = []
    return min(winners, key=lambda choice: median(times[choice]), default=default), times


def _part(report: Report, name: str, smoke: bool) -> dict[str, int]:
    """The best numbers of a part."""
    from leannorm.ops.backends.triton import launch
    from leannorm.ops.backends.triton.tiling import Choice

    device, part, default = report.device, _PARTS[name], Choice()
    norms = [((2, 8, 5, 5), 0 if name == "loops" else 2)] if smoke else part.norms
    tried = {number: values[:1] for number, values in part.tried.items()} if smoke else part.tried
    of_norms = [_calls(shape, groups, device, not smoke) for shape, groups in norms]
    with launched_by(default):
        plain = [calls[0]() for calls in of_norms]
    about = {"triton": tuned.triton_version(), "multiprocessors": launch.processors(device)}

    def seconds(choice: Any, what: str) -> float | None:
        if not report.has(20, f"{name}, {what}"):
            return None
        try:
            tuned.read({**about, **choice._asdict()}, launch.processors(device))
            with launched_by(choice):
                for calls, want in zip(of_norms, plain, strict=True):
                    if not _agree(calls[0](), want):
                        raise RuntimeError("results differ from those of the defaults")
                turns = 1 if smoke else 8
                taken = sum(median(device_seconds(calls, device, turns)) for calls in of_norms)
        except Exception as error:  # it cannot be compiled or launched, or is wrong
            report.note(f"{name}, {what} is rejected: {type(error).__name__}: {str(error)[:200]}")
            return None
        report.add("tuned", {**choice._asdict(), "part": name, "what": what, "seconds": taken})
        print(f"{name:6} {what:20} {taken * 1e6:10.1f} us", flush=True)
        return taken

    fastest = search(default, tried, seconds)
    chosen, times = final(default, fastest, seconds, 2 if smoke else _TURNS)
    for choice in fastest:
        ratios = [a / b for a, b in zip(times[choice], times[default], strict=True)] or [1.0]
        print(f"{name:6} {median(ratios):.3f} (at most {max(ratios):.3f}) of the defaults' time: {choice}")
    return {number: getattr(chosen, number) for number in tried}


def tune(report: Report, file: Path, smoke: bool) -> Any:
    """Find, print and save the best choice for this device."""
    from leannorm.ops.backends.triton import launch
    from leannorm.ops.backends.triton.tiling import Choice

    best = Choice()
    for name in _PARTS:
        best = best._replace(**_part(report, name, smoke))
    device = report.data["device"]
    tuned.save(file, device, launch.processors(report.device), best)
    same = "the defaults" if best == Choice() else str(best)
    print(f"{device}: {same}; written to {file}")
    return best
