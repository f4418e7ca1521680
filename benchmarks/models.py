"""Whole networks after `convert`, alone and under `lean()`: held bytes, peak and step time beside stock's.

    python -m benchmarks.models [MODEL ...] [--steps 7] [--json FILE]

The loss in float64 is compared before anything is timed; the settings take turns in one process; freed
memory is kept for all; ratios are medians over the turns.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lean import Side, network
from leannorm import convert, keep_freed_memory, lean
from leannorm.report.memory import measure_step
from leannorm.report.timing import time_step

SETTINGS = {
    "stock": (contextlib.nullcontext, None),
    "convert": (contextlib.nullcontext, convert),
    "convert + lean(norm)": (lean, convert),
    "convert + lean(conv)": (lambda: lean("conv"), convert),
}


def compare(name: str, steps: int) -> list[dict[str, Any]]:
    model, x = network(name)
    double, small = copy.deepcopy(model).double(), x[:2].double()
    losses = [Side(double, small, *SETTINGS[key]).forward().item() for key in ("stock", "convert")]
    if not abs(losses[0] - losses[1]) <= 1e-9 * abs(losses[0]):
        raise SystemExit(f"a wrong answer is not timed: {name} loses {losses[1]}, stock {losses[0]}")
    sides = {key: Side(model, x, *setting) for key, setting in SETTINGS.items()}
    for side in sides.values():  # the first pass tries, the second is as all later ones
        side.step()
        side.step()
        side.model.zero_grad()
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
        }
        for key in sides
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["resnet50", "digits"])
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(keep_freed_memory())
    print(f"{'':12} {'':22}  held   peak   time")
    rows = []
    for name in options.models:
        for row in compare(name, options.steps):
            rows.append(row)
            numbers = f"{row['held']:6.3f} {row['peak']:6.3f} {row['time']:6.3f}"
            print(f"{name:12} {row['setting']:22} {numbers}   {row['seconds'] * 1e3:.0f} ms", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
