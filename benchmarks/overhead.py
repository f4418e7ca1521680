"""Compares the time that `lean(overhead=...)` takes with the time that was asked for.

    python -m benchmarks.overhead [MODEL ...] [--asked 0.05 0.1 0.2] [--busy] [--steps 20] [--json FILE]

Steps count once the overhead has measured itself. A twin of the network trains without `lean()`, the two
alternate, and the time taken is the median ratio of their steps. With `--busy` another process computes all
the time.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks import record
from benchmarks.lean import Side, network, settle
from leannorm._freed_memory import keep_freed_memory
from leannorm.report.timing import time_step
from leannorm.saving import lean

MODELS = ("resnet18", "efficientnet_b0", "vit_small_patch16_224", "convnext_tiny")
NEAR = 0.03  # of a step: the promise is kept if the time taken is this close to the time asked for


class Row(NamedTuple):
    model: str
    asked: float
    planned: float
    measured: float
    taken: float
    kept: float
    passes: int
    busy: bool
    leanest: bool  # nothing else can be rebuilt

    @property
    def falls_short(self) -> bool:
        """Whether the promise is broken. Less time is fine if nothing else can be rebuilt."""
        return abs(self.taken - self.asked) > NEAR and not (self.leanest and self.taken < self.asked)

    def __str__(self) -> str:
        verdict = "  nothing else can be rebuilt" if self.leanest and self.taken < self.asked else ""
        verdict = "  NOT AS ASKED" if self.falls_short else verdict
        numbers = " ".join(f"{one:8.3f}" for one in (self.asked, self.planned, self.measured, self.taken))
        return f"{self.model:30} {numbers} {self.kept:6.3f} {self.passes:6}{verdict}"


def _compute() -> None:
    torch.set_num_threads(1)
    x = torch.randn(512, 512)
    while True:
        x @ x


@contextlib.contextmanager
def _busy(asked: bool) -> Iterator[None]:
    """Run another process that computes all the time, if asked."""
    if not asked:
        yield
        return
    process = multiprocessing.get_context("spawn").Process(target=_compute, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


def take(name: str, asked: float, steps: int, busy: bool) -> Row:
    model, x = network(name)
    ours = Side(copy.deepcopy(model), x, lambda: lean(overhead=asked))
    theirs = Side(model, x, contextlib.nullcontext)

    def step() -> Any:
        ours.step()
        return ours.saved

    passes = settle(step)
    ratios = []
    for _ in range(steps):
        theirs.step()
        plain = time_step(theirs.step)
        ours.step()
        ratios.append(time_step(ours.step) / plain)
    saved, plan = ours.saved, ours.saved.plan
    whole = saved.kept_bytes + saved.rebuilt_bytes
    return Row(
        name,
        asked,
        0.0 if plan is None else plan.overhead,
        float("nan") if plan is None or plan.measured is None else plan.measured,
        median(ratios) - 1,
        saved.kept_bytes / whole if plan is None else plan.ratio,
        passes,
        busy,
        whole == saved.kept_bytes if plan is None else plan.kept_bytes <= 1.02 * plan.chosen.least,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--asked", nargs="*", type=float, default=(0.05, 0.1, 0.2))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(keep_freed_memory())
    print(f"{'':30} {'asked':>8} {'planned':>8} {'measured':>8} {'taken':>8} {'kept':>6} {'passes':>6}")
    rows: list[Row] = []
    with _busy(options.busy):
        for name in options.models:
            for asked in options.asked:
                rows.append(take(name, asked, options.steps, options.busy))
                print(rows[-1], flush=True)
    if options.json:
        written = [row._asdict() for row in rows]
        record.write(options.json, written, "model", "asked", "busy")
    return int(any(row.falls_short for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
