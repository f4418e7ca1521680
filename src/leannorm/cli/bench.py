"""`leannorm bench`: how fast every backend is on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from leannorm.cli.options import JsonFile


def bench(
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    turns: Annotated[int, typer.Option(help="Timed turns of each side.", min=1)] = 9,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Also what torch.compile makes of torch's norm.")
    ] = False,
    json: JsonFile = None,
) -> None:
    """Time every backend's norms, forward and backward, beside torch's; wrong answers are not timed."""
    import torch
    from rich.console import Console

    from leannorm._errors import InputError
    from leannorm.cli import CHECK_FELL_SHORT
    from leannorm.report.bench import bench as measure
    from leannorm.report.files import check_writable, write_json
    from leannorm.report.memory import check_device
    from leannorm.report.render import Table, milliseconds

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in dtypes:
        raise InputError(f"--dtype is one of {', '.join(dtypes)}; got {dtype!r}")
    check_writable(json)
    check_device(device)
    console = Console()
    with console.status("timing"):
        timings = list(measure(device, dtypes[dtype], turns, compiled=compiled))
    rows = [
        [
            f"{one.case} {'x'.join(map(str, one.shape))}",
            one.backend,
            milliseconds(one.seconds) if one.seconds else "WRONG",
            f"{one.ratio:.2f}" if one.ratio else "–",
            f"{one.floor:.0%}" if one.floor else "–",
        ]
        for one in timings
    ]
    title = f"forward and backward, {dtype}, {device}, {torch.get_num_threads()} threads"
    columns = ["", "backend", "time", "of torch's", "of the floor"]
    console.print(Table(columns, rows, title, numbers_from=2).rich())
    if json:
        write_json(json, [one._asdict() for one in timings])
        console.print(f"numbers: {json}", highlight=False)
    if not all(one.correct for one in timings):
        raise typer.Exit(CHECK_FELL_SHORT)
