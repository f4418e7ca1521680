"""`leannorm fork`: write one program with a training and an inference branch to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from leannorm.cli.options import Inputs, JsonFile, Model, terminal


def fork(
    model: Model,
    input: Inputs = ["2x3x224x224"],  # noqa: B006  # typer needs a list as the default
    any_batch: Annotated[bool, typer.Option(help="Let the batch size vary.")] = True,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the program here (.pt2).", metavar="FILE")
    ] = None,
    draw: Annotated[
        Path | None, typer.Option(help="Write a picture of the fork here (SVG).", metavar="FILE")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Fork a model into one program with both modes, and print what the branches share."""
    import torch
    from rich.text import Text

    from leannorm._files import check_suffix, check_writable, write_json
    from leannorm.cli.inputs import specs_of, tried
    from leannorm.cli.models import model_named
    from leannorm.program import fork as forking

    check_suffix(output, ".pt2")
    check_suffix(draw, ".svg")
    check_writable(output, draw)
    specs = specs_of(input)
    varies = any_batch and all(spec.sizes[0] > 1 for spec in specs)
    batch = torch.export.Dim("batch", min=2)
    dynamic: Any = {spec.name: {0: batch} for spec in specs} if specs[0].name else ({0: batch},) * len(specs)
    console = terminal()
    with console.status(Text(f"making {model}")) as status:
        made = model_named(model)
        inputs = tried(made, input, model)
        status.update(Text(f"exporting {model}"))
        program = forking(made, inputs, dynamic if varies else None)
    console.print(program.describe())
    if draw:
        program.draw(draw)
        console.print(f"picture: {draw}")
    if output:
        program.save(output)
        console.print(f"program: {output}, {output.stat().st_size:,} bytes")
    if json:
        branches = [n.meta["branch"] for n in program.graph.nodes if n.op == "call_function"]
        write_json(
            json,
            {
                "operators": {b: branches.count(b) for b in ("shared", "train", "infer")},
                "parameters": sum(p.numel() for p in program.parameters()),
                "inputs": program.signature.describe(),
                "values": program.names(),
            },
        )
        console.print(f"numbers: {json}")
