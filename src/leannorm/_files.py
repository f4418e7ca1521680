"""Where our files are, and how they are written: an interruption leaves the old file, or none."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from leannorm._errors import InputError


def cached(variable: str, name: str) -> Path | None:
    """The file that the environment variable names (None if it is empty), else `name` in our folder of the
    user's cache (None if there is no such folder)."""
    named = os.environ.get(variable)
    if named is not None:
        return Path(named) if named else None
    try:
        cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # a user without a home directory
        return None
    return Path(cache_home) / "leannorm" / name


def check_writable(*paths: Path | None) -> None:
    """Raises InputError for a path that cannot be written to, before the work rather than after it.

    A file next to it is made and removed, because permissions do not show a full or read-only file system.
    """
    for path in filter(None, paths):
        if _stream(path):
            if not os.access(path, os.W_OK):
                raise InputError(f"{str(path)!r} cannot be written to (Permission denied): name another")
            continue
        folder = Path(os.path.realpath(path)).parent
        if not os.path.isdir(folder):
            raise InputError(f"there is no folder {str(folder)!r}: create it, or name another")
        if os.path.isdir(path):  # Path raises ValueError for impossible names
            raise InputError(f"{str(path)!r} is a folder: name a file in it")
        try:
            with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{path.name}."):
                pass
        except OSError as error:
            raise InputError(
                f"{str(path)!r} cannot be written to ({error.strerror or error}): name another"
            ) from error


def check_suffix(path: Path | None, suffix: str) -> None:
    """Raises InputError for a file whose suffix does not match its format."""
    if path is not None and path.suffix != suffix:
        raise InputError(f"the file is written in one format, {suffix}; got {str(path)!r}: name it *{suffix}")


@contextmanager
def replacing(path: Path | str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A temporary file next to `path`, renamed at the end: a reader sees all of it or none.

    A link stays and its target is replaced; a device or a pipe stays and is written to at the end.
    """
    path = Path(path)
    check_writable(path)
    if _stream(path):
        with tempfile.TemporaryFile() as file:
            yield file
            file.seek(0)
            try:
                with open(path, "ab") as stream:  # append
                    shutil.copyfileobj(file, stream)
            except OSError as error:  # of a write, which names no file
                raise OSError(error.errno, error.strerror, str(path)) from error
        return
    path = Path(os.path.realpath(path))
    name = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(name, "xb") as file:
            yield file
        if path.exists():
            os.chmod(name, path.stat().st_mode & 0o777)
        os.replace(name, path)
    except BaseException:
        name.unlink(missing_ok=True)  # it may be the file that could not be made
        raise


def _stream(path: Path) -> bool:
    """Whether it is a device, a pipe or redirected output, which are written to in place."""
    if not os.path.exists(path) or os.path.isdir(path):
        return False
    return not os.path.isfile(path) or any(_is_open_as(number, path) for number in (1, 2))


def _is_open_as(number: int, path: Path) -> bool:
    """Whether the file is that of a descriptor, such as redirected standard output."""
    try:
        return os.path.samestat(os.fstat(number), os.stat(path))
    except OSError:
        return False


def write_text(path: Path | str, text: str) -> None:
    """Writes the whole text or, if something fails, leaves what was there before."""
    with replacing(path) as file:
        file.write(text.encode())


def write_json(path: Path | str, data: object) -> None:
    """`data` as indented JSON, written as `write_text` does."""
    write_text(path, json.dumps(data, indent=2) + "\n")
