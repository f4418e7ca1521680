"""Where files of ours are, and how they are written: an interruption leaves the old file, or none."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from leannorm._errors import InputError


def cached(variable: str, name: str) -> Path | None:
    """The file that the environment variable names, None if that is empty; else `name` in our folder of the
    user's cache."""
    named = os.environ.get(variable)
    if named is not None:
        return Path(named) if named else None
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache_home) / "leannorm" / name


def check_writable(*paths: Path | None) -> None:
    """Raises InputError for a path that no file can be written to: said before the work, not after it.

    A file beside it is made and removed: permissions alone do not tell of a full or a read-only file system.
    """
    for path in paths:
        if path is None:
            continue
        folder = path.absolute().parent
        if not os.path.isdir(folder):
            raise InputError(f"there is no folder {str(folder)!r}: create it, or name another")
        if os.path.isdir(path):  # of names that cannot be, Path's raises
            raise InputError(f"{str(path)!r} is a folder: name a file in it")
        try:
            with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{path.name}."):
                pass
        except OSError as error:
            raise InputError(
                f"{str(path)!r} cannot be written to ({error.strerror or error}): name another"
            ) from error


def check_suffix(path: Path | None, suffix: str) -> None:
    """Raises InputError for a file of another suffix than its format has."""
    if path is not None and path.suffix != suffix:
        raise InputError(f"the file is written in one format, {suffix}; got {str(path)!r}: name it *{suffix}")


@contextmanager
def replacing(path: Path | str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file beside `path` under another name, renamed at the end: a reader sees all of it or none."""
    path = Path(path)
    check_writable(path)
    handle, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.chmod(name, 0o644)  # mkstemp's own mode shuts everyone else out
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def write_text(path: Path | str, text: str) -> None:
    """The whole text or, where something fails, what was there before."""
    with replacing(path) as file:
        file.write(text.encode())


def write_json(path: Path | str, data: Any) -> None:
    """`data` as indented JSON, written as `write_text` does."""
    write_text(path, json.dumps(data, indent=2) + "\n")
