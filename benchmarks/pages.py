"""Tables and sentences of the pages about measurements, from the files of `benchmarks/results/`.

A page has a comment `[[[cog table(...) ]]]`, and the output follows below it, up to `[[[end]]]`. `make pages`
runs the comments again and draws the pictures; a test fails if a page and the files disagree. README.md has
only the output: the comments are in `README.template.md`. Numbers are relative to plain PyTorch, as
`kept / peak / time`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import date
from itertools import pairwise
from math import prod
from statistics import median
from typing import Any, NamedTuple

from benchmarks import record

# how a page writes a setting of `benchmarks.lean_transformers`
CALLS = {
    'lean("norm")': '`lean("norm")`',
    'lean("conv")': '`lean("conv")`',
    "lean(budget=.25)": "`lean(budget=0.25)`",
    "lean(budget=.15)": "`lean(budget=0.15)`",
    "checkpoint, every block": "a checkpoint around every block",
}


GPU = "gpu-nvidia-h200"  # the file of the GPU that the pages show
AT = "{threads} core{s} of {processor}, torch {torch}, {date} ({commit})"
ON_GPU = "{device}, torch {torch}, Triton {triton}, {day}; a copy moves {copy:.2f} TB/s"


class Measured(NamedTuple):
    """One setting of one model, and the run that measured it."""

    held: float
    peak: float
    time: float
    run: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return f"{self.held:.2f} / {self.peak:.2f} / {self.time:.2f}"

    @property
    def columns(self) -> str:
        return str(self).replace(" / ", " | ")

    @property
    def percents(self) -> str:
        """As people say them: 32 % of the bytes, 49 % of the peak, 9 % more time."""
        return f"{percent(self.held)} | {percent(self.peak)} | {more(self.time)}"

    @property
    def in_one(self) -> str:
        """The same in one cell, with no line break before a percent sign."""
        return self.percents.replace(" | ", ", ").replace(" %", "\N{NO-BREAK SPACE}%")


def select(file: str, **wanted: Any) -> list[dict[str, Any]]:
    """The rows of a file that have these values, in the order of the file."""
    rows = record.read(record.FOLDER / f"{file}.json")
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def find(file: str, **wanted: Any) -> list[Measured]:
    """The same rows, relative to plain PyTorch."""
    return [
        Measured(_first(row, "kept_ratio", "held_ratio", "held", "kept"),
                 _first(row, "peak_ratio", "peak"), _first(row, "ratio", "time"),
                 tuple(row["about"].items()))
        for row in select(file, **wanted)
    ]  # fmt: skip


def of_run(rows: list[dict[str, Any]]) -> str:
    """The machine, the date and the commit of the rows."""
    return where(*(Measured(0, 0, 0, tuple(row["about"].items())) for row in rows))


def thousands(number: float) -> str:
    """With commas, and without decimals."""
    return f"{number:,.0f}"


def _first(row: dict[str, Any], *keys: str) -> float:
    return next(row[key] for key in keys if key in row)


def one(file: str, **wanted: Any) -> Measured:
    (row,) = find(file, **wanted)
    return row


def vision(model: str, setting: str) -> Measured:
    """From `python -m benchmarks.lean`."""
    return one("lean_cpu", model=model, setting=setting)


def language(model: str, setting: str, dtype: str = "bfloat16") -> Measured:
    """From `python -m benchmarks.lean_transformers --large`."""
    return one("lean_transformers_large_cpu", model=model, setting=setting, dtype=dtype)


def small(model: str, setting: str, dtype: str = "bfloat16") -> Measured:
    """From `python -m benchmarks.lean_transformers --selective`."""
    return one("lean_transformers_cpu", model=model, setting=setting, dtype=dtype)


def converted(model: str, setting: str, file: str = "models_cpu") -> Measured:
    """From `python -m benchmarks.models`."""
    return one(file, model=model, setting=setting)


def compiled(model: str, setting: str) -> Measured:
    """From `python -m benchmarks.lean_compiled`, relative to the model compiled without options."""
    return one("lean_compiled_cpu", model=model, setting=setting, convert=False)


def example(script: str, *settings: str) -> str:
    """From `python -m benchmarks.examples`: what a script keeps, relative to plain PyTorch's MB."""
    row = _example(script, *(settings or ("lean", "norm")))
    return f"{row['held']:.2f} of {row['stock']:.1f} MB"


def example_call(script: str) -> str:
    """The setting that `example` shows."""
    return "`lean()`" if _example(script, "lean", "norm")["setting"] == "lean" else '`lean("norm")`'


def printed(script: str, *commands: str) -> None:
    """A script in a terminal, from the same command: the commands, and what the last one prints."""
    lines = [f"$ {command}" for command in commands] + _example(script, "printed")["lines"]
    say("\n".join(["```console", *lines, "```"]))


def of_examples() -> str:
    """The machine, the date and the commit of `python -m benchmarks.examples`."""
    return of_run(select("examples"))


def batch(setting: str) -> str:
    """The largest batch of a ResNet-18 in 8 GiB, from the same command."""
    return str(_example("fit timm:resnet18 8GiB", setting)["batch"])


def _example(script: str, *settings: str) -> dict[str, Any]:
    """The row with one of these settings."""
    (row,) = (row for row in select("examples", script=script) if row["setting"] in settings)
    return row


def first_step(model: str, setting: str, file: str = "models_compile_cpu") -> float:
    """The seconds of the first step, including compilation, from `python -m benchmarks.models`."""
    (row,) = select(file, model=model, setting=setting)
    return float(row["first"])


def beside_checkpoint(model: str, dtype: str, checkpoint: str) -> float | None:
    """How much more time a checkpoint takes than `lean()` at the same kept bytes, relative to the baseline.

    `lean()`'s time is interpolated between its settings. None if the checkpoint keeps less than all of them,
    or more.
    """
    named = "lean_transformers_cpu"
    ours = sorted((row.held, row.time) for row in _lean_rows(named, model, dtype))
    theirs = one(named, model=model, dtype=dtype, setting=checkpoint)
    for (low, slow), (high, fast) in pairwise(ours):
        if low <= theirs.held <= high:
            share = (theirs.held - low) / (high - low) if high > low else 0.0
            return theirs.time - (slow + share * (fast - slow))
    return None


def _lean_rows(file: str, model: str, dtype: str) -> list[Measured]:
    settings = {row["setting"] for row in record.read(record.FOLDER / f"{file}.json")}
    return [
        row
        for name in sorted(settings) if name == "stock" or name.startswith("lean")
        for row in find(file, model=model, dtype=dtype, setting=name)
    ]  # fmt: skip


def calls(name: str, *kinds: str) -> list[str]:
    """From `python -m benchmarks.calls`: our time over torch's, with nodes in C++, then in Python."""
    ratios = {(row["kind"], row["nodes"]): f"{row['ratio']:.2f}" for row in select("calls", call=name)}
    cpp = [ratios.get((kind, "C++"), "") for kind in kinds]
    return [*cpp, ", ".join(ratios[kind, "Python"] for kind in kinds if (kind, "Python") in ratios)]


def calls_span(nodes: str) -> str:
    """The least and the greatest of these ratios, for calls of layers."""
    rows = (row for row in select("calls", nodes=nodes) if not row["call"].startswith("step"))
    return _span(row["ratio"] for row in rows)


def kernels_span(folder: str, *files: str) -> str:
    """The least and the greatest share of torch's time, from `python -m benchmarks.rows` or `.norms`."""
    reports = (json.loads((record.FOLDER / folder / f"{file}.json").read_text()) for file in files)
    return _span(1 / row["ratio"] for report in reports for row in report["rows"].values())


def shared(ranks: int, shape: str, *ratios: str, as_is: bool = False) -> list[str]:
    """From `python -m benchmarks.sync`: medians in ms, shared over bare in each round, other ratios."""
    rows = select("sync_cpu", ranks=ranks, shape=shape, as_is=as_is)
    sides = {name: median(row["milliseconds"][name] for row in rows) for name in rows[0]["milliseconds"]}
    rounds = ", ".join(f"{ratio:.2f}" for ratio in sorted(row["shared_over_bare"] for row in rows))
    others = [f"{median(row[ratio] for row in rows):.2f}" for ratio in ratios]
    return [*(f"{time:.1f}" for time in sides.values()), rounds, *others]


def kernels(folder: str, head: str, *files: str) -> None:
    """Print the table of `python -m benchmarks.rows` or `.norms`: times torch's speed (and share), by file.

    A row with two directions has both in one cell. The row that is worst in the first file comes first.
    """
    reports = [json.loads((record.FOLDER / folder / f"{file}.json").read_text())["rows"] for file in files]
    names: dict[str, list[str]] = {}
    for key in reports[0]:
        names.setdefault(key.removesuffix(", forward").removesuffix(", backward"), []).append(key)

    def cell(report: dict[str, Any], keys: list[str]) -> str:
        rows = [report[key] for key in keys if key in report]
        ratios, floors = (
            " / ".join(f"{row[what]:.{digits}f}" for row in rows)
            for what, digits in (("ratio", 3 - len(keys)), ("floor", 2))
        )
        return f"{ratios} ({floors})" if rows else ""

    worst_first = sorted(names, key=lambda name: prod(reports[0][key]["ratio"] for key in names[name]))
    table(head, {name: [cell(report, names[name]) for report in reports] for name in worst_first})


def of_gpu() -> dict[str, Any]:
    """The results of `python -m benchmarks.gpu`."""
    found: dict[str, Any] = json.loads((record.FOLDER / f"{GPU}.json").read_text())
    return found


def gpu(network: str, setting: str) -> Measured:
    """A training step on the GPU, relative to plain PyTorch."""
    (row,) = (r for r in of_gpu()["steps"] if (r["network"], r["setting"]) == (network, setting))
    names = ("held_bytes", "max_memory_allocated", "milliseconds")
    held, peak, time = (row[f"{name}_of_stock"] for name in names)
    return Measured(held, peak, time, run=())


def on_gpu(of: str = ON_GPU) -> str:
    """The GPU, the date and the versions of the software."""
    about = of_gpu()
    return of.format(**about, day=about["date"][:10], copy=about["copy_tb_s"])


def gpu_kernels() -> None:
    """For each direction: µs, times torch's speed, and the share of the bandwidth limit."""
    rows = {(r["case"], tuple(r["shape"]), r["direction"], r["side"]): r for r in of_gpu()["rows"]}

    def cell(*key: Any) -> str:
        ours, theirs = rows[(*key, "ours")], rows[(*key, "torch")]
        faster = theirs["microseconds"] / ours["microseconds"]
        return f"{ours['microseconds']:.0f} | {faster:.2f} | {ours['share']:.2f}"

    cases = dict.fromkeys(key[:2] for key in rows)
    each = "µs | times torch's speed | share"
    head = f"norm, bfloat16 | forward, {each} | backward, {each}"
    names = {case: f"{case[0]} {'×'.join(map(str, case[1]))}" for case in cases}
    table(head, {names[case]: f"{cell(*case, 'forward')} | {cell(*case, 'backward')}" for case in cases})


def table(head: str, rows: Mapping[str, Measured | str | Iterable[Measured] | Iterable[str]]) -> None:
    """Print a table. A row of one measurement has three columns, a row of several one for each of them."""
    lines = [f"| {head} |", "|---" * len(head.split(" | ")) + "|"]
    for name, row in rows.items():
        cells = row.columns if isinstance(row, Measured) else row
        lines.append(f"| {name} | {cells if isinstance(cells, str) else ' | '.join(map(str, cells))} |")
    say("\n".join(lines))


def first(head: str, *names: str) -> tuple[list[Measured], list[Measured]]:
    """Print the README's first table: a CNN, a ViT and a Llama on a CPU, then on a GPU.

    The columns are `lean()`, `lean("conv")`, a checkpoint around every block, and half of torch.compile's
    activation budget; a cell without a measurement has a dash. Return the CPU's `lean()` and budget cells.
    """
    cnn, vit, llama = "resnet50", "vit_small_patch16_224", "llama"
    rows: list[list[Measured | None]] = [
        [vision(name, of) for of in ("lean", "conv", "checkpoint")] for name in (cnn, vit)
    ]
    rows.append([language(llama, of) for of in ("lean()", 'lean("conv")', "checkpoint, every block")])
    budgets = [compiled(name, "torch .5") for name in (cnn, vit, f"{llama}_large bfloat16")]
    for row, budget in zip(rows, budgets, strict=True):
        row.append(budget)
    rows += [[None, gpu(of, "conv"), gpu(of, "checkpoint"), None] for of in ("resnet50", "vit", "Llama")]
    cells = [[cell.in_one if cell else "–" for cell in row] for row in rows]
    table(head, dict(zip(names, cells, strict=True)))
    return [row[0] for row in rows if row[0]], budgets


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def more(time: float, signs: str = "+−") -> str:
    """How much more time than plain PyTorch."""
    beyond = round(100 * (time - 1))
    return f"{signs[beyond < 0]}{abs(beyond)} %" if beyond else "0 %"


def span(what: str, *rows: Measured) -> str:
    """The least and the greatest `held`, `peak` or added `time`, in percent."""
    beyond = 1 if what == "time" else 0
    shown = sorted({round(100 * (getattr(row, what) - beyond)) for row in rows})
    return f"{shown[0]} %" if len(shown) == 1 else f"{shown[0]}–{shown[-1]} %"


def say(text: str) -> None:
    """Print a paragraph."""
    print(f"\n{text}\n")


def _span(numbers: Iterable[float]) -> str:
    shown = sorted({f"{number:.2f}" for number in numbers}, key=float)
    return shown[0] if len(shown) == 1 else f"{shown[0]}–{shown[-1]}"


def where(*rows: Measured, of: str = AT, between: tuple[str, str] = ("; ", ", ")) -> str:
    """The machine, torch, date and commits of the rows; each machine and date once."""
    runs: dict[tuple[tuple[str, Any], ...], dict[str, None]] = {}
    for row in rows:
        about = dict(row.run)
        processor = about["processor"].split(",")[0].replace("(R)", "").removesuffix(" Processor")
        shown = {"processor": processor, "threads": about["threads"], "torch": about["torch"]}
        shown["date"] = date.fromisoformat(about["date"])
        runs.setdefault(tuple(shown.items()), {})[about["commit"]] = None
    return between[0].join(
        of.format(**dict(key), commit=between[1].join(commits), s="" if dict(key)["threads"] == 1 else "s")
        for key, commits in runs.items()
    )
