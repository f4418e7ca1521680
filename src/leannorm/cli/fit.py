"""`leannorm fit MODEL --memory 24GiB`: the largest batch that trains in that memory."""

from __future__ import annotations

from typing import Annotated

import typer

from leannorm.cli.options import Budgets, Dtype, JsonFile, Model, Peaks, tell, under_way


def fit(
    model: Model,
    memory: Annotated[str, typer.Option(help="The available memory, like 24GiB or 80GB.", metavar="BYTES")],
    input: Annotated[
        list[str],
        typer.Option(
            help="Sizes of one sample, without its batch; 'ids=512:int64<32000' has a name and a dtype. "
            "Repeatable.",
            metavar="3x224x224",
        ),
    ] = ["3x224x224"],  # noqa: B006  # typer needs a list as the default
    optimizer: Annotated[
        str, typer.Option(help="The optimizer whose state is counted: sgd, momentum, adam or adamw.")
    ] = "adam",
    budget: Budgets = [],  # noqa: B006  # typer needs a list as the default
    peak: Peaks = [],  # noqa: B006
    dtype: Dtype = "float32",
    json: JsonFile = None,
) -> None:
    """Find the largest batch that fits in a memory, in plain PyTorch and under each lean setting.

    Runs on fake tensors, so the machine itself does not need that memory. Exit status 1 if not even two
    samples fit.
    """
    from leannorm.cli.inputs import dtype_named, made, specs_of
    from leannorm.cli.models import model_named
    from leannorm.report.fit import fit as largest
    from leannorm.report.settings import LEAN

    kind = dtype_named(dtype)
    sample = made(specs_of(input), kind, "meta")
    with under_way(f"making {model}") as say:
        report = largest(
            lambda: model_named(model).to(kind),
            sample,
            memory,
            recompute=[*LEAN, *(f"peak {n}" for n in peak)],
            budgets=budget,
            optimizer=optimizer,
            progress=say,
        )
    tell(report, json, passes=any(one.batch for one in report.fits))
