"""Reads and writes the files of `benchmarks/results/`: what was measured, where, when and by which commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent / "results"


def processor() -> str:
    """The processor's name and last-level cache, torch's instruction set, and the limit of leannorm's."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    cache = max((int(size.read_text().strip().removesuffix("K")) for size in sizes), default=0)
    capability = torch.backends.cpu.get_cpu_capability()
    limit = os.environ.get("LEANNORM_ISA", "none")
    name = names[0] if names else platform.processor()
    return f"{name}, {cache / 2**10:.0f} MiB of last cache, torch uses {capability}, LEANNORM_ISA {limit}"


def shown(name: str) -> str:
    """The word that people read for a key of these files."""
    return {"stock": "baseline", "stock, again": "baseline, again", "held": "kept"}.get(name, name)


def about() -> dict[str, Any]:
    """The machine, the date, the commit and the command of this run."""
    commit = _git("rev-parse", "--short", "HEAD") or "unknown"
    changed = ", changed" if _git("status", "--porcelain", "--", ":/src", ":/csrc") else ""
    return {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__.split("+")[0],
        "date": date.today().isoformat(),
        "commit": commit + changed,
        "command": " ".join(["python -m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
    }


def write(file: Path, rows: Sequence[dict[str, Any]], *key: str) -> None:
    """Add a run to a file. Earlier rows stay under their own runs, except those with the key of a new row."""
    new = {tuple(row.get(k) for k in key) for row in rows}
    runs = json.loads(file.read_text()) if file.exists() else []
    for run in runs:
        run["rows"] = [row for row in run["rows"] if tuple(row.get(k) for k in key) not in new]
    this = about()
    rows = [*(row for run in runs if {**run, **this} == run for row in run["rows"]), *rows]
    runs = [run for run in runs if run["rows"] and {**run, **this} != run]
    file.write_text(json.dumps([*runs, {**this, "rows": rows}], indent=1) + "\n")


def _git(*command: str) -> str:
    done = subprocess.run(["git", *command], cwd=FOLDER, capture_output=True, text=True)
    return done.stdout.strip()


def read(file: Path) -> list[dict[str, Any]]:
    """The rows of a file, each with its run as `about`."""
    runs = json.loads(file.read_text())
    return [
        {**row, "about": {k: v for k, v in run.items() if k != "rows"}} for run in runs for row in run["rows"]
    ]
