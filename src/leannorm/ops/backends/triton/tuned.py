"""Choices measured on this device, instead of `tiling.DEFAULT`: a file that `benchmarks.gpu --tune` writes.

It is the JSON file that LEANNORM_TUNED names (none, if that is empty), else `leannorm/tuned.json` in the
user's cache folder: an object of device names, each with the Triton that it was measured with, the
multiprocessors of the device and the numbers of a `Choice`. An entry that cannot be read, or was measured
elsewhere, is not used.
"""

from __future__ import annotations

import json
import warnings
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from leannorm._files import cached, write_json
from leannorm.ops.backends.triton.tiling import Choice

# what the kernels can be launched with
ALLOWED: dict[str, tuple[int, ...]] = {
    "in_flight": (16, 32, 64),
    "warps": (2, 4, 8),
    "moments": tuple(range(1, 17)),
    "sums": tuple(range(1, 17)),
    "mapping": (4, 8, 16, 32),
    "moments_stages": (1, 2, 3, 4),
    "sums_stages": (1, 2, 3, 4),
    "mapping_stages": (1, 2, 3, 4),
    "sets_stages": (1, 2, 3, 4),
    "alone_stages": (1, 2, 3),  # with four, devices run out of shared memory
    "rounds": (0, 8, 16, 32, 64),
    "run_stages": (0, 2, 3, 4),
}
_RESIDENT = 64  # warps per multiprocessor, of which fewer fit if each has 32 registers per thread


class RefusedError(ValueError):
    """An entry that must not be used, and why."""


def path() -> Path | None:
    """Where the file is, or would be; None if there is to be none."""
    return cached("LEANNORM_TUNED", "tuned.json")


def triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


def read(entry: Any, processors: int) -> Choice:
    """The entry of a device with this many multiprocessors; `RefusedError` if it is not valid."""
    if not isinstance(entry, dict) or set(entry) != {"triton", "multiprocessors", *Choice._fields}:
        fields = ", ".join(("triton", "multiprocessors", *Choice._fields))
        raise RefusedError(f"an entry is an object of {fields}, got {entry!r}")
    if entry["triton"] != triton_version():
        raise RefusedError(f"it was measured with Triton {entry['triton']}, this is {triton_version()}")
    if entry["multiprocessors"] != processors:
        raise RefusedError(
            f"it was measured on {entry['multiprocessors']} multiprocessors, the device has {processors}"
        )
    for name, allowed in ALLOWED.items():
        if type(entry[name]) is not int or entry[name] not in allowed:
            raise RefusedError(f"{name} must be one of {', '.join(map(str, allowed))}, got {entry[name]!r}")
    choice = Choice(**{name: entry[name] for name in Choice._fields})
    if choice.warps * max(choice.moments, choice.sums) > _RESIDENT:
        raise RefusedError(
            f"moments and sums times warps must be at most {_RESIDENT}, which are resident; "
            f"got {choice.moments}, {choice.sums} and {choice.warps}"
        )
    return choice


def load(device: str, processors: int) -> Choice | None:
    """The choice for a device of this name; None where there is none, with a warning where it is refused."""
    file = path()
    try:
        if file is None or not file.is_file():
            return None
        entries = json.loads(file.read_text())
        if not isinstance(entries, dict):
            raise RefusedError(f"the file is an object of devices' names, got {type(entries).__name__}")
        return read(entries[device], processors) if device in entries else None
    except (OSError, ValueError) as error:  # RefusedError and JSON's are ValueErrors
        warnings.warn(
            f"the kernels are launched as without {file}: {error}. Measure again with python -m "
            "benchmarks.gpu --tune, or remove the file",
            stacklevel=2,
        )
        return None


@cache
def choice_for(device: torch.device) -> Choice | None:
    """What is used on the device from the first call on; None for the defaults."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return load(properties.name, properties.multi_processor_count)


def save(file: Path, device: str, processors: int, choice: Choice) -> None:
    """Write the device's entry; those of others stay."""
    entry = {"triton": triton_version(), "multiprocessors": processors, **choice._asdict()}
    read(entry, processors)
    entries = {}
    if file.is_file():
        try:
            entries = json.loads(file.read_text())
        except ValueError:
            entries = {}
        entries = entries if isinstance(entries, dict) else {}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, entries | {device: entry})
