"""Layer norm, RMS norm and channel-first layer norm against torch; `formulas.py` against the code of models.

    python -m benchmarks.rows [--level op|layer] [--threads 2] [--dtype float32] [--only NAME] [--cpu-time]

Results are checked before anything is timed. The sides take turns in one process, freed memory is kept for
both, and ratios are medians over the turns. The floor is the time to move the bytes (forward: read and write
once; backward: read twice, write once) at the speed of `x.clone()` in the same run. `--cpu-time` measures the
processor time of one thread, for a machine that also runs other work.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.formulas import FORMULAS, Formula
from leannorm import functional
from leannorm._freed_memory import keep_freed_memory
from leannorm._types import KeptByRowNorm, Rows
from leannorm.ops.select import pick

LINES = ((16384, 256), (8192, 768), (4096, 1024), (2048, 4096))
IMAGES = ((32, 96, 56, 56), (32, 192, 28, 28), (32, 384, 14, 14))


def convnext_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """ConvNeXt's published channels-first layer norm."""
    mean = x.mean(1, keepdim=True)
    variance = (x - mean).pow(2).mean(1, keepdim=True)
    x = (x - mean) / torch.sqrt(variance + 1e-5)
    return weight[:, None, None] * x + bias[:, None, None]


class Family(NamedTuple):
    """One row of the table: leannorm's function and torch's, on (x, weight, bias), and the goal `reach`."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    axis: int
    rms: bool
    torchs: Callable[[Tensor, Tensor, Tensor], Tensor]
    reach: tuple[float, float]  # forward, backward

    def ours(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        shape = (x.shape[self.axis],)
        if self.rms:
            return functional.rms_norm(x, shape, weight, 1e-5, dim=self.axis)
        return functional.layer_norm(x, shape, weight, bias, dim=self.axis)


FAMILIES = (
    Family(
        "layer norm",
        LINES,
        1,
        False,
        lambda x, w, b: torch.nn.functional.layer_norm(x, w.shape, w, b),
        (1.3, 2.0),
    ),
    Family(
        "RMS norm",
        LINES,
        1,
        True,
        lambda x, w, b: torch.nn.functional.rms_norm(x, w.shape, w, 1e-5),
        (3.0, 8.0),
    ),
    Family("channels first", IMAGES, 1, False, convnext_norm, (10.0, 20.0)),
)


class Sides(NamedTuple):
    forward: tuple[Callable[[], Any], Callable[[], Any]]  # ours, torch's
    backward: tuple[Callable[[], Any], Callable[[], Any]]


def prepare(family: Family, shape: tuple[int, ...], dtype: torch.dtype, level: str) -> tuple[Sides, Tensor]:
    torch.manual_seed(0)
    x, dy = (torch.randn(shape).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(shape[family.axis]).to(dtype) for _ in range(2))
    x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()
    wanted = [x, weight] if family.rms else [x, weight, bias]
    results = [side(x, weight, bias) for side in (family.ours, family.torchs)]
    check(family, results, [torch.autograd.grad(y, wanted, dy, retain_graph=True) for y in results], dtype)
    plain = [t.detach() for t in (x, weight, bias)]
    graphs = [side(x, weight, bias) for side in (family.ours, family.torchs)]

    def back(y: Tensor) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(y, wanted, dy, retain_graph=True)

    ours_forward, ours_backward = lambda: family.ours(*plain), back(graphs[0])
    if level == "op":
        verbs, rows = pick(plain[0]), Rows(family.axis, family.axis + 1, 1e-5, family.rms)
        b = None if family.rms else plain[2]
        _, total, mean, rstd = verbs.row_forward(plain[0], None, plain[1], b, rows)
        kept = KeptByRowNorm(total, mean, rstd, plain[1])

        def ours_forward() -> Any:
            return verbs.row_forward(plain[0], None, plain[1], b, rows)

        def ours_backward() -> Any:
            return verbs.row_backward(dy, None, kept, rows)

    sides = Sides((ours_forward, lambda: family.torchs(*plain)), (ours_backward, back(graphs[1])))
    return sides, plain[0]


def check(
    family: Family | Formula, values: list[Tensor], gradients: list[tuple[Tensor, ...]], dtype: torch.dtype
) -> None:
    """Raises if values or gradients of the two sides differ by more than a hundred roundings."""
    limit = 100 * torch.finfo(dtype).eps
    for ours, torchs in ((values[0], values[1]), *zip(*gradients, strict=True)):
        off = (ours.float() - torchs.float()).abs().max() / torchs.float().abs().max()
        if not off <= limit:
            raise AssertionError(f"{family.name}: the two sides differ by {off:.2e}, more than {limit:.2e}")


def prepare_formula(of: Formula, shape: tuple[int, ...], dtype: torch.dtype, _: str) -> tuple[Sides, Tensor]:
    """Both sides as a model calls them; `level` makes no difference."""
    torch.manual_seed(0)
    leaves = of.make(shape, dtype)
    results = [out if isinstance(out, tuple) else (out,) for out in (of.ours(*leaves), of.theirs(*leaves))]
    dy = [torch.randn(y.shape).to(dtype) for y in results[0]]

    def back(y: tuple[Tensor, ...]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)

    check(of, [y[0] for y in results], [back(y)() for y in results], dtype)
    plain = [leaf.detach() for leaf in leaves]
    forward = (lambda: of.ours(*plain)), (lambda: of.theirs(*plain))
    # the input's bytes in one piece, whatever it is a slice of
    return Sides(forward, (back(results[0]), back(results[1]))), torch.empty_like(plain[0]).copy_(plain[0])


def turns(sides: tuple[Callable[[], Any], ...], seconds: float, clock: Callable[[], float]) -> list[float]:
    """Median milliseconds of each side; the sides take turns for about `seconds`."""
    for side in sides:
        side()
    found: list[list[float]] = [[] for _ in sides]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(found[0]) < 5:
        for side, times in zip(sides, found, strict=True):
            start = clock()
            side()
            times.append((clock() - start) * 1e3)
    return [median(times) for times in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--level", choices=("op", "layer"), default="op")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=0.6, help="for each shape and direction")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1 if options.cpu_time else options.threads)
    clock = time.thread_time if options.cpu_time else time.perf_counter
    print(keep_freed_memory())
    rows = []
    for family in (*FAMILIES, *FORMULAS):
        if options.only not in family.name:
            continue
        made, traffics = prepare, (1.0, 1.5)
        if isinstance(family, Formula):
            made, traffics = prepare_formula, family.traffic
        ratios: list[list[float]] = [[], []]
        for shape in family.shapes:
            sides, x = made(family, shape, getattr(torch, options.dtype), options.level)
            for i, (direction, pair, traffic) in enumerate(
                (("forward", sides.forward, traffics[0]), ("backward", sides.backward, traffics[1]))
            ):
                ours, torchs, clone = turns((*pair, x.clone), options.seconds, clock)
                ratios[i].append(torchs / ours)
                row = {
                    "what": f"{family.name} {direction}",
                    "shape": "x".join(map(str, shape)),
                    "ours_ms": ours,
                    "torch_ms": torchs,
                    "ratio": torchs / ours,
                    "floor_share": traffic * clone / ours,
                }
                rows.append(row)
                print(
                    f"{row['what']:24} {row['shape']:14} {ours:8.2f} ms  torch {torchs:8.2f} ms  "
                    f"{row['ratio']:6.2f}x  floor {row['floor_share']:.2f}",
                    flush=True,
                )
        for direction, asked, of in zip(("forward", "backward"), family.reach, ratios, strict=True):
            mean = math.exp(sum(map(math.log, of)) / len(of))
            verdict = "reached" if mean >= asked else "falls short"
            print(f"{family.name} {direction}: {mean:.2f}x (reach {asked}x, {verdict})")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
