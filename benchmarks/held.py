"""What the settings of `lean()` hold of a training step, of stock's: the tables that tell no time."""

from __future__ import annotations

import warnings
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import record
from benchmarks.lean_transformers import Context, checkpointed
from leannorm.report.memory import measure_step
from leannorm.saving import lean, small

Row = dict[str, Any]


def rows(
    model: nn.Module, loss: Callable[[], Tensor], blocks: list[nn.Module], clears: bool = True
) -> Iterator[Row]:
    """Held bytes, the peak, and whether gradients are stock's, of `loss` under each setting.

    `blocks` are what a checkpoint goes around. `clears`: a step starts without the sums of gradients.
    """
    settings: dict[str, Context] = {
        "stock": nullcontext,
        "lean()": lean,
        'lean("conv")': lambda: lean("conv"),
        "lean(budget=.25)": lambda: lean(budget=0.25),
    }
    if blocks:
        settings["checkpoint"] = lambda: checkpointed(blocks, 1)

    def forward(context: Context) -> Tensor:
        with context():
            return loss()

    stock: list[Any] = []
    for setting, context in settings.items():
        for _ in range(2):  # the first pass of a plan keeps as little as it can
            model.zero_grad()
            forward(context).backward()
        found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        model.zero_grad(set_to_none=clears)
        kept, peak, _, _ = measure_step(lambda context=context: forward(context))
        stock = stock or [found, kept, peak]
        equal = all(
            a is b is None or (a is not None and b is not None and torch.equal(a, b))
            for a, b in zip(found, stock[0], strict=True)
        )
        shares = {"held": round(kept / stock[1], 4), "peak": round(peak / stock[2], 4)}
        yield {"setting": setting, **shares, "equal": equal}


def parser_of(doc: str | None, names: Iterable[str], what: str) -> ArgumentParser:
    """Of a command whose arguments are some of these names, with `--json`."""
    parser = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*names, []], metavar=what)
    add_json(parser)
    return parser


def parsed(parser: ArgumentParser) -> Namespace:
    """The arguments, in a process set up for these tables."""
    options = parser.parse_args()
    torch.set_num_threads(1)  # with more, the gradient of a gathered weight has no fixed order
    warnings.simplefilter("ignore")
    small.SMALL = -1  # models this small are left alone otherwise
    return options


def add_json(parser: ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, help="add the rows to this file of benchmarks/results/")


def tell(options: Namespace, found: Iterable[Row], *key: str) -> None:
    """Print the rows as they come, and write them where `--json` says."""
    told = []
    for row in found:
        told.append(row)
        named = " ".join(f"{row[k]!s:17}" for k in key)
        values = [f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()
                  if k not in (*key, "equal")]  # fmt: skip
        print(named, *values, "" if row.get("equal", True) else "GRADIENTS DIFFER", flush=True)
    if options.json and told:
        record.write(options.json, told, *key)
