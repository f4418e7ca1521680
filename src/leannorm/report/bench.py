"""`bench`: checks the results of every backend, then times them against torch and against a memory copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from leannorm._freed_memory import keep_freed_memory
from leannorm._report import Line, Part, Report, Table, counted, milliseconds
from leannorm.ops.select import backends, use_backend
from leannorm.report.answers import poisoned_memory, with_gradients, within_budget
from leannorm.report.numerics import BATCH_NORM, LAYER_NORM
from leannorm.report.timing import RATIOS, device_seconds, is_another_ratio, sets_past_the_cache

COMPILED = "torch.compile"
_COMPILERS = 8  # times our budget: torch orders its sums differently, so its errors differ
_TENSORS_MOVED = 5  # at least: x read and y written, then x and dy read and dx written


class Case(NamedTuple):
    """A norm and the shape to run it on, forward and backward, in training mode."""

    name: str
    shape: tuple[int, ...]
    ours: Callable[..., Tensor]
    torchs: Callable[..., Tensor]
    features: int


CASES = (
    *(Case("batch norm", shape, *BATCH_NORM, shape[1]) for shape in ((32, 64, 56, 56), (32, 512, 7, 7))),
    *(Case("layer norm", shape, *LAYER_NORM, shape[-1]) for shape in ((8192, 768), (4096, 4096))),
)


class Timing(NamedTuple):
    """One backend (or torch, eager or compiled) on one case: seconds of forward and backward, ratio to torch.

    `floor`: the share of that time that moving the bytes would take, at the speed of a copy on this device.
    `correct`: whether output and gradients are within twice torch's error against float64, plus one rounding.
    """

    case: str
    shape: tuple[int, ...]
    dtype: str
    backend: str
    seconds: float | None
    ratio: float | None
    floor: float | None
    correct: bool


@dataclass(frozen=True, repr=False)
class BenchReport(Report):
    """What `bench` measured; true if every answer was right.

    >>> import leannorm
    >>> bool(leannorm.BenchReport("cpu", "float32", threads=2, timings=[]))
    True
    """

    device: str
    dtype: str
    threads: int
    timings: list[Timing]

    def __bool__(self) -> bool:
        return all(one.correct for one in self.timings)

    def summary(self) -> str:
        return f"{self.device}, {self.dtype}, {counted(len(self.timings), 'timing')}"

    def parts(self) -> Iterator[Part]:
        rows = [
            [
                f"{one.case} {'x'.join(map(str, one.shape))}",
                one.backend,
                milliseconds(one.seconds) if one.seconds else "WRONG",
                f"{one.ratio:.2f}" if one.ratio else "–",
                f"{one.floor:.0%}" if one.floor else "–",
            ]
            for one in self.timings
        ]
        title = f"forward and backward, {self.dtype}, {self.device}, {self.threads} threads"
        yield Table(["", "backend", "time", "of torch's", "of the floor"], rows, title, numbers_from=2)
        torchs = {(one.case, one.shape): one.seconds for one in self.timings if one.backend == "torch"}
        timed = ((one.ratio, one.seconds, torchs.get((one.case, one.shape))) for one in self.timings)
        if any(ratio and base and is_another_ratio(ratio, took or 0.0, base) for ratio, took, base in timed):
            yield Line(RATIOS)


def bench(
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    turns: int = 9,
    *,
    cases: Sequence[Case] = CASES,
    compiled: bool = False,
    progress: Callable[[str], None] = lambda doing: None,
) -> BenchReport:
    """Time torch and every available backend, case by case; the sides alternate, times are medians.

    With `compiled` also torch's norm under `torch.compile`, correct within eight times our own budget;
    compiling is not counted. A backend whose answer is wrong is not timed (its seconds are None); answers are
    checked on memory full of NaN, so that an element that was not written is wrong. On CUDA times are between
    events on the device, on tensors that are not in its cache. Freed memory is kept from then on. `progress`
    is called with what is being done.

    Raises: torch's `RuntimeError` for a device that does not exist.

    >>> import leannorm
    >>> from leannorm.report.bench import CASES
    >>> small = CASES[0]._replace(shape=(2, 64, 4, 4))
    >>> bool(leannorm.bench(turns=1, cases=[small]))
    True
    """
    keep_freed_memory()
    there = torch.device(device)
    timings: list[Timing] = []
    for case in cases:
        progress(f"timing {case.name} {'x'.join(map(str, case.shape))}")
        timings += _bench(case, there, dtype, turns, compiled)
    return BenchReport(device, name_of(dtype), torch.get_num_threads(), timings)


def _bench(
    case: Case, device: torch.device, dtype: torch.dtype, turns: int, compiled: bool
) -> Iterator[Timing]:
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(case.shape, generator=generator).to(device, dtype) for _ in range(2))
    weight, bias = (torch.rand(case.features, generator=generator).to(device, dtype) + 0.5 for _ in range(2))
    leaves = [v.requires_grad_() for v in (x, weight, bias)]
    serving = [name for name, reasons in backends(*leaves).items() if not reasons]
    exact = with_gradients(case.torchs, [v.detach().double().requires_grad_() for v in leaves], dy.double())
    stock = with_gradients(case.torchs, leaves, dy)
    correct, run_of = {"torch": True}, {"torch": case.torchs}
    if compiled:
        run_of[COMPILED] = torch.compile(case.torchs, dynamic=False)  # each case's shape has its own kernels
        answers = with_gradients(run_of[COMPILED], leaves, dy)
        correct[COMPILED] = within_budget(answers, stock, exact, _COMPILERS)
    for name in serving:
        run_of[name] = case.ours
        with use_backend(name), poisoned_memory():
            correct[name] = within_budget(with_gradients(case.ours, leaves, dy), stock, exact)
    sets = [(leaves, dy)]
    for _ in range(sets_past_the_cache(4 * x.nbytes, device) - 1):
        sets.append(([x.detach().clone().requires_grad_(), *leaves[1:]], dy.clone()))
    right = {name: run for name, run in run_of.items() if correct[name]}
    runs = {name: [partial(with_gradients, run, *each) for each in sets] for name, run in right.items()}
    targets = [torch.empty_like(dy) for _ in sets]
    copy_calls = [partial(target.copy_, each[1]) for target, each in zip(targets, sets, strict=True)]
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    copies: list[float] = []
    for turn in range(turns + 2):  # the first two warm up; then both sides alternate
        for name, calls in runs.items():
            with use_backend(name) if name in serving else nullcontext():
                taken = device_seconds(calls, device, len(calls))
            seconds[name] += taken if turn >= 2 else []
        copies += device_seconds(copy_calls, device, len(copy_calls))
    floor = median(copies) * _TENSORS_MOVED / 2  # a copy moves two tensors
    for name in correct:
        took = median(seconds[name]) if name in right else None
        yield Timing(
            case.name,
            case.shape,
            name_of(dtype),
            name,
            took,
            median(a / b for a, b in zip(seconds[name], seconds["torch"], strict=True)) if took else None,
            floor / took if took else None,
            name in right,
        )


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
