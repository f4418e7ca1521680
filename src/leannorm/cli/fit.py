"""`leannorm fit MODEL --memory 24GiB`: the largest batch that trains in it."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from leannorm.cli.options import JsonFile, Model


def fit(
    model: Model,
    memory: Annotated[str, typer.Option(help="What there is, like 24GiB or 80GB.", metavar="BYTES")],
    input: Annotated[str, typer.Option(help="Sizes of one sample.", metavar="3x224x224")] = "3x224x224",
    optimizer: Annotated[str, typer.Option(help="Whose state to count: sgd, momentum or adam.")] = "adam",
    json: JsonFile = None,
) -> None:
    """The largest batch that fits a memory: stock, and under each lean setting, without that memory."""
    from rich.console import Console

    from leannorm.report.files import check_writable, write_json
    from leannorm.report.fit import bytes_of
    from leannorm.report.fit import fit as largest
    from leannorm.report.models import model_named, shape_of
    from leannorm.report.render import Table, megabytes

    check_writable(json)
    available, sample = bytes_of(memory), shape_of(input)
    console = Console()
    with console.status(f"making {model}") as status:
        fits = largest(
            partial(model_named, model), sample, available, optimizer=optimizer, progress=status.update
        )
    stock = fits[0].batch
    rows = [
        [
            one.name,
            str(one.batch) if one.batch else "none",
            f"{one.batch / stock:.2f}" if stock else "–",
            megabytes(one.nbytes),
        ]
        for one in fits
    ]
    title = f"{model}, samples of {input}, {optimizer}, {memory}"
    console.print(Table(["", "largest batch", "of stock", "bytes needed"], rows, title).rich())
    if json:
        write_json(json, {"model": model, "memory": available, "fits": [one._asdict() for one in fits]})
        console.print(f"numbers: {json}", highlight=False)
