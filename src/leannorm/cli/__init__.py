"""The command line: one file a subcommand, each parse → call → render."""

from __future__ import annotations

import sys
from collections.abc import Sequence

CHECK_FELL_SHORT, BAD_USAGE, INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `leannorm ARGUMENTS`; returns the exit status.

    0: all is well. 1: a check fell short. 2: bad usage, with one line on stderr that says what to change.
    130: interrupted from the keyboard; files are complete or not there.
    """
    import typer

    from leannorm._errors import LeannormError
    from leannorm.cli.app import app

    usage_error = typer.BadParameter.__mro__[1]  # click's own class, wherever this typer keeps its click
    try:
        status = app(
            args=list(sys.argv[1:] if arguments is None else arguments),
            prog_name="leannorm",
            standalone_mode=False,
        )
        return int(status or 0)
    except (typer.Abort, KeyboardInterrupt):
        print("leannorm: stopped; no file was left half-written", file=sys.stderr)
        return INTERRUPTED
    except LeannormError as error:
        return _complain(str(error))
    except usage_error as error:
        return _complain(error.format_message())  # type: ignore[attr-defined]  # click is not typed here


def _complain(message: str) -> int:
    print("leannorm: " + " ".join(message.split()), file=sys.stderr)
    return BAD_USAGE
