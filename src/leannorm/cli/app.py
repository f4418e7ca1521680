"""The table of subcommands."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from leannorm.cli.bench import bench
from leannorm.cli.check import check
from leannorm.cli.convert_checkpoint import convert_checkpoint
from leannorm.cli.demo import demo
from leannorm.cli.doctor import doctor
from leannorm.cli.fit import fit
from leannorm.cli.fold import fold
from leannorm.cli.fork import fork
from leannorm.cli.info import info
from leannorm.cli.profile import profile

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)


def _print_version(wanted: bool) -> None:
    if wanted:
        from leannorm._version import __version__

        print(f"leannorm {__version__}")
        raise typer.Exit


@app.callback()
def leannorm(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it and exit.")
    ] = False,
) -> None:
    """Normalization layers for PyTorch, and lean(), which trains in about half the activation memory."""


def _after_the_package(command: Callable[..., None]) -> Callable[..., None]:
    """Run the command, once leannorm is imported and the files of its report are known to be writable.

    Help and unknown options are handled before that (`leannorm_command`).
    """

    @wraps(command)
    def run(**options: Any) -> None:
        from leannorm import __version__  # noqa: F401  # the root's code runs with its first name
        from leannorm._files import check_writable
        from leannorm.report.render import require_page

        page = options.get("html")
        check_writable(options["json"], page)
        if page:
            require_page()
        command(**options)

    return run


COMMANDS = (demo, check, profile, fit, doctor, bench, convert_checkpoint, fold, fork, info)
for command in COMMANDS:
    # without a short help of its own, a command's first sentence is cut
    app.command(short_help=(command.__doc__ or "").partition("\n")[0])(_after_the_package(command))
