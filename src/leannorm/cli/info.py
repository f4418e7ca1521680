"""`leannorm info`: the installed versions, and the backends that can run here."""

from __future__ import annotations

from leannorm.cli.options import JsonFile


def info(
    json: JsonFile = None,
) -> None:
    """Print versions, devices, threads and backends, with the reasons for each backend that cannot run."""
    from rich.console import Console

    from leannorm._files import check_writable, write_json
    from leannorm.report.info import installation
    from leannorm.report.render import Table

    check_writable(json)
    here = installation()
    console = Console()
    console.print(Table(["", "here"], list(here.facts.items()), numbers_from=2).rich())
    rows = [[name, "; ".join(reasons) or "available"] for name, reasons in here.backends.items()]
    console.print(Table(["backend, best first", "here"], rows, numbers_from=2).rich())
    for line in here.to_mend:
        console.print(line, style="bold yellow", highlight=False, markup=False, soft_wrap=True)
    if json:
        write_json(json, here._asdict())
