"""What several subcommands share: options, and how a report is printed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from leannorm._report import Report

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write every number here.", metavar="FILE")]
Inputs = Annotated[
    list[str],
    typer.Option(
        "--input",
        help="Sizes of the model's input, batch first; 'ids=2x512:int64<32000' has a name, a dtype and a "
        "range. Repeatable.",
        metavar="8x3x224x224",
    ),
]
Dtype = Annotated[str, typer.Option(help="Of the model and its inputs: float32, bfloat16, float16, float64.")]
Budgets = Annotated[
    list[float], typer.Option("--budget", help="Share of plain PyTorch's bytes to keep; repeatable.")
]
Peaks = Annotated[
    list[str], typer.Option("--peak", help="Share of plain PyTorch's peak, or 8GiB; repeatable.")
]
HtmlFile = Annotated[Path | None, typer.Option("--report", help="Write an HTML page here.", metavar="FILE")]
_MODEL = (
    "timm:NAME, torchvision:NAME, hf:TYPE (as hf:llama, small), package.module:callable or mymodel.py:make."
)
Model = Annotated[str, typer.Argument(help=_MODEL, metavar="MODEL")]
ModelOption = Annotated[str, typer.Option("--model", help=_MODEL, metavar="MODEL")]


def terminal() -> Console:
    """The terminal, without markup: a path may look like rich's marks."""
    from rich.console import Console

    return Console(soft_wrap=True, markup=False, emoji=False, highlight=False)


@contextmanager
def under_way(first: str) -> Iterator[Callable[[str], None]]:
    """Prints what is being done, and yields the function that prints what comes next.

    On a terminal it is one line that changes; elsewhere (a pipe, a file, a log) each is a line, at once. Of
    several ranks started by torchrun, only the first prints.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console()
    if console.is_terminal:
        with console.status(Text(first)) as status:
            yield lambda doing: status.update(Text(doing))
        return

    def say(doing: str) -> None:
        if os.environ.get("RANK", "0") == "0":
            print(f"{doing} ...", flush=True)

    say(first)
    yield say


def tell(report: Report, json: Path | None = None, html: Path | None = None, passes: object = True) -> None:
    """Print the report and write the files that were asked for; exits with 1 if the report does not pass."""
    from leannorm._files import write_text
    from leannorm.cli import CHECK_FELL_SHORT

    report.print()
    console = terminal()
    if json:
        write_text(json, report.to_json())
        console.print(f"numbers: {json}")
    if html:
        report.to_html(html)  # type: ignore[attr-defined]  # of those that have a page
        console.print(f"report: {html}")
    if not passes:
        raise typer.Exit(CHECK_FELL_SHORT)
