"""Options that several subcommands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write every number here.", metavar="FILE")]
ReportFile = Annotated[Path | None, typer.Option("--report", help="Write an HTML page here.", metavar="FILE")]
Model = Annotated[
    str, typer.Argument(help="timm:NAME, torchvision:NAME or package.module:callable.", metavar="MODEL")
]
