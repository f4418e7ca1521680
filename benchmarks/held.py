"""What the settings of `lean()` hold of a training step, and its time, of stock's."""

from __future__ import annotations

import os
import warnings
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import record
from benchmarks.lean_transformers import Context, checkpointed
from leannorm import keep_freed_memory
from leannorm.report.memory import measure_step
from leannorm.saving import lean

Row = dict[str, Any]


def rows(
    model: nn.Module, loss: Callable[[], Tensor], blocks: list[nn.Module], clears: bool = True, turns: int = 0
) -> Iterator[Row]:
    """Held bytes, the peak, and whether gradients are stock's, of `loss` under each setting.

    `blocks` are what a checkpoint goes around. `clears`: a step starts without the sums of gradients.
    `turns`: so many steps of each setting tell its time, the median of ratios to stock's step beside it.
    """
    settings: dict[str, Context] = {
        "stock": nullcontext,
        "lean()": lean,
        'lean("norm")': lambda: lean("norm"),
        'lean("conv")': lambda: lean("conv"),
        "lean(budget=.25)": lambda: lean(budget=0.25),
    }
    if blocks:
        settings["checkpoint"] = lambda: checkpointed(blocks, 1)

    def forward(context: Context) -> Tensor:
        with context():
            return loss()

    def step(context: Context) -> float:
        model.zero_grad(set_to_none=clears)
        start = perf_counter()
        forward(context).backward()
        return perf_counter() - start

    stock: list[Any] = []
    found: list[Row] = []
    for setting, context in settings.items():
        for _ in range(6):  # the first pass keeps as little as it can, and three later ones correct the plan
            model.zero_grad()
            forward(context).backward()
        gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        model.zero_grad(set_to_none=clears)
        kept, peak, _, _ = measure_step(partial(forward, context))
        stock = stock or [gradients, kept, peak]
        equal = all(
            a is b is None or (a is not None and b is not None and torch.equal(a, b))
            for a, b in zip(gradients, stock[0], strict=True)
        )
        shares = {"held": round(kept / stock[1], 4), "peak": round(peak / stock[2], 4)}
        found.append({"setting": setting, **shares, "equal": equal})
    if turns:
        steps = [[step(context) for context in settings.values()] for _ in range(turns)]
        for row, seconds in zip(found, zip(*steps, strict=True), strict=True):
            row["time"] = round(median(x / turn[0] for x, turn in zip(seconds, steps, strict=True)), 3)
    yield from found


def parser_of(doc: str | None, names: Iterable[str], what: str) -> ArgumentParser:
    """Of a command whose arguments are some of these names, with `--json`."""
    parser = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*names, []], metavar=what)
    add_json(parser)
    return parser


def parsed(parser: ArgumentParser) -> Namespace:
    """The arguments, in a process set up for these tables."""
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)  # with more, the gradient of a gathered weight has no fixed order
    warnings.simplefilter("ignore")
    os.environ["LEANNORM_SMALL_BYTES"] = "-1"  # models this small are left alone otherwise
    return options


def add_json(parser: ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, help="add the rows to this file of benchmarks/results/")


def _short(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.2f}" if 0.01 <= value < 100 else f"{value:.3g}"


def tell(options: Namespace, found: Iterable[Row], *key: str) -> None:
    """Print the rows as they come, and write them where `--json` says."""
    told = []
    for row in found:
        told.append(row)
        named = " ".join(f"{row[k]!s:17}" for k in key if k in row)
        values = [f"{k} {_short(v)}" for k, v in row.items() if k not in (*key, "equal")]
        print(named, *values, "" if row.get("equal", True) else "GRADIENTS DIFFER", flush=True)
    if options.json and told:
        record.write(options.json, told, *key)
