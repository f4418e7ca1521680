"""The overhead of a call: layers on small tensors, against torch's.

    python -m benchmarks.calls [--only NAME] [--turns 15] [--json FILE]

Microseconds per call: without gradients, with gradients, and forward and backward. Medians over turns of 200
calls; leannorm and torch take turns, on one thread. Outputs are checked first.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from leannorm import nn

CALLS = 200
IMAGE, ROWS = (8, 16, 4, 4), (32, 64)
LAYERS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "BatchNorm2d": (lambda: nn.BatchNorm2d(16), lambda: torch.nn.BatchNorm2d(16), IMAGE),
    "BatchNorm2d, eval": (
        lambda: nn.BatchNorm2d(16).eval(),
        lambda: torch.nn.BatchNorm2d(16).eval(),
        IMAGE,
    ),
    "GroupNorm": (lambda: nn.GroupNorm(4, 16), lambda: torch.nn.GroupNorm(4, 16), IMAGE),
    "LayerNorm": (lambda: nn.LayerNorm(64), lambda: torch.nn.LayerNorm(64), ROWS),
    "RMSNorm": (lambda: nn.RMSNorm(64), lambda: torch.nn.RMSNorm(64), ROWS),
}


def kinds_of_call(layer: torch.nn.Module, shape: tuple[int, ...]) -> dict[str, Callable[[], object]]:
    torch.manual_seed(0)
    x, dy = torch.randn(shape), torch.randn(shape)
    leaf = x.clone().requires_grad_()

    def without() -> None:
        with torch.no_grad():
            layer(x)

    return {
        "no grad": without,
        "forward": lambda: layer(leaf),
        "forward, backward": lambda: layer(leaf).backward(dy),
    }


def microseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def measure(name: str, turns: int) -> dict[str, tuple[float, float]]:
    """The microseconds of leannorm and torch for each kind of call."""
    ours, torchs, shape = LAYERS[name]
    layers = ours(), torchs()
    x = torch.randn(shape)
    torch.testing.assert_close(layers[0](x), layers[1](x))
    sides = [kinds_of_call(layer, shape) for layer in layers]
    found = {}
    for kind in sides[0]:
        times = [[microseconds(side[kind]) for side in sides] for _ in range(turns + 1)][1:]
        found[kind] = median(t[0] for t in times), median(t[1] for t in times)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=LAYERS)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = {}
    for name in [options.only] if options.only else LAYERS:
        report[name] = measure(name, options.turns)
        cells = "  ".join(
            f"{kind} {ours:6.1f} (torch {torchs:5.1f})" for kind, (ours, torchs) in report[name].items()
        )
        print(f"{name:20s}{cells}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
