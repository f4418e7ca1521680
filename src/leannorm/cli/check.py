"""`leannorm check`: does this installation compute correct results?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from leannorm.cli.options import Dtype, Inputs, JsonFile, tell, under_way

if TYPE_CHECKING:
    from leannorm.report.numerics import Check


def check(
    model: Annotated[
        str,
        typer.Argument(help="Check this model under lean() in place of the layers.", metavar="MODEL"),
    ] = "",
    input: Inputs = [],  # noqa: B006  # typer needs a list as the default
    steps: Annotated[int, typer.Option(help="Training steps of the model.", min=1)] = 3,
    dtype: Dtype = "float32",
    json: JsonFile = None,
    named: Annotated[str, typer.Option("--model", help="The same, as an option.", metavar="MODEL")] = "",
) -> None:
    """Check on this machine every equality that the layers promise, each against its error budget.

    Also report which operators lean() repeats bit for bit with this torch; what others make is kept.
    With MODEL and --input: train a model in plain PyTorch and under lean(), and compare every bit.
    """
    from leannorm._errors import InputError
    from leannorm.report.check import CheckReport
    from leannorm.report.numerics import run_checks
    from leannorm.report.operators import operator_states

    if model and named:
        raise InputError(f"name one model, got {model!r} and --model {named!r}; leave one out")
    model = model or named
    if bool(model) != bool(input):
        raise InputError("MODEL and --input go together: a model is checked on an input, as 8x3x96x96")
    with under_way(f"checking {model or 'the layers'}") as say:
        checks = []
        for one in _of_model(model, input, steps, dtype) if model else run_checks():
            checks.append(one)
            say(f"checked: {one.name}")
        if not model:
            say("trying the operators that lean() repeats")
        report = CheckReport(checks, [] if model else list(operator_states()))
    tell(report, json, passes=report)


def _of_model(model: str, inputs: list[str], steps: int, dtype: str) -> Iterator[Check]:
    import torch

    from leannorm.cli.inputs import dtype_named, specs_of, tried
    from leannorm.cli.models import model_named
    from leannorm.report.verify import verify_model

    torch.manual_seed(0)
    specs_of(inputs)
    made = model_named(model).to(dtype_named(dtype))
    yield from verify_model(made, tried(made, inputs, model, dtype=dtype), steps)
