"""Overhead per call of layers on small tensors, and of small training steps, compared with torch's.

    python -m benchmarks.calls [--only NAME] [--turns 15] [--json FILE]

For a layer it reports microseconds of CPU time per call: without gradients, with gradients, and for forward
and backward together. For a small network it reports the time of a step: forward, backward and optimizer.
Each row says whether autograd nodes in C++ or in Python were used. leannorm and torch alternate on one
thread, 100 calls (20 steps) each, and a low quantile over these turns counts. The goal is at most 1.05 times
torch's time per call, and 1.00 times per step. Outputs are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from benchmarks import held
from leannorm import convert, keep_freed_memory, nn
from leannorm.autograd.nodes import NODES

CALLS, STEPS = 100, 20
IMAGE, ROWS, SIGNAL = (8, 16, 4, 4), (32, 64), (8, 16, 16)
# class name in both libraries, constructor arguments, input shape, training mode
LAYERS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], bool]] = {
    "BatchNorm2d": ("BatchNorm2d", (16,), IMAGE, True),
    "BatchNorm2d, eval": ("BatchNorm2d", (16,), IMAGE, False),
    "BatchNorm1d": ("BatchNorm1d", (64,), ROWS, True),
    "BatchNorm1d, eval": ("BatchNorm1d", (64,), ROWS, False),
    "BatchNorm1d, (N, C, L)": ("BatchNorm1d", (16,), SIGNAL, True),
    "GroupNorm": ("GroupNorm", (4, 16), IMAGE, True),
    "InstanceNorm1d": ("InstanceNorm1d", (16,), SIGNAL, True),
    "InstanceNorm2d": ("InstanceNorm2d", (16,), IMAGE, True),
    "LayerNorm": ("LayerNorm", (64,), ROWS, True),
    "RMSNorm": ("RMSNorm", (64,), ROWS, True),
}


def mlp() -> tuple[torch.nn.Module, torch.Tensor]:
    """784-256-256-10, batch 32."""
    layers: list[torch.nn.Module] = []
    for inputs in (784, 256):
        layers += [torch.nn.Linear(inputs, 256, bias=False), torch.nn.BatchNorm1d(256), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(256, 10)), torch.randn(32, 784)


def cnn() -> tuple[torch.nn.Module, torch.Tensor]:
    """Three blocks of convolution, batch norm and ReLU on 28x28 images, batch 8."""
    layers: list[torch.nn.Module] = []
    for inputs, outputs in ((1, 16), (16, 32), (32, 64)):
        convolution = torch.nn.Conv2d(inputs, outputs, 3, padding=1, stride=2, bias=False)
        layers += [convolution, torch.nn.BatchNorm2d(outputs), torch.nn.ReLU()]
    head = torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 10)
    return torch.nn.Sequential(*layers, *head), torch.randn(8, 1, 28, 28)


NETWORKS = {"step of an MLP": mlp, "step of a CNN": cnn}


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


def step(model: torch.nn.Module, x: torch.Tensor) -> Callable[[], object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    target = torch.arange(len(x)) % 10

    def once() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    return once


def microseconds(call: Callable[[], object], times: int) -> float:
    start = time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - start) / times * 1e6


def alternating(sides: list[Callable[[], object]], turns: int, times: int) -> tuple[float, float]:
    """Alternate the two sides; return a low quantile of the microseconds of each."""
    found = [[microseconds(side, times) for side in sides] for _ in range(turns + 1)][1:]
    ours, torchs = (sorted(of_one)[turns // 5] for of_one in zip(*found, strict=True))
    return ours, torchs


def measure_layer(name: str, turns: int) -> dict[str, tuple[float, float]]:
    kind, arguments, shape, training = LAYERS[name]
    layers = [getattr(module, kind)(*arguments).train(training) for module in (nn, torch.nn)]
    x = torch.randn(shape)
    torch.testing.assert_close(layers[0](x), layers[1](x))
    sides = [kinds_of_call(layer, shape) for layer in layers]
    return {kind: alternating([side[kind] for side in sides], turns, CALLS) for kind in sides[0]}


def measure_step(name: str, turns: int) -> dict[str, tuple[float, float]]:
    torch.manual_seed(0)
    model, x = NETWORKS[name]()
    sides = [step(convert(copy.deepcopy(model)), x), step(model, x)]
    for _ in range(3):
        ours, torchs = (side() for side in sides)
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-5)
    return {"step": alternating(sides, turns, STEPS)}


def measured(name: str, turns: int) -> Iterator[held.Row]:
    """One row for each kind of call of a layer, or one row for the step of a network."""
    found = (measure_layer if name in LAYERS else measure_step)(name, turns)
    for kind, (ours, torchs) in found.items():
        us = {"us": round(ours, 2), "torch_us": round(torchs, 2), "ratio": round(ours / torchs, 3)}
        yield {"call": name, "kind": kind, "nodes": "Python" if NODES is None else "C++", **us}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=[*LAYERS, *NETWORKS], metavar="NAME", help="one layer or network")
    parser.add_argument("--turns", type=int, default=15, help="how often the two sides alternate")
    held.add_json(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(keep_freed_memory())  # for both sides: otherwise page faults take most of a step
    gc.freeze()
    names = [options.only] if options.only else [*LAYERS, *NETWORKS]
    held.tell(
        options, (row for name in names for row in measured(name, options.turns)), "call", "kind", "nodes"
    )


if __name__ == "__main__":
    main()
