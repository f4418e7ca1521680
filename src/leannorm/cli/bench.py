"""`leannorm bench`: time every backend on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from leannorm.cli.options import JsonFile, tell, under_way


def bench(
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    turns: Annotated[int, typer.Option(help="Timed turns of each side.", min=1)] = 9,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Also time torch's norm under torch.compile.")
    ] = False,
    json: JsonFile = None,
) -> None:
    """Time every backend's norms, forward and backward, against torch's; wrong results are not timed."""
    import torch

    from leannorm._errors import InputError
    from leannorm.report.bench import bench as measure
    from leannorm.report.memory import check_device

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in dtypes:
        raise InputError(f"--dtype is one of {', '.join(dtypes)}; got {dtype!r}")
    check_device(device)
    with under_way("timing") as say:
        report = measure(device, dtypes[dtype], turns, compiled=compiled, progress=say)
    tell(report, json, passes=report)
