"""Whole networks after `convert`, alone and under `lean()`: kept bytes, peak memory and step time.

    python -m benchmarks.models [MODEL ...] [--steps 7] [--against-compile | --compiled] [--json FILE]

Numbers are relative to plain PyTorch. The loss in float64 is compared before anything is timed. The settings
alternate in one process that keeps freed memory, and ratios are medians over the turns. `--against-compile`
adds `torch.compile` with an activation memory budget of 0.5, whose loss is compared in float32; its first
step includes compiling. `--compiled` compiles both sides, the baseline and the converted network.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from torch import nn
from torch._functorch import config

from benchmarks import record
from benchmarks.lean import Side, network
from leannorm import convert, keep_freed_memory, lean
from leannorm.report.memory import measure_step
from leannorm.report.timing import time_step


def _compile(model: nn.Module) -> None:
    model.compile(options={"fallback_random": True})  # the same dropout as the baseline


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[nn.Module], nn.Module] | None]] = {
    "stock": (contextlib.nullcontext, None),
    "convert": (contextlib.nullcontext, convert),
    "convert + lean()": (lean, convert),
    "convert + lean(norm)": (lambda: lean("norm"), convert),
    "convert + lean(conv)": (lambda: lean("conv"), convert),
}
COMPILE = {
    "torch.compile(0.5)": (
        lambda: config.patch(activation_memory_budget=0.5),
        _compile,
    )
}
COMPILED = {
    "stock": (contextlib.nullcontext, _compile),
    "convert": (contextlib.nullcontext, lambda model: _compile(convert(model))),
}


def compare(name: str, steps: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    model, x = network(name)
    double, small = copy.deepcopy(model).double(), x[:2].double()
    losses = [Side(double, small, *SETTINGS[key]).forward().item() for key in ("stock", "convert")]
    if not abs(losses[0] - losses[1]) <= 1e-9 * abs(losses[0]):
        raise SystemExit(f"nothing was timed: the loss of {name} is {losses[1]}, not {losses[0]}")
    sides = {key: Side(model, x, *setting) for key, setting in settings.items()}
    first = {}
    for key, side in sides.items():  # the first pass verifies rebuilds or compiles; later ones are alike
        first[key] = time_step(side.step)
        side.warm()
        side.model.zero_grad()
    loss = sides["stock"].forward().item()
    for key, side in sides.items():
        if not abs(side.forward().item() - loss) <= 1e-4 * abs(loss):
            found = side.forward().item()
            raise SystemExit(f"nothing was timed: the loss of {name} with {key} is {found}, not {loss}")
    memory = {key: measure_step(side.forward) for key, side in sides.items()}
    times: dict[str, list[float]] = {key: [] for key in sides}
    for _ in range(steps):
        for key, side in sides.items():
            times[key].append(time_step(side.step))
    stock = memory["stock"]
    return [
        {
            "model": name,
            "setting": key,
            "held": memory[key].held / stock.held,
            "peak": memory[key].peak / stock.peak,
            "time": median(a / b for a, b in zip(times[key], times["stock"], strict=True)),
            "seconds": median(times[key]),
            "first": first[key],
        }
        for key in sides
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=["resnet50", "digits"])
    parser.add_argument("--steps", type=int, default=7)
    compiling = parser.add_mutually_exclusive_group()
    compiling.add_argument(
        "--against-compile", action="store_const", dest="settings", const=SETTINGS | COMPILE
    )
    compiling.add_argument("--compiled", action="store_const", dest="settings", const=COMPILED)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(keep_freed_memory())
    print(f"{'':12} {'':22}  kept   peak   time")
    rows = []
    for name in options.models:
        for row in compare(name, options.steps, options.settings or SETTINGS):
            rows.append(row)
            numbers = f"{row['held']:6.3f} {row['peak']:6.3f} {row['time']:6.3f}"
            seconds = f"{row['seconds'] * 1e3:.0f} ms, the first step {row['first']:.1f} s"
            print(f"{name:12} {record.shown(row['setting']):22} {numbers}   {seconds}", flush=True)
    if options.json:
        record.write(options.json, rows, "model", "setting")


if __name__ == "__main__":
    main()
