"""The library of the C++ kernels: is it there, complete, and built for the operators of this source?"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import struct
from pathlib import Path

import torch

from leannorm.ops import schema

PATH = Path(__file__).parents[2] / "_C.so"


def load(path: Path = PATH) -> str | None:
    """Load the kernels; the reason if that is not possible, else None."""
    note = path.with_suffix(".reason")
    if not path.exists():
        built = note.read_text().strip() if note.exists() else "the package was installed without building"
        return f"the C++ kernels are not built: {built}"
    try:
        stamp = b"leannorm schemas " + schema_digest()
        why = why_unfit(path, stamp, "other operators than those of this source")
        if why is None:
            torch.ops.load_library(path)
    except (OSError, RuntimeError) as error:
        why = " ".join(str(error).split())
    return None if why is None else f"the C++ kernels cannot be loaded: {why}"


def last_cache(machine: Path | None = None) -> str:
    """The last-level cache as the loaded kernels see it, in words, or the one that a folder describes.

    The folder has the layout of Linux's /sys/devices/system/cpu.
    """
    ask = ctypes.CDLL(str(PATH)).leannorm_last_cache
    ask.restype = ctypes.c_char_p
    cache = (ctypes.c_int64 * 2)()
    source = ask(None if machine is None else bytes(machine), cache)
    if source is None:
        return "unknown"
    sharing = f" that {cache[1]} processors share" if cache[1] > 1 else ""
    return f"{cache[0] / 2**20:g} MiB{sharing} ({source.decode()})"


def why_unfit(path: Path, stamp: bytes, others: str) -> str | None:
    """Why loading the library would end the process or give wrong results; None if it would not.

    A library that fits contains the `stamp`; one that does not was built for `others`.
    """
    with path.open("rb") as file:
        header = file.read(64)
        if len(header) < 64 or _end_of_sections(header) > path.stat().st_size:
            return f"{path} is not whole: install leannorm again"
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data.find(stamp) < 0:
                return f"{path} was built for {others}: build it again"
    return None


def _end_of_sections(header: bytes) -> int:
    """Where the last part of an ELF library ends, in bytes, as nothing beyond is mapped; 0 for other
    formats."""
    if header[:4] != b"\x7fELF":
        return 0
    offset, size, count = struct.unpack_from("<Q10xHH", header, 0x28)
    return int(offset + size * count)


def schema_digest() -> bytes:
    """What setup.py writes into the library: a digest of all operators' schemas."""
    return hashlib.sha256("\n".join(schema.SCHEMAS).encode()).hexdigest()[:16].encode()
