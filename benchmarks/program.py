"""Fork every architecture, compare with the eager model bit for bit, and measure the cost of a fork.

    python -m benchmarks.program [--json FILE]       all architectures: equality, fork time, file size
    python -m benchmarks.program NAME ...            some of them
    python -m benchmarks.program --steps 15 NAME ... also the time of training steps

Steps are compared with those of the exported module. Prints a line for each architecture, and how many are
equal; exits with 1 unless all are.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from benchmarks.architectures import ARCHITECTURES, Architecture
from leannorm import program

STEPS = 2


def differences(model: torch.nn.Module, forked: program.Program, images: list[torch.Tensor]) -> list[str]:
    """Where the program differs from the eager model, in training steps with inference between them."""
    eager = copy.deepcopy(model)
    found = []

    def compare(what: str, a: Any, b: Any) -> None:
        for mine, theirs in zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True):
            if (mine is None) != (theirs is None) or not (mine is None or same(mine, theirs)):
                found.append(what)
                return

    for step, image in enumerate(images):
        outputs = []
        for run in (forked.train, eager.train()):
            torch.manual_seed(step)
            y = run(image)
            sum(t.float().square().mean() for t in pytree.tree_leaves(y)).backward()
            outputs.append(y)
        compare(f"training output {step}", *outputs)
        pairs = list(zip(model.named_parameters(), eager.parameters(), strict=True))
        compare(f"gradients {step}", [p.grad for (_, p), _ in pairs], [p.grad for _, p in pairs])
        compare(f"state {step}", list(model.buffers()), list(eager.buffers()))
        with torch.no_grad():
            torch.manual_seed(step)
            mine = forked.infer(image)
            torch.manual_seed(step)
            compare(f"inference {step}", mine, eager.eval()(image))
        for net in (model, eager):
            for p in net.parameters():
                p.data.add_(p.grad, alpha=-1e-3) if p.grad is not None else None
                p.grad = None
        model.train()
    return found


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) or (a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all()))


def seconds(function: Any) -> tuple[Any, float]:
    """The function's result and its CPU time (an export runs on one thread)."""
    gc.collect()  # keeps earlier garbage out of the timed call
    start = time.process_time()
    result = function()
    return result, time.process_time() - start


def exports(model: torch.nn.Module, image: torch.Tensor) -> dict[str, torch.export.ExportedProgram]:
    return {mode: torch.export.export(model.train(mode == "train"), (image,)) for mode in ("train", "infer")}


def step_ratio(model: torch.nn.Module, image: torch.Tensor, steps: int) -> float:
    """Median over pairs of training steps: the program's time divided by the exported module's."""
    exported = exports(model, image)["train"].module()
    forked = program.fork(model, (image,))

    def step(run: Any) -> float:
        def forward_and_backward() -> None:
            y = run(image)
            sum(t.float().square().mean() for t in pytree.tree_leaves(y)).backward()

        return seconds(forward_and_backward)[1]

    step(exported), step(forked.train)
    return statistics.median(step(forked.train) / step(exported) for _ in range(steps))


def measure(architecture: Architecture, steps: int) -> dict[str, Any]:
    """One line of the table; `failure` is the reason why an architecture was not forked."""
    image = torch.rand(2, *architecture.image)
    result: dict[str, Any] = {"name": architecture.name, "equal": False}
    try:
        model = architecture.build()
        exports(model, image)  # the first export of a process also imports modules
        _, alone = seconds(lambda: exports(model, image))
        forked, taken = seconds(lambda: program.fork(model, (image,)))
        result["fork"] = taken / alone
        if steps:
            result["step"] = step_ratio(copy.deepcopy(model), image, steps)
        result["different"] = differences(model, forked, [torch.rand_like(image) for _ in range(STEPS)])
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "net.pt2")
            forked.save(path)
            weights = sum(
                t.nbytes for t in {id(t): t for t in model.state_dict(keep_vars=True).values()}.values()
            )
            result["size"] = path.stat().st_size / weights
            loaded = program.Program.load(path)
            result["different"] += [f"loaded {d}" for d in differences_of_programs(forked, loaded, image)]
        shared = [n.meta["branch"] for n in forked.graph.nodes if n.op == "call_function"]
        result["nodes"] = {b: shared.count(b) for b in ("shared", "train", "infer")}
        result["equal"] = not result["different"]
    except Exception as error:
        result["failure"] = f"{type(error).__name__}: {error}".split("\n", 1)[0][:200]
    return result


def differences_of_programs(a: program.Program, b: program.Program, image: torch.Tensor) -> list[str]:
    found = []
    for branch in ("train", "infer"):
        outputs = []
        for p in (a, b):
            torch.manual_seed(3)
            outputs.append(pytree.tree_leaves(p.run(branch, (image,))))
        found += [branch] * (not all(map(same, *outputs)))
    left, right = a.state_dict(), b.state_dict()
    return found + ["state"] * (not all(same(left[k], right[k]) for k in left))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=0)
    options = parser.parse_args()
    chosen = [a for a in ARCHITECTURES if not options.names or a.name in options.names]
    results = []
    for architecture in chosen:
        result = measure(architecture, options.steps)
        results.append(result)
        if "failure" in result:
            print(f"{result['name']:40} not forked: {result['failure']}", flush=True)
            continue
        verdict = "equal" if result["equal"] else f"DIFFERENT: {', '.join(result['different'])}"
        if "step" in result:
            verdict += f", training step {result['step']:.3f} x the exported module's"
        print(
            f"{result['name']:40} fork {result['fork']:.2f} x two exports, "
            f"file {result['size']:.3f} x weights, nodes {result['nodes']}, {verdict}",
            flush=True,
        )
    equal = [r for r in results if r["equal"]]
    forks = [r["fork"] for r in results if "fork" in r]
    print(f"{len(equal)} of {len(results)} equal to the eager model, bit for bit")
    if forks:
        print(f"fork time: median {statistics.median(forks):.2f} x the two exports, worst {max(forks):.2f}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0 if len(equal) == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
