"""What does a person type? One file per subcommand: parse options, call the library, print the result."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

NEEDS = ("rich", "typer")  # the extra `cli`; `import leannorm` needs neither
INSTALL = f"{sys.executable} -m pip install"
CHECK_FELL_SHORT, BAD_USAGE, INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `leannorm ARGUMENTS`; returns the exit status.

    0: success. 1: a check failed. 2: bad usage, or a file that cannot be read or written, with one line on
    stderr that says what to change; if there are several problems, each has a line below it. 130: interrupted
    from the keyboard; no file is half-written.
    """
    try:
        for name in NEEDS:
            import_module(name)
    except ModuleNotFoundError as error:
        return _complain(
            f"the command needs {' and '.join(NEEDS)} ({error}), the extra leannorm[cli]:"
            f" {INSTALL} {' '.join(NEEDS)}"
        )
    import typer

    from leannorm._errors import LeannormError
    from leannorm.cli.app import app

    # the base class of click's usage errors; its module depends on the version of typer
    usage_error: type[Any] = typer.BadParameter.__mro__[1]
    typed = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = app(args=typed or ["--help"], prog_name="leannorm", standalone_mode=False)
        if status == INTERRUPTED:  # newer typers return it, older ones raise Abort
            raise KeyboardInterrupt
        return int(status or 0)
    except (typer.Abort, KeyboardInterrupt):
        print("leannorm: stopped; no file was left half-written", file=sys.stderr)
        return INTERRUPTED
    except LeannormError as error:
        return _complain(str(error))
    except OSError as error:
        return _complain(
            ": ".join(filter(None, (error.filename and str(error.filename), error.strerror or str(error))))
        )
    except usage_error as error:
        command = error.ctx.command_path if error.ctx else "leannorm"
        return _complain(f"{error.format_message()} (see {command} --help)")


def _complain(message: str) -> int:
    items = (" ".join(item.split()) for item in message.split("\n  "))
    print("leannorm: " + "\n  ".join(items), file=sys.stderr)
    return BAD_USAGE
