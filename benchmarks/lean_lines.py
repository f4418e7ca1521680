"""Draws held bytes against time from the results of `benchmarks.lean_transformers`, one plot a model.

python -m benchmarks.lean_lines [RESULTS.json] [--into docs]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.lean_chart import STYLE, text
from benchmarks.lean_transformers import RESULTS

LEFT, TOP, WIDTH, HEIGHT, GAP = 56, 48, 300, 220, 76
COLOURS = {"lean": "#2563eb", "checkpoint": "#ea580c", "torch.compile": "#7c3aed"}


def series(rows: list[dict[str, Any]]) -> dict[str, list[tuple[float, float, str]]]:
    """(time, held, setting) of each kind of setting, from the lightest to the slowest; all begin at stock."""
    found: dict[str, list[tuple[float, float, str]]] = {}
    for name in COLOURS:
        points = [(r["ratio"], r["kept_ratio"], r["setting"]) for r in rows if r["setting"].startswith(name)]
        if points:
            found[name] = sorted([(1.0, 1.0, "stock"), *points], key=lambda point: (-point[1], point[0]))
    return found


def plot(rows: list[dict[str, Any]], left: float, title: str) -> list[str]:
    """Axes, and one line of each kind; the further down and left, the better."""
    slowest = max(1.4, *(row["ratio"] for row in rows)) + 0.05
    fastest = min(0.95, *(row["ratio"] for row in rows)) - 0.02

    def at(time: float, held: float) -> tuple[float, float]:
        x = left + (time - fastest) / (slowest - fastest) * WIDTH
        return x, TOP + (1 - held) * HEIGHT

    bottom = TOP + HEIGHT
    parts = [f'<path d="M{left:g} {TOP}V{bottom}H{left + WIDTH:g}" stroke="#9ca3af" fill="none"/>']
    parts += [text(left, TOP - 12, title)]
    for held in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(text(left - 6, at(1, held)[1] + 4, f"{held:g}", "end"))
    for i in range(int(fastest * 10) + 1, int(slowest * 10) + 1, 2):
        parts.append(text(at(i / 10, 0)[0], bottom + 16, f"{i / 10:g}", "middle"))
    for name, points in series(rows).items():
        placed = [at(time, held) for time, held, _ in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{line}" stroke="{COLOURS[name]}" fill="none"/>')
        for (x, y), (_, _, setting) in zip(placed, points, strict=True):
            label = setting.replace('"', "&quot;")
            circle = f'cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{COLOURS[name]}"'
            parts.append(f"<circle {circle}><title>{label}</title></circle>")
    return parts


def chart(rows: list[dict[str, Any]], model: str) -> str:
    """A plot for each dtype of one model, side by side."""
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows if row["model"] == model))
    parts = [text(LEFT, 18, f"{model}: held bytes (up) and step time (right), of stock's")]
    for i, dtype in enumerate(dtypes):
        mine = [row for row in rows if row["model"] == model and row["dtype"] == dtype]
        parts += plot(mine, LEFT + i * (WIDTH + GAP), dtype)
    below = TOP + HEIGHT + 40
    for i, name in enumerate(series([row for row in rows if row["model"] == model])):
        parts.append(
            f'<rect x="{LEFT + 130 * i}" y="{below - 11}" width="12" height="12" fill="{COLOURS[name]}"/>'
        )
        parts.append(text(LEFT + 130 * i + 18, below, name))
    width = LEFT + len(dtypes) * (WIDTH + GAP)
    body = "\n".join(parts)
    size = f'viewBox="0 0 {width} {below + 14}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="{STYLE}">\n{body}\n</svg>\n'


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS)
    parser.add_argument("--into", type=Path, default=Path("docs"))
    options = parser.parse_args()
    rows = json.loads(options.results.read_text())
    for model in dict.fromkeys(row["model"] for row in rows):
        (options.into / f"lean_{model}.svg").write_text(chart(rows, model))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
