"""Options that several subcommands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leannorm._errors import InputError

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write every number here.", metavar="FILE")]
InputShape = Annotated[
    str, typer.Option("--input", help="Sizes of the model's input, batch first.", metavar="N,C,H,W")
]
ReportFile = Annotated[Path | None, typer.Option("--report", help="Write an HTML page here.", metavar="FILE")]


def sizes(text: str) -> tuple[int, ...]:
    """The sizes that --input names."""
    parts = text.replace("x", ",").split(",")
    if not all(part.strip().isdigit() and int(part) for part in parts):
        raise InputError(f"--input must be sizes such as 2,3,224,224; got {text!r}")
    return tuple(int(part) for part in parts)
