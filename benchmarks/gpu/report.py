"""The results of a run on a GPU, written to disk after every number, and the time that is left."""

from __future__ import annotations

import datetime
import importlib
import json
import os
import platform
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class OutOfTimeError(BaseException):
    """The time is up. Not an Exception, so that no handler takes it for a failed measurement."""


class Report:
    """Rows by section, notes about omitted measurements, and wrong results. Written after every change."""

    def __init__(self, device: torch.device, folder: Path, minutes: float, only: str) -> None:
        self.device, self.started, self.seconds = device, time.monotonic(), 60 * minutes
        self.data: dict[str, Any] = {**environment(device), "rows": [], "steps": [], "small": [], "tuned": []}
        self.data |= {"notes": [], "wrong": []}
        name = re.sub(r"[^a-z0-9]+", "-", self.data["device"].lower()).strip("-")
        self.path = folder / f"gpu-{name}{'-' + only if only else ''}.json"
        folder.mkdir(parents=True, exist_ok=True)
        self.flush()

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.started)

    def has(self, seconds: float, what: str) -> bool:
        """Whether the time suffices for `what`, which may take `seconds`; if not, note that it is omitted."""
        if self.left >= seconds:
            return True
        self.note(f"left out, {self.left:.0f} s remain: {what}")
        return False

    def add(self, section: str, row: dict[str, Any]) -> None:
        self.data[section].append(row)
        self.flush()

    def note(self, text: str) -> None:
        self.data["notes"].append(text)
        print(f"  note: {text}", flush=True)
        self.flush()

    def wrong(self, text: str) -> None:
        self.data["wrong"].append(text)
        print(f"  WRONG: {text}", flush=True)
        self.flush()

    def attempt(self, what: str, run: Callable[[], None]) -> None:
        """Call `run`. An exception is recorded as wrong, and the benchmark continues."""
        try:
            run()
        except Exception as error:
            traceback.print_exc()
            self.wrong(f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:600]}")

    def flush(self) -> None:
        """Write to a temporary file, then rename it, so that a killed run leaves the last complete file."""
        self.data["seconds"] = time.monotonic() - self.started
        temporary = self.path.with_suffix(".part")
        temporary.write_text(json.dumps(self.data, indent=1) + "\n")
        os.replace(temporary, self.path)


def environment(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "device": "smoke" if device.type == "cpu" else torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python -m benchmarks.gpu", *_without_folder(sys.argv[1:])]),
    }
    for package in ("triton", "torchvision", "timm", "liger_kernel", "quack"):
        try:
            found[package] = getattr(importlib.import_module(package), "__version__", "there")
        except Exception as error:  # not installed, or built for another torch
            found[package] = f"none ({type(error).__name__})"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "driver": _driver()}
        found |= {"multiprocessors": properties.multi_processor_count, "l2_bytes": properties.L2_cache_size}
        found |= {"memory_bytes": properties.total_memory}
    return found


def _without_folder(arguments: list[str]) -> list[str]:
    """Without the folder of the results, which does not affect them."""
    at = arguments.index("--out") if "--out" in arguments else len(arguments)
    return arguments[:at] + arguments[at + 2 :]


def _driver() -> str | None:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
