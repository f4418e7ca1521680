"""`leannorm check`: does this installation compute correct results?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from leannorm.cli.options import JsonFile

if TYPE_CHECKING:
    from leannorm.report.numerics import Check


def check(
    model: Annotated[
        str, typer.Option(help="Check this model under lean() in place of the layers.", metavar="MODEL")
    ] = "",
    input: Annotated[
        str, typer.Option(help="Sizes of the model's input, batch first.", metavar="8x3x96x96")
    ] = "",
    steps: Annotated[int, typer.Option(help="Training steps of the model.", min=1)] = 3,
    json: JsonFile = None,
) -> None:
    """Check on this machine every equality that the layers promise, each against its error budget.

    And tell which recipes of lean() are alive beside this torch; one that does not fit it rests.
    With --model and --input: train a model stock and under lean(), and compare every bit.
    """
    from rich.console import Console

    from leannorm._errors import InputError
    from leannorm._files import check_writable, write_json
    from leannorm.cli import CHECK_FELL_SHORT
    from leannorm.report.numerics import Check, run_checks
    from leannorm.report.recipes import WRONG, recipe_states
    from leannorm.report.render import checks_table, recipes_table

    check_writable(json)
    if bool(model) != bool(input):
        raise InputError("--model and --input go together: a model is checked on an input, as 8x3x96x96")
    console = Console()
    with console.status(f"checking {model}") as status:
        checks = []
        for one in _of_model(model, input, steps) if model else run_checks():
            checks.append(one)
            status.update(f"checking: {one.name}")
        recipes = [] if model else list(recipe_states())
    if recipes:
        wrong = [one.kind for one in recipes if one.state == WRONG]
        checks.append(Check("lean(), gradients by recipe", len(wrong), 0.0, "stock", ", ".join(wrong)))
    failed = [one.name for one in checks if not one.passed]
    console.print(checks_table(checks).rich())
    if recipes:
        console.print(recipes_table(recipes).rich())
    for one in checks:
        if one.detail:
            console.print(f"{one.name}: {one.detail}", highlight=False, markup=False)
    if json:
        told = {"recipes": [one._asdict() for one in recipes]} if recipes else {}
        write_json(json, {"passed": not failed, "checks": [one.as_dict() for one in checks], **told})
        console.print(f"numbers: {json}", highlight=False)
    if failed:
        console.print(
            f"{len(failed)} of {len(checks)} checks fell short: {', '.join(failed)}", style="bold red"
        )
        raise typer.Exit(CHECK_FELL_SHORT)
    console.print(f"all {len(checks)} checks keep within their budget", style="bold green", highlight=False)


def _of_model(model: str, shape: str, steps: int) -> Iterator[Check]:
    import torch

    from leannorm.cli.models import model_named, shape_of, tried
    from leannorm.report.verify import verify_model

    torch.manual_seed(0)
    sizes, made = shape_of(shape), model_named(model)
    yield from verify_model(made, tried(made, sizes, model), steps)
