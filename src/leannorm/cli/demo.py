"""`leannorm demo`: train with stock layers and with leannorm's on handwritten digits, and compare."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from leannorm.cli.options import JsonFile, ReportFile

if TYPE_CHECKING:
    from rich.console import Console

    from leannorm.demo.train import Side


def demo(
    data: Annotated[str, typer.Option(help="digits (bundled with scikit-learn) or mnist.")] = "digits",
    root: Annotated[str | None, typer.Option(help="Folder of the MNIST files.", metavar="DIR")] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the training images.")] = 6,
    batch_size: Annotated[int, typer.Option(help="Images in a batch.")] = 256,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of weights, batch order and dropout.")] = 0,
    networks: Annotated[bool, typer.Option(help="First measure a ResNet-50 and a ViT.")] = True,
    json: JsonFile = None,
    report: ReportFile = None,
) -> None:
    """Measure what lean() saves on two usual networks; then train a digit network, stock and lean."""
    from rich.console import Console

    from leannorm._files import check_writable, write_json, write_text
    from leannorm.cli import CHECK_FELL_SHORT
    from leannorm.demo import page
    from leannorm.demo.headline import measured
    from leannorm.demo.train import Settings, compare, prepared
    from leannorm.report.render import require_page

    check_writable(json, report)
    if report:
        require_page()
    settings = Settings(data, root, epochs, batch_size, device, seed)
    digits = prepared(settings)  # what is wrong with them is told before the work
    console, saved = Console(), []
    if networks:
        with console.status("making the networks") as status:
            for one in measured(device, progress=status.update):
                saved.append(one)
                console.print(page.saved_table(one).rich())
    with _Live(console) as live:
        result = compare(settings, digits, live)
    console.print(page.cost_table(result).rich())
    console.print(
        f"{result.data_name}: {result.images} training and {result.test_images} test images; {device}, "
        f"{result.threads} threads; {result.freed_memory}.",
        highlight=False,
    )
    if json:
        write_json(json, result.as_dict() | {"networks": [one.as_dict() for one in saved]})
        console.print(f"numbers: {json}", highlight=False)
    if report:
        write_text(report, page.html(result, saved))
        console.print(f"report: {report}", highlight=False)
    style = "bold green" if result.passed else "bold red"
    for line in [*(one.in_words() + "." for one in saved), result.verdict]:
        console.print(line, style=style, highlight=False)
    console.print(f"For a model of yours: {page.NEXT}", highlight=False)
    if not result.passed:
        raise typer.Exit(CHECK_FELL_SHORT)


class _Live:
    """Shows a progress bar in a terminal, and prints a line after each epoch."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = console
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=None)

    def __enter__(self) -> _Live:
        self._bar.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._bar.stop()

    def step(self, done: int, of: int) -> None:
        self._bar.update(self._task, completed=done, total=of)

    def epoch(self, epoch: int, sides: list[Side]) -> None:
        if epoch == 1:
            self._console.print("training loss and test accuracy", style="bold")
        seen = "  ".join(f"{side.name} {side.loss[-1]:.3f} {side.accuracy[-1]:6.1%}" for side in sides)
        self._console.print(f"epoch {epoch}  {seen}", highlight=False)
