"""Draws the README's chart from the results of `python -m benchmarks.lean --json FILE`.

python -m benchmarks.lean_chart RESULTS.json CHART.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

LEFT, WIDTH, BAR, GAP = 240, 420, 15, 16
COLOURS = {"norm": "#2563eb", "conv": "#0d9488"}
STYLE = "font: 13px system-ui, sans-serif; fill: #6b7280"


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def bar(y: float, row: dict[str, Any]) -> list[str]:
    kept, time, setting = row["kept"], row["time"], row["setting"]
    label = f"{kept:.2f} of the bytes, {time:.2f} of the time"
    return [
        f'<rect x="{LEFT}" y="{y:g}" width="{kept * WIDTH:.1f}" height="{BAR}" fill="{COLOURS[setting]}"/>',
        text(LEFT + WIDTH + 10, y + BAR - 3, label),
    ]


def chart(rows: list[dict[str, Any]]) -> str:
    """Bars from 0 to stock's bytes, in one group per model, in the order of the file."""
    rows = [row for row in rows if row["setting"] in COLOURS]
    models = list(dict.fromkeys(row["model"] for row in rows))
    parts = [text(LEFT, 20, "Bytes kept for the backward pass under lean(), of stock autograd's")]
    for i, (setting, colour) in enumerate(COLOURS.items()):
        parts.append(f'<rect x="{LEFT + 90 * i}" y="32" width="12" height="12" rx="2" fill="{colour}"/>')
        parts.append(text(LEFT + 90 * i + 18, 43, f'"{setting}"'))
    y = 60.0
    for model in models:
        mine = [row for row in rows if row["model"] == model]
        middle = y + len(mine) * (BAR + 2) / 2 + 4
        parts.append(text(LEFT - 10, middle, model, "end"))
        for row in mine:
            parts += bar(y, row)
            y += BAR + 2
        y += GAP
    stock = LEFT + WIDTH
    parts.append(f'<path d="M{LEFT} 54V{y - 8:g}M{stock} 54V{y - 8:g}" stroke="#9ca3af" fill="none"/>')
    parts.append(text(stock, y + 8, "stock", "end"))
    size = f'viewBox="0 0 {LEFT + WIDTH + 250} {y + 20:g}"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="{STYLE}">\n{body}\n</svg>\n'


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("chart", type=Path)
    options = parser.parse_args()
    options.chart.write_text(chart(json.loads(options.results.read_text())))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
