"""Write a report so that an interruption leaves the old file or none, never half of one."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from leannorm._errors import InputError


def check_writable(*paths: Path | None) -> None:
    """Raises InputError for a path that no file can be written to: said before the work, not after it."""
    for path in paths:
        if path is None:
            continue
        folder = path.absolute().parent
        if not folder.is_dir():
            raise InputError(f"there is no folder {str(folder)!r}: create it, or name another")
        if path.is_dir():
            raise InputError(f"{str(path)!r} is a folder: name a file in it")
        if not os.access(folder, os.W_OK):
            raise InputError(f"the folder {str(folder)!r} cannot be written to: name another")


def write_text(path: Path | str, text: str) -> None:
    """Write beside `path` under another name, then rename: a reader sees the whole text or none of it."""
    path = Path(path)
    check_writable(path)
    handle, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)  # mkstemp's own mode shuts everyone else out
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def write_json(path: Path | str, data: Any) -> None:
    """`data` as indented JSON, written as `write_text` does."""
    write_text(path, json.dumps(data, indent=2) + "\n")
