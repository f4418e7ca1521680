"""Options that several subcommands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write every number here.", metavar="FILE")]
InputShape = Annotated[
    str, typer.Option("--input", help="Sizes of the model's input, batch first.", metavar="8x3x224x224")
]
ReportFile = Annotated[Path | None, typer.Option("--report", help="Write an HTML page here.", metavar="FILE")]
_MODEL = "timm:NAME, torchvision:NAME or package.module:callable."
Model = Annotated[str, typer.Argument(help=_MODEL, metavar="MODEL")]
ModelOption = Annotated[str, typer.Option("--model", help=_MODEL, metavar="MODEL")]
