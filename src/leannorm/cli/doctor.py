"""`leannorm doctor MODEL`: what is wrong with a model's norms, and the line that fixes it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from leannorm.cli.options import Inputs, JsonFile, Model, tell, under_way


def doctor(
    model: Model,
    input: Inputs = [],  # noqa: B006  # typer needs a list as the default
    data: Annotated[
        str,
        typer.Option(
            help="Run batches of the model's data, as doctor() takes them.", metavar="mydata.py:batches"
        ),
    ] = "",
    fail_on: Annotated[
        Literal["error", "warning", "note"], typer.Option(help="The least severity with exit status 1.")
    ] = "note",
    fix: Annotated[
        bool,
        typer.Option(
            "--fix", help="Print safe remedies (momentum, eps, a removed bias) as a diff, tried on a copy."
        ),
    ] = False,
    json: JsonFile = None,
    html: Annotated[
        Path | None, typer.Option("--html", "--report", help="Write an HTML page here.", metavar="FILE")
    ] = None,
) -> None:
    """Look for what is wrong in a model's norm layers; exit status 1 for findings (see --fail-on).

    A function that makes MODEL may load weights. Checks of a batch's values (the gap between the modes, dead
    channels, padding) need --data: random values show nothing. If MODEL joins a job of several ranks, as
    under torchrun, ranks are compared, and rank 0 reports what is found.
    """
    import copy

    import torch
    import torch.distributed as dist

    from leannorm._batch import call_for
    from leannorm._errors import InputError
    from leannorm.cli import CHECK_FELL_SHORT
    from leannorm.cli.inputs import made, specs_of
    from leannorm.cli.models import in_one_line, made_by, model_named
    from leannorm.report.doctor.checks import CHECKS
    from leannorm.report.doctor.examine import Runs, examine
    from leannorm.report.doctor.findings import DoctorReport
    from leannorm.report.doctor.meeting import meeting_of
    from leannorm.report.doctor.mend import diff, mend
    from leannorm.report.doctor.subject import SEVERITIES

    if input and data:
        raise InputError("give --input or --data, not both: a random batch or batches of the model's data")
    specs = specs_of(input) if input else []

    def looked(network: torch.nn.Module, batches: Any, meeting: Any = None) -> DoctorReport:
        """Run without batches if the model does not run on them: what is found then may be why."""
        stopped: list[InputError] = []

        def forward(network: torch.nn.Module, batch: Any) -> Any:
            try:
                return call_for(batches)(network, batch)
            except Exception as error:
                what = f"an input of {', '.join(input)}" if input else f"a batch of {data}"
                stopped.append(InputError(f"{model} does not run on {what}: {in_one_line(error)}"))
                raise stopped[-1] from error

        try:
            return examine(network, batches, Runs(forward), checks, meeting=meeting)
        except InputError as error:
            if error not in stopped or meeting:
                raise
            report = examine(network, checks=checks)
            if report:
                raise
            report.stopped = str(error)
            return report

    with under_way(f"making {model}") as say:
        torch.manual_seed(0)
        random = made(specs, torch.float32) if specs else None
        network = model_named(model)
        batches = made_by(data) if data else random  # once the model has joined its process group
        say("looking at its norms")
        checks = [check for check in CHECKS if data or not check.of_data]
        report = looked(network, batches, meeting_of(None))
    report.model = model
    tells = not (dist.is_available() and dist.is_initialized() and dist.get_rank())
    if tells:
        tell(report, json, html)
    if fix:
        tried = copy.deepcopy(network)
        changes = mend(tried, report.findings)
        left = report.findings
        if changes:
            again = made_by(data) if data else batches  # what was made before may be used up
            left = looked(tried, again).findings
        if tells:
            lines = diff(changes) if changes else ()
            print(*lines, f"{len(changes)} settings fixed on a copy: {len(left)} findings left", sep="\n")
    grave = [one for one in report.findings if SEVERITIES.index(one.severity) <= SEVERITIES.index(fail_on)]
    if grave or report.stopped:
        raise typer.Exit(CHECK_FELL_SHORT)
