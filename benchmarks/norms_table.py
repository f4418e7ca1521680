"""Makes tables by processor from files of `benchmarks.norms --json FILE` and `benchmarks.rows --json FILE`.

    python -m benchmarks.norms_table [FILE ...]    # default: all of benchmarks/results/norms/ and rows/

The processor on which leannorm does worst comes first. A cell has the speed relative to torch's, and the
share of the time that memory traffic alone needs. Below the table is every shape that misses its goal, with
the speed that it reaches.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.formulas import FORMULAS
from benchmarks.norms import ROWS
from benchmarks.rows import DIRECTIONS, FAMILIES

RESULTS = Path(__file__).parent / "results"
REACH = {row.name: row.reach for row in ROWS} | {
    f"{family.name}, {direction}": reach
    for family in (*FAMILIES, *FORMULAS)
    for direction, reach in zip(DIRECTIONS, family.reach, strict=True)
}


def least(report: dict[str, Any]) -> float:
    """The smallest ratio of a row's speed to its goal."""
    return min(row["ratio"] / REACH[name] for name, row in report["rows"].items())


def short_shapes(report: dict[str, Any]) -> list[str]:
    found = []
    for name, row in report["rows"].items():
        ratios = {"×".join(map(str, s["shape"])): s["torchs"] / s["ours"] for s in row["shapes"]}
        below = [f"{shape} {ratio:.2f}" for shape, ratio in ratios.items() if ratio < REACH[name]]
        if below:
            found.append(f"{name} (goal {REACH[name]:g}): {', '.join(below)}")
    return found


def table(reports: list[dict[str, Any]]) -> str:
    reports = sorted(reports, key=least)
    numbers = range(1, len(reports) + 1)
    lines = [f"| times torch's speed / share of the floor | {' | '.join(map(str, numbers))} |"]
    lines.append("|---" * (len(reports) + 1) + "|")
    for name in REACH:
        rows = [report["rows"].get(name) for report in reports]
        if not any(rows):
            continue
        cells = [f"{row['ratio']:.2f} / {row['floor']:.2f}" if row else "" for row in rows]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for number, report in zip(numbers, reports, strict=True):
        about = f"{report['processor']}; {report['threads']} threads, {report['dtype']}"
        lines += ["", f"{number}: {about}. Below the goal:"]
        lines += [f"- {line}" for line in short_shapes(report)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path)
    files = parser.parse_args().files
    tables = [files] if files else [sorted((RESULTS / name).glob("*.json")) for name in ("norms", "rows")]
    print("\n\n".join(table([json.loads(file.read_text()) for file in of]) for of in tables))


if __name__ == "__main__":
    main()
