"""What `lean()` keeps of a training step in each setting, and the step time, relative to plain PyTorch."""

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
from benchmarks.lean_transformers import Context, checkpointed, same_gradients
from leannorm import keep_freed_memory
from leannorm.report.memory import measure_step
from leannorm.saving import lean

Row = dict[str, Any]


def rows(
    model: nn.Module, loss: Callable[[], Tensor], blocks: list[nn.Module], clears: bool = True, turns: int = 0
) -> Iterator[Row]:
    """Kept activations, peak memory, and whether gradients equal the baseline's, for each setting.

    Args:
        model: Its parameters' gradients are compared.
        loss: Runs the forward pass.
        blocks: The modules that a checkpoint wraps; no checkpoint is measured without them.
        clears: Whether a step starts without gradients.
        turns: The number of timed steps per setting. The settings alternate, and the time is the median ratio
            to the baseline's step of the same turn.
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
        for _ in range(6):  # the first pass keeps as little as possible, and later ones correct the plan
            model.zero_grad()
            forward(context).backward()
        gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        model.zero_grad(set_to_none=clears)
        kept, peak, _, _ = measure_step(partial(forward, context))
        stock = stock or [gradients, kept, peak]
        equal = same_gradients(gradients, stock[0])
        shares = {"held": round(kept / stock[1], 4), "peak": round(peak / stock[2], 4)}
        found.append({"setting": setting, **shares, "equal": equal})
    if turns:
        steps = [[step(context) for context in settings.values()] for _ in range(turns)]
        for row, seconds in zip(found, zip(*steps, strict=True), strict=True):
            row["time"] = round(median(x / turn[0] for x, turn in zip(seconds, steps, strict=True)), 3)
    yield from found


def parser_of(doc: str | None, names: Iterable[str], what: str) -> ArgumentParser:
    """The parser of a command that takes some of these names, and `--json`."""
    parser = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*names, []], metavar=what)
    add_json(parser)
    return parser


def parsed(parser: ArgumentParser) -> Namespace:
    """Parse the arguments, and set up the process for these measurements."""
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)  # more would add up the gradient of a gathered weight in no fixed order
    warnings.simplefilter("ignore")
    os.environ["LEANNORM_SMALL_BYTES"] = "-1"  # otherwise lean() leaves models this small as they are
    return options


def add_json(parser: ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, help="add the rows to this file of benchmarks/results/")


def _short(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.2f}" if 0.01 <= value < 100 else f"{value:.3g}"


def tell(options: Namespace, found: Iterable[Row], *key: str) -> None:
    """Print the rows as they come, and write them to the file that `--json` names."""
    told = []
    for row in found:
        told.append(row)
        named = " ".join(f"{record.shown(str(row[k])):17}" for k in key if k in row)
        values = [f"{record.shown(k)} {_short(v)}" for k, v in row.items() if k not in (*key, "equal")]
        print(named, *values, "" if row.get("equal", True) else "GRADIENTS DIFFER", flush=True)
    if options.json and told:
        record.write(options.json, told, *key)
