"""The time of a training step of a transformers model after `convert`, compared with plain PyTorch.

    python -m benchmarks.convert_transformers [MODEL ...] [--dtype bfloat16] [--cpu-time] [--operators 8]
                                                [--compiled]

The models have 4 layers of width 1,024 and see 2 x 512 tokens. Gradients are compared first: their distance
from float32's may be at most twice the baseline's. The settings alternate in one process that keeps freed
memory, and ratios are medians over the turns. `--cpu-time` measures the CPU time of one thread, for a machine
that also does other work. `--operators` lists the operators that take the most time. With `--compiled`, all
models are compiled after that comparison, and then their losses are compared.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks import record
from benchmarks.lean_transformers import LARGE, MODELS
from leannorm import convert, keep_freed_memory

SIZES = LARGE._replace(tokens=(2, 512))
GOAL, GOAL_COMPILED = 0.93, 1.02  # relative to the baseline's time
SETTINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "stock": lambda model: model,
    "convert": convert,
}


def step(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    model.zero_grad()
    model(**inputs).loss.backward()


def gradients(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    step(model, inputs)
    found = [p.grad.float() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def compare(sides: dict[str, nn.Module], inputs: dict[str, Tensor]) -> None:
    """Raise if the gradients of a converted network are wrong, on some of the tokens."""
    few = {name: tokens[:1, :64] for name, tokens in inputs.items()}
    exact = gradients(copy.deepcopy(sides["stock"]).float(), few)
    off = {}
    for name, model in sides.items():
        off[name] = sum(
            float((g - e).square().sum()) for g, e in zip(gradients(model, few), exact, strict=True)
        )
        if not off[name] <= 4 * off["stock"]:
            raise SystemExit(f"nothing was timed: gradients of {name} are off by {off[name]:.2e}")


def compile_all(sides: dict[str, nn.Module], inputs: dict[str, Tensor]) -> None:
    """Raise if the loss of a converted network differs from the baseline's."""
    losses = {}
    for name, model in sides.items():
        model.compile()
        step(model, inputs)
        losses[name] = model(**inputs).loss.item()
        if not abs(losses[name] - losses["stock"]) <= 1e-2 * abs(losses["stock"]):
            raise SystemExit(f"nothing was timed: the losses differ: {losses}")


def turns(
    sides: dict[str, nn.Module], inputs: dict[str, Tensor], steps: int, cpu: bool, goal: float = GOAL
) -> None:
    clock = time.thread_time if cpu else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(steps):
        for name, model in sides.items():
            start = clock()
            step(model, inputs)
            seconds[name].append(clock() - start)
    for name, of in seconds.items():
        ratio = median(a / b for a, b in zip(of, seconds["stock"], strict=True))
        verdict = "" if name == "stock" else f" ({'reaches' if ratio <= goal else 'misses'} {goal})"
        print(f"  {record.shown(name):24}{median(of) * 1e3:9.1f} ms  {ratio:5.3f}{verdict}", flush=True)


def operators(model: nn.Module, inputs: dict[str, Tensor], count: int) -> None:
    """Print the operators that take most of a step, without the operators that they call."""
    with torch.profiler.profile() as profile:
        step(model, inputs)
    averages = profile.key_averages()
    whole = sum(event.self_cpu_time_total for event in averages)
    for event in sorted(averages, key=lambda event: -event.self_cpu_time_total)[:count]:
        print(f"    {event.self_cpu_time_total / whole:6.1%}  {event.count:4} x {event.key[:80]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=["llama"], metavar="MODEL")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--operators", type=int, default=0, metavar="COUNT", help="list this many")
    options = parser.parse_args()
    torch.set_num_threads(1 if options.cpu_time else options.threads)
    print(keep_freed_memory())
    for name in options.models:
        torch.manual_seed(0)
        model, inputs, _ = MODELS[name](SIZES)
        model.to(getattr(torch, options.dtype))
        sides = {key: made(copy.deepcopy(model)) for key, made in SETTINGS.items()}
        compare(sides, inputs)
        if options.compiled:
            compile_all(sides, inputs)
        print(f"{name}, {options.dtype}{', compiled' if options.compiled else ''}")
        goal = GOAL_COMPILED if options.compiled else GOAL
        turns(sides, inputs, options.steps, options.cpu_time, goal)
        for key in ("stock", "convert") if options.operators else ():
            print(f"  {key}: the operators' own time")
            operators(sides[key], inputs, options.operators)


if __name__ == "__main__":
    main()
