"""`leannorm info`: what is installed here, and which backends can serve."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer


def info(
    json: Annotated[Optional[Path], typer.Option(help="Write it here, too.", metavar="FILE")] = None,  # noqa: UP045
) -> None:
    """Versions, devices, threads and backends, with the reason for each backend that cannot serve."""
    from rich.console import Console

    from leannorm.report.files import check_writable, write_json
    from leannorm.report.info import installation
    from leannorm.report.render import Table

    check_writable(json)
    here = installation()
    console = Console()
    console.print(Table(["", "here"], list(here.facts.items())).rich())
    rows = [[name, "; ".join(reasons) or "available"] for name, reasons in here.backends.items()]
    console.print(Table(["backend, best first", "here"], rows).rich())
    if json:
        write_json(json, here._asdict())
