"""`leannorm check`: does this installation compute what it should?"""

from __future__ import annotations

import typer

from leannorm.cli.options import JsonFile


def check(
    json: JsonFile = None,
) -> None:
    """Verify every equality that the layers promise, on this machine, each against its error budget."""
    from rich.console import Console

    from leannorm.cli import CHECK_FELL_SHORT
    from leannorm.report.files import check_writable, write_json
    from leannorm.report.numerics import run_checks
    from leannorm.report.render import checks_table

    check_writable(json)
    console = Console()
    with console.status("checking"):
        checks = list(run_checks())
    failed = [one.name for one in checks if not one.passed]
    console.print(checks_table(checks).rich())
    if json:
        write_json(json, {"passed": not failed, "checks": [one.as_dict() for one in checks]})
        console.print(f"numbers: {json}", highlight=False)
    if failed:
        console.print(
            f"{len(failed)} of {len(checks)} checks fell short: {', '.join(failed)}", style="bold red"
        )
        raise typer.Exit(CHECK_FELL_SHORT)
    console.print(f"all {len(checks)} checks keep within their budget", style="bold green", highlight=False)
