"""`leannorm fit MODEL --memory 24GiB`: the largest batch that trains in that memory."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from leannorm.cli.options import JsonFile, Model, tell


def fit(
    model: Model,
    memory: Annotated[str, typer.Option(help="The available memory, like 24GiB or 80GB.", metavar="BYTES")],
    input: Annotated[str, typer.Option(help="Sizes of one sample.", metavar="3x224x224")] = "3x224x224",
    optimizer: Annotated[
        str, typer.Option(help="The optimizer whose state is counted: sgd, momentum or adam.")
    ] = "adam",
    json: JsonFile = None,
) -> None:
    """Find the largest batch that fits in a memory, stock and under each lean setting.

    Runs on fake tensors, so the machine itself does not need that memory.
    """
    from rich.console import Console

    from leannorm._files import check_writable
    from leannorm.cli.models import model_named, shape_of
    from leannorm.report.fit import fit as largest

    check_writable(json)
    sample, make = shape_of(input), partial(model_named, model)
    with Console().status(f"making {model}") as status:
        report = largest(make, sample, memory, optimizer=optimizer, progress=status.update)
    tell(report, json)
