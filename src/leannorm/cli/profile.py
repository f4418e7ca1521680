"""`leannorm profile MODEL`: memory and time of a training step, in plain PyTorch and under lean()."""

from __future__ import annotations

from typing import Annotated

import typer

from leannorm.cli.options import Budgets, Dtype, HtmlFile, Inputs, JsonFile, Model, Peaks, tell, under_way


def profile(
    model: Model,
    input: Inputs,
    budget: Budgets = [],  # noqa: B006  # typer needs a list as the default
    overhead: Annotated[list[float], typer.Option(help="Share of a step's time to spend; repeatable.")] = [],  # noqa: B006
    peak: Peaks = [],  # noqa: B006
    against: Annotated[str, typer.Option(help="checkpoint, compile or both, with a comma.")] = "",
    compiled: Annotated[bool, typer.Option("--compiled", help="The same under torch.compile, too.")] = False,
    steps: Annotated[int, typer.Option(help="Timed steps of each setting.", min=1)] = 5,
    dtype: Dtype = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    json: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """Measure kept bytes, peak memory and step time with and without lean(), and by other methods."""
    import warnings

    import torch

    from leannorm.cli.inputs import dtype_named, specs_of, tried
    from leannorm.cli.models import model_named
    from leannorm.report.memory import check_device
    from leannorm.report.profile import profile as measure
    from leannorm.report.settings import LEAN, check_methods

    check_device(device)
    others = [name.strip() for name in against.split(",") if name.strip()]
    check_methods(others)
    specs_of(input)
    with warnings.catch_warnings(record=True) as heard, under_way(f"making {model}") as say:
        torch.manual_seed(0)
        network = model_named(model).to(device, dtype_named(dtype))
        inputs = tried(network, input, model, device, dtype)
        report = measure(
            network,
            inputs,
            recompute=[*LEAN, *(f"overhead {n:g}" for n in overhead), *(f"peak {n}" for n in peak)],
            budgets=budget,
            against=others,
            compiled=compiled,
            steps=steps,
            progress=say,
        )
    report.model = model
    reasons = {reason for setting in report.settings for reason in setting.reasons}
    for one in heard:
        if not any(reason in str(one.message) for reason in reasons):  # the report lists the others
            warnings.showwarning(one.message, one.category, one.filename, one.lineno)
    tell(report, json, html)
