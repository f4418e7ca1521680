"""`leannorm doctor MODEL`: what is wrong with a model's norms, and the line that mends it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from leannorm.cli.options import JsonFile, Model, tell


def doctor(
    model: Model,
    input: Annotated[
        str, typer.Option(help="Run a random batch of these sizes, batch first.", metavar="8x3x224x224")
    ] = "",
    data: Annotated[
        str,
        typer.Option(
            help="Run batches of the model's data, as doctor() takes them.", metavar="package.module:callable"
        ),
    ] = "",
    json: JsonFile = None,
    html: Annotated[
        Path | None, typer.Option("--html", "--report", help="Write an HTML page here.", metavar="FILE")
    ] = None,
) -> None:
    """Look for what is wrong in a model's norm layers; exit status 1 where something is found.

    A package.module:callable may load weights. What a batch's values tell (the gap between the modes, dead
    channels, padding) is asked of --data alone: of random values it says nothing.
    """
    import torch
    from rich.console import Console

    from leannorm._errors import InputError
    from leannorm._files import check_writable
    from leannorm.cli import CHECK_FELL_SHORT
    from leannorm.cli.models import in_one_line, made_by, model_named, shape_of
    from leannorm.report.doctor.checks import CHECKS
    from leannorm.report.doctor.examine import examine
    from leannorm.report.render import require_page
    from leannorm.transforms.statistics.pooling import call

    if input and data:
        raise InputError("give --input or --data, not both: a random batch or batches of the model's data")
    check_writable(json, html)
    if html:
        require_page()

    def forward(network: torch.nn.Module, batch: Any) -> Any:
        try:
            return call(network, batch)
        except Exception as error:
            what = f"an input of {input}" if input else f"a batch of {data}"
            raise InputError(f"{model} does not run on {what}: {in_one_line(error)}") from error

    with Console().status(f"making {model}") as status:
        torch.manual_seed(0)
        batches = torch.randn(shape_of(input)) if input else made_by(data) if data else None
        network = model_named(model)
        status.update("looking at its norms")
        checks = [check for check in CHECKS if data or not check.of_data]
        report = examine(network, batches, forward=forward, checks=checks)
    report.model = model
    tell(report, json, html)
    if not report:
        raise typer.Exit(CHECK_FELL_SHORT)
