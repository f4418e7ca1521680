"""Layer, RMS and channels-first layer norm compared with torch, and `formulas.py` with the code of models.

    python -m benchmarks.rows [--level op|layer] [--threads 2] [--dtype float32] [--only NAME] [--cpu-time]
    python -m benchmarks.rows --grid [...]      # layer and RMS norm, 64 to 8,192 wide, 16 to 65,536 rows

Results are checked before anything is timed. The sides alternate in one process that keeps freed memory. Each
turn repeats the call, so that data that fits in a cache is there. A side's time is that of its best turn,
since other work only adds to it. Times are also given in copies of the input, by `x.clone()` in the same
turns. The floor is 1 copy forward (read and write once) and 1.5 backward (read twice, write once). A list at
the end has the worst shapes first. `--cpu-time` measures the CPU time of one thread, for a machine that also
does other work. `benchmarks.norms_table` makes a table from the files of several processors.
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

from benchmarks import record
from benchmarks.formulas import FORMULAS, Formula
from benchmarks.norms import Timing
from leannorm import functional
from leannorm._freed_memory import keep_freed_memory
from leannorm._types import KeptByRowNorm, Rows, RowTensors
from leannorm.ops.select import pick

LINES = ((16384, 256), (8192, 768), (4096, 1024), (2048, 4096))
IMAGES = ((32, 96, 56, 56), (32, 192, 28, 28), (32, 384, 14, 14))
# of a ViT-S, a ViT-B and a BERT at batch 8, and the first of Swin
MODELS = ((1576, 384), (1576, 768), (4096, 768), (25088, 96))
WIDTHS = (64, 96, 128, 256, 384, 768, 1024, 2048, 4096, 8192)
GRID = tuple((n, w) for n in (16, 256, 1024, 4096, 16384, 65536) for w in WIDTHS if n * w <= 1 << 25)


def convnext_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """ConvNeXt's published channels-first layer norm."""
    mean = x.mean(1, keepdim=True)
    variance = (x - mean).pow(2).mean(1, keepdim=True)
    x = (x - mean) / torch.sqrt(variance + 1e-5)
    return weight[:, None, None] * x + bias[:, None, None]


class Family(NamedTuple):
    """One row of the table: leannorm's and torch's functions of (x, weight, bias), and the goal `reach`."""

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
        LINES + MODELS,
        1,
        False,
        lambda x, w, b: torch.nn.functional.layer_norm(x, w.shape, w, b),
        (1.3, 2.0),
    ),
    Family(
        "RMS norm",
        LINES + MODELS,
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
    torchs_backward = back(graphs[1])
    if level == "op":
        verbs, rows = pick(plain[0]), Rows(family.axis, family.axis + 1, 1e-5, family.rms)
        b = None if family.rms else plain[2]
        given = RowTensors(plain[0], weight=plain[1], bias=b)
        _, total, mean, rstd = verbs.row_forward(given, rows)
        kept = KeptByRowNorm(total, mean, rstd, plain[1])

        def ours_forward() -> Any:
            return verbs.row_forward(given, rows)

        def ours_backward() -> Any:
            return verbs.row_backward(dy, None, kept, rows)

        if not family.rms and family.axis == len(shape) - 1:  # torch has its own operator here
            aten, size = torch.ops.aten, plain[1].shape
            _, *statistics = aten.native_layer_norm(plain[0], size, *plain[1:], 1e-5)

            def torchs_backward() -> Any:
                return aten.native_layer_norm_backward(
                    dy, plain[0], size, *statistics, *plain[1:], [True] * 3
                )

    sides = Sides((ours_forward, lambda: family.torchs(*plain)), (ours_backward, torchs_backward))
    return sides, plain[0]


def check(
    family: Family | Formula, values: list[Tensor], gradients: list[tuple[Tensor, ...]], dtype: torch.dtype
) -> None:
    """Raise if values or gradients of the two sides differ by more than a hundred roundings."""
    limit = 100 * torch.finfo(dtype).eps
    for ours, torchs in ((values[0], values[1]), *zip(*gradients, strict=True)):
        off = (ours.float() - torchs.float()).abs().max() / torchs.float().abs().max()
        if not off <= limit:
            raise AssertionError(f"{family.name}: the two sides differ by {off:.2e}, more than {limit:.2e}")


def prepare_formula(of: Formula, shape: tuple[int, ...], dtype: torch.dtype, _: str) -> tuple[Sides, Tensor]:
    """Both sides as a model calls them, whatever the level."""
    torch.manual_seed(0)
    leaves = of.make(shape, dtype)
    results = [out if isinstance(out, tuple) else (out,) for out in (of.ours(*leaves), of.theirs(*leaves))]
    dy = [torch.randn_like(y) for y in results[0]]  # in the layout of the output

    def back(y: tuple[Tensor, ...]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)

    check(of, [y[0] for y in results], [back(y)() for y in results], dtype)
    plain = [leaf.detach() for leaf in leaves]
    forward = (lambda: of.ours(*plain)), (lambda: of.theirs(*plain))
    # as many bytes as the input, contiguous
    return Sides(forward, (back(results[0]), back(results[1]))), torch.empty_like(plain[0]).copy_(plain[0])


DIRECTIONS = "forward", "backward"
ROUND = 1e-3  # seconds that a side runs in each turn


def turns(sides: tuple[Callable[[], Any], ...], seconds: float, clock: Callable[[], float]) -> list[float]:
    """Milliseconds per call of each side; the sides alternate for about `seconds`."""
    for side in sides:
        side()
    found: list[list[float]] = [[] for _ in sides]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(found[0]) < 9:
        for side, times in zip(sides, found, strict=True):
            start = clock()
            side()  # loads the cache
            calls = max(1, min(50, int(ROUND / max(clock() - start, 1e-9))))
            start = clock()
            for _ in range(calls):
                side()
            times.append((clock() - start) * 1e3 / calls)
    return [min(times) for times in found]


def measure(
    family: Family | Formula, shape: tuple[int, ...], options: argparse.Namespace, clock: Callable[[], float]
) -> list[Timing]:
    """Forward and backward of one shape."""
    how = shape, getattr(torch, options.dtype), options.level
    if isinstance(family, Formula):
        (sides, x), traffics = prepare_formula(family, *how), family.traffic
    else:
        (sides, x), traffics = prepare(family, *how), (1.0, 1.5)
    found = []
    for direction, pair, traffic in zip(DIRECTIONS, sides, traffics, strict=True):
        ours, torchs, clone = turns((*pair, x.clone), options.seconds, clock)
        found.append(Timing(shape, 1, ours / 1e3, torchs / 1e3, traffic * clone / 1e3))
        name = f"{family.name} {direction}"
        print(
            f"{name:34} {'x'.join(map(str, shape)):14} {ours:8.3f} ms  torch {torchs:8.3f} ms "
            f"{torchs / ours:6.2f}x  copies {ours / clone:5.2f} / {torchs / clone:5.2f}  "
            f"floor {traffic * clone / ours:.2f}",
            flush=True,
        )
    return found


def worst_first(found: dict[str, list[list[Timing]]]) -> list[str]:
    """One line for each shape, forward and backward together."""
    lines = []
    for name, shapes in found.items():
        for both in shapes:
            ratio = sum(t.torchs for t in both) / sum(t.ours for t in both)
            floors = " / ".join(f"{t.floor / t.ours:.2f}" for t in both)
            shape = "x".join(map(str, both[0].shape))
            lines.append((ratio, f"{ratio:6.2f}x  {name:24} {shape:14} floor {floors}"))
    return [line for _, line in sorted(lines)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--level", choices=("op", "layer"), default="op")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--only", default="")
    parser.add_argument("--grid", action="store_true")
    parser.add_argument("--seconds", type=float, default=0.6, help="for each shape and direction")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1 if options.cpu_time else options.threads)
    clock = time.thread_time if options.cpu_time else time.perf_counter
    print(keep_freed_memory())
    torch.ones(2**29, dtype=torch.uint8)  # freed at once: its pages are reused by the timed calls
    print(record.processor())
    families: list[Family | Formula] = [*FAMILIES, *FORMULAS]
    if options.grid:
        families = [family._replace(shapes=GRID) for family in FAMILIES[:2]]
    found, report = {}, {}
    for family in families:
        if options.only not in family.name:
            continue
        of = found[family.name] = [measure(family, shape, options, clock) for shape in family.shapes]
        for direction, asked, timings in zip(DIRECTIONS, family.reach, zip(*of, strict=True), strict=True):
            mean = math.exp(sum(math.log(t.torchs / t.ours) for t in timings) / len(timings))
            share = median(t.floor / t.ours for t in timings)
            verdict = "reached" if mean >= asked else "missed"
            told = f"{mean:.2f}x torch's speed (goal {asked}x, {verdict}), floor {share:.2f} of the time"
            print(f"{family.name} {direction}: {told}")
            shapes = [t._asdict() for t in timings]
            report[f"{family.name}, {direction}"] = {"ratio": mean, "floor": share, "shapes": shapes}
    print("Forward and backward together, worst first:", *worst_first(found), sep="\n")
    if options.json:
        about = {**record.about(), "dtype": options.dtype}
        options.json.write_text(json.dumps({**about, "rows": report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
