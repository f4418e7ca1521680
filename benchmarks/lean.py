"""Published networks under `lean()`: kept bytes, peak memory and step time, relative to plain PyTorch.

    python -m benchmarks.lean [MODEL ...] [--steps 5] [--against-checkpoint] [--lines] [--json FILE]

Gradients and buffers are compared bit for bit before anything is timed. The settings alternate in one process
that keeps freed memory, and ratios are medians over the turns. `saved` is the share of the saved tensors'
bytes that a setting does not rebuild; `kept` is the share of what the forward pass leaves allocated.
`--against-checkpoint` adds a checkpoint around every block, for timm models that support it. `--lines` adds
budgets and overheads, each with its planned time, and names the settings that another one beats in both bytes
and time.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import record
from benchmarks.architectures import import_torchvision
from leannorm._freed_memory import keep_freed_memory
from leannorm.report.demo.digits import DigitNetwork
from leannorm.report.memory import measure_step
from leannorm.report.timing import time_step
from leannorm.saving import lean, reasons


class Reach(NamedTuple):
    kept: float
    time: float
    peak: float = float("inf")


REACH = {
    "resnet50": (Reach(0.81, 1.04), Reach(0.42, 1.15)),
    "resnet18": (Reach(0.71, 1.05), Reach(0.50, 1.10)),
    "efficientnet_b0": (Reach(0.41, 1.10), Reach(0.27, 1.30)),
    "mobilenetv3_large_100": (Reach(0.48, 1.10), Reach(0.24, 1.30)),
    "densenet121": (Reach(0.48, 1.10), Reach(0.38, 1.25)),
    "convnext_tiny": (Reach(0.52, 1.05), None),
    "vit_small_patch16_224": (Reach(0.58, 1.04), None),
    "swin_tiny_patch4_window7_224": (Reach(0.62, 1.04), None),
    "digits": (Reach(0.60, 1.10, 0.88), Reach(0.45, 1.15, 0.75)),
}
LINES: dict[str, Callable[[], Any]] = {
    **{f"budget {share}": partial(lean, budget=share) for share in (0.9, 0.7, 0.5, 0.4, 0.3)},
    **{f"overhead {share}": partial(lean, overhead=share) for share in (0.05, 0.1, 0.15, 0.25)},
}
_NOISE = 0.02  # of the ratio of two times


def network(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if name == "digits":
        return DigitNetwork(), torch.randn(512, 1, 28, 28)
    import_torchvision()  # timm needs it
    import timm

    batch, size = (4, 224) if name.startswith(("vit", "swin")) else (8, 160)
    return timm.create_model(name, num_classes=10), torch.randn(batch, 3, size, size)


class Side:
    """One setting: a copy of the network and its training step."""

    def __init__(self, model: nn.Module, x: Tensor, context: Callable[[], Any], prepare: Any = None) -> None:
        self.model, self.x, self.context = copy.deepcopy(model), x, context
        if prepare:
            prepare(self.model)
        self.saved: Any = None

    def forward(self) -> Tensor:
        torch.manual_seed(1)
        self.model.zero_grad()
        with self.context() as self.saved:
            return self.model(self.x).square().mean()

    def step(self) -> None:
        self.forward().backward()

    def warm(self) -> None:
        """Step on two batches: rebuilds are verified on two inputs, and plans measure the first pass."""
        self.x = self.x.flip(0)
        self.step()
        self.x = self.x.flip(0)
        for _ in range(6):  # the first steps that follow a plan also correct it
            self.step()

    def state(self) -> dict[str, Tensor | None]:
        gradients = {name: p.grad for name, p in self.model.named_parameters()}
        return {**gradients, **dict(self.model.named_buffers())}


_SETTLED, _MOST = 12, 400  # consecutive passes that follow the plan of an overhead, and all passes


def settle(step: Callable[[], Any]) -> int:
    """Run a step, which returns its `lean()`, until an overhead has measured itself; return the count.

    Until then, every second pass keeps everything, for comparison.
    """
    followed = passes = 0
    while followed < _SETTLED and passes < _MOST:
        compared = reasons.COMPARED in step().reasons
        followed, passes = 0 if compared else followed + 1, passes + 1
    return passes


def equal(a: Side, b: Side) -> bool:
    ours, stock = a.state(), b.state()
    pairs = [(ours[name], stock[name]) for name in ours]
    return all(v is w is None or (v is not None and w is not None and torch.equal(v, w)) for v, w in pairs)


class Row(NamedTuple):
    model: str
    setting: str
    kept: float
    held: float
    peak: float
    time: float
    equal: bool
    reach: Reach | None
    planned: float | None = None  # time, by the plan in use

    def __str__(self) -> str:
        reach = "" if self.reach is None else f"{self.reach.kept:.2f} / {self.reach.time:.2f}"
        verdict = {True: "", False: "  GOAL MISSED"}[self.reached]
        numbers = f"{self.kept:6.3f} {self.held:6.3f} {self.peak:6.3f} {self.time:6.3f}"
        same = "equal" if self.equal else "DIFFERS"
        planned = "" if self.planned is None else f"planned {self.planned:.3f}"
        return f"{self.model:30} {self.setting:13} {numbers}  {same:8} {reach}{verdict}{planned}"

    def beats(self, other: Row) -> bool:
        return self.held <= other.held and self.time < other.time - _NOISE

    @property
    def reached(self) -> bool:
        if not self.equal:
            return False
        reach = self.reach
        return reach is None or (
            round(self.kept, 2) <= reach.kept
            and round(self.time, 2) <= reach.time
            and self.peak <= reach.peak
        )


def compare(name: str, steps: int, against_checkpoint: bool, lines: bool) -> list[Row]:
    model, x = network(name)
    norm, conv = REACH.get(name, (None, None))
    sides = {
        "stock": Side(model, x, contextlib.nullcontext),
        "lean": Side(model, x, lean),
        "norm": Side(model, x, lambda: lean("norm")),
        "conv": Side(model, x, lambda: lean("conv")),
    }
    reaches = {"norm": norm, "conv": conv}
    for setting, context in LINES.items() if lines else ():
        sides[setting] = Side(model, x, context)
    if against_checkpoint and hasattr(model, "set_grad_checkpointing"):
        sides["checkpoint"] = Side(model, x, contextlib.nullcontext, lambda m: m.set_grad_checkpointing(True))
    for side in sides.values():
        side.warm()
    stock = sides["stock"]
    memory = {}
    for key, side in sides.items():
        side.model.zero_grad()
        memory[key] = measure_step(side.forward)
    same = {key: equal(side, stock) for key, side in sides.items()}
    times: dict[str, list[float]] = {key: [] for key in sides}
    for _ in range(steps):
        for key, side in sides.items():
            times[key].append(time_step(side.step))
    whole = sides["norm"].saved
    stock_bytes = whole.kept_bytes + whole.rebuilt_bytes
    return [
        Row(
            name,
            key,
            getattr(side.saved, "kept_bytes", memory[key].held / memory["stock"].held * stock_bytes)
            / stock_bytes,
            memory[key].held / memory["stock"].held,
            memory[key].peak / memory["stock"].peak,
            median(ours / theirs for ours, theirs in zip(times[key], times["stock"], strict=True)),
            same[key],
            reaches.get(key),
            1 + side.saved.plan.overhead if getattr(side.saved, "plan", None) else None,
        )
        for key, side in sides.items()
        if key != "stock"
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(REACH))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--against-checkpoint", action="store_true")
    parser.add_argument("--lines", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(keep_freed_memory())
    print(f"{'':43}  saved   kept   peak   time  gradients goal (saved / time)")
    rows = []
    for name in options.models:
        made = compare(name, options.steps, options.against_checkpoint, options.lines)
        rows += made
        print(*made, sep="\n", flush=True)
        for row in made if options.lines else ():
            better = [other.setting for other in made if other.beats(row)]
            if better:
                print(f"{name:30} {row.setting:13} is beaten by {', '.join(better)}", flush=True)
    if options.json:
        shown = [{k: v for k, v in row._asdict().items() if k != "reach"} for row in rows]
        record.write(options.json, shown, "model", "setting")
    return 0 if all(row.reached for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
