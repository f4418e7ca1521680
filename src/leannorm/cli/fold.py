"""`leannorm fold`: fold batch norms into neighbouring layers, and measure the change of the outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leannorm.cli.options import Inputs, JsonFile, tell, terminal


def fold(
    model: Annotated[
        str,
        typer.Argument(
            help="A program's file (.pt2), or timm:NAME, package.module:callable, mymodel.py:make, ..."
        ),
    ],
    input: Inputs = ["2x3x224x224"],  # noqa: B006  # typer needs a list as the default
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the folded model here (torch.export).", metavar="FILE"),
    ] = None,
    verify: Annotated[bool, typer.Option(help="Compare the outputs before and after.")] = True,
    json: JsonFile = None,
) -> None:
    """Fold the batch norms of a model or of a program's inference branch; says which were skipped and why."""
    import warnings

    import torch
    from rich.text import Text

    from leannorm._batch import positional
    from leannorm._errors import FoldError, InputError
    from leannorm._files import check_suffix, check_writable, replacing
    from leannorm.cli import CHECK_FELL_SHORT
    from leannorm.cli.inputs import specs_of, tried
    from leannorm.cli.models import model_named
    from leannorm.program import Program
    from leannorm.transforms import fold as folding

    check_suffix(output, ".pt2")
    check_writable(output)
    console = terminal()
    is_file, inputs = Path(model).is_file(), None
    specs_of(input)
    if not is_file and (model.endswith(".pt2") or ":" not in model):
        raise InputError(f"there is no file {model!r}; a model is named timm:NAME or mymodel.py:make")
    try:
        with console.status(Text(f"folding {model}")), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "fold folded nothing")  # the report says so
            if is_file:
                report = folding(Program.load(model), verify=verify)
            else:
                made = model_named(model)
                inputs = tried(made, input, model)
                report = folding(made, inputs, verify=verify)
    except FoldError as error:
        console.print(str(error), style="bold red")
        raise typer.Exit(CHECK_FELL_SHORT) from error
    tell(report, json)
    if output:
        whole = report.model
        if isinstance(whole, torch.nn.Module):
            whole = torch.export.export(whole, positional(whole, inputs))
        with replacing(output) as file:
            torch.export.save(whole, file)
        console.print(f"folded model: {output}")
